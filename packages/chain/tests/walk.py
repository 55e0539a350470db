"""An allocator on watched bytes, for every test of this package."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.chain import ChainAllocator, Taken, TakeRefusal
from kvtide.device import Event, ImmediateEvent, IntArray, NumpyDevice, Stream, UnitGrid
from kvtide.ledger import ForwardSteps, LaunchRecord
from kvtide.plan import (
    ArenaLayout,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    lay_out,
    pack,
    plan_kv_storage,
)


def layout_of(unit_bytes: dict[str, int], arena_bytes: int) -> ArenaLayout:
    """An arena whose bands have the given unit bytes: `state`, `full`, or a window's length."""
    layers = []
    for layer, (name, unit) in enumerate(unit_bytes.items()):
        if name == "state":
            part = KVPart(StateGeometry((TensorDecl("s", (unit,), DType.UINT8),)), StateLifetime())
        else:
            lifetime = FullLifetime() if name == "full" else WindowLifetime(int(name))
            part = KVPart(MLAGeometry(unit, 0, DType.UINT8), lifetime)
        layers.append(KVLayerDecl(layer, (part,)))
    return lay_out(plan_kv_storage(layers, page_tokens=1), arena_bytes)


class WatchingDevice(NumpyDevice):
    """Copies pair after pair, as the seam promises, and reports a write or move of bytes that a forward may still touch."""

    def __init__(self, arena_bytes: int) -> None:
        super().__init__(arena_bytes)
        self.touched_by: npt.NDArray[np.int64] = np.full(arena_bytes, -1, np.int64)
        """Newest forward that may touch each byte."""
        self.cleared = -1
        """Newest forward that was processed or that the schedule stream waits for."""
        self.forward_of: dict[int, int] = {}
        self.upload_count = 0

    def record_forward(self, forward: int) -> ImmediateEvent:
        event = self.record_event(self.forward_stream)
        self.forward_of[id(event)] = forward
        return event

    def query_event(self, event: Event) -> bool:
        """Not yet: a wait that is saved would not be seen."""
        return False

    def wait_event(self, stream: Stream, event: Event) -> None:
        assert stream.name == "schedule"
        self.cleared = max(self.cleared, self.forward_of[id(event)])

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        self._check(grid, np.concatenate([sources, targets]), "a move")
        for source, target in zip(sources, targets, strict=True):
            super().copy_units(stream, grid, np.array([source]), np.array([target]))

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        self._check(grid, units, "zeroing")
        super().zero_units(stream, grid, units)

    def _check(self, grid: UnitGrid, units: IntArray, action: str) -> None:
        for unit in units.tolist():
            start = grid.origin_bytes + unit * grid.unit_bytes
            forward = self.touched_by[start : start + grid.unit_bytes].max()
            assert forward <= self.cleared, (
                f"{action} of bytes from {start} that forward {forward} may still touch"
            )


def chain_over(layout: ArenaLayout, device: NumpyDevice, steps: ForwardSteps) -> ChainAllocator:
    """An allocator with mirrors of its id tables."""
    lengths = {f"ids:{band.name}": layout.id_count(band) for band in layout.bands}
    return ChainAllocator(layout, device, device.create_mirrors(lengths), steps)


class Walk:
    """An allocator over bytes, and what each live unit must hold."""

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        self.device = WatchingDevice(layout.arena_bytes)
        self.steps = ForwardSteps()
        self.chain = chain_over(layout, self.device, self.steps)
        self.held: dict[str, dict[int, int]] = {band.name: {} for band in layout.bands}
        self.in_flight: list[LaunchRecord] = []
        self.events: list[Event] = []
        self.written = 0

    def bytes_of(self, band_name: str, virtual: int) -> np.ndarray:
        band = self.layout.band(band_name)
        unit = int(self.chain.physical_units(band_name, np.array([virtual]))[0])
        return self.device.units(UnitGrid(band.origin_bytes, band.unit_bytes))[unit]

    def take(self, pages: int, slots: int) -> Taken | TakeRefusal:
        asked = {b.name: slots if b.page_tokens is None else pages for b in self.layout.bands}
        could = pack(self.layout, [len(self.held[name]) + count for name, count in asked.items()]) is not None
        before = {name: self.chain.live_units(name).tolist() for name in self.held}
        assert self.chain.units_fit(asked) == could
        taken = self.chain.take(pages=pages, state_slots=slots)
        assert isinstance(taken, Taken) == could
        if isinstance(taken, TakeRefusal):
            assert before == {name: self.chain.live_units(name).tolist() for name in self.held}
            return taken
        for name in self.held:
            for virtual in (taken.state_slots if name == "state" else taken.pages).tolist():
                assert not self.bytes_of(name, virtual).any(), "handed out with a former tenant's bytes"
                self.written = self.written % 250 + 1
                self.bytes_of(name, virtual)[:] = self.written
                self.held[name][virtual] = self.written
        return taken

    def free(self, name: str, virtual: list[int]) -> None:
        ids = np.array(virtual, np.int64)
        if name == "state":
            self.chain.free_state_slots(ids)
        else:
            self.chain.free_pages(name, ids)
        for unit in virtual:
            del self.held[name][unit]

    def check(self) -> None:
        self.chain.verify_byte_accounting()
        assert self.steps.retired_through == self.device.cleared, (
            "a wait was queued that the ledger was not told of"
        )
        for name, units in self.held.items():
            for virtual, value in units.items():
                assert (self.bytes_of(name, virtual) == value).all(), f"{name} {virtual} lost its bytes"
        self.device.upload(self.device.schedule_stream)
        for band in self.layout.bands:
            table = self.device.tables[f"ids:{band.name}"]
            expected = self.chain.physical_units(band.name, np.arange(len(table)))
            assert (table == expected).all(), "the mirror differs from the host"

    def launch(self) -> None:
        """A forward that may touch every byte now live."""
        record = self.steps.forward_launched()
        for band in self.layout.bands:
            for unit in self.chain.live_units(band.name).tolist():
                self.device.touched_by[band.start_byte(unit) : band.start_byte(unit + 1)] = record.forward
        self.events.append(self.device.record_forward(record.forward))
        self.chain.forward_recorded(
            self.steps.forward_recorded(record, self.events[-1]),
            {name: np.array(list(units), np.int64) for name, units in self.held.items()},
        )
        self.in_flight.append(record)

    def process(self) -> None:
        record = self.in_flight.pop(0)
        self.steps.host_synchronised(self.events.pop(0))
        self.steps.forward_processed(record)
        self.device.cleared = max(self.device.cleared, record.forward)
        self.chain.forward_processed(record.forward)
