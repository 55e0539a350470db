"""Random takes, frees and forwards on real bytes, beside the dumbest model: a dict of what each unit holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtide.chain import ChainAllocator, Taken, TakeRefusal
from kvtide.device import NumpyDevice, UnitGrid
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


class Walk:
    """An allocator over bytes, and what each live unit must hold."""

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        self.device = NumpyDevice(layout.arena_bytes)
        lengths = {
            f"ids:{band.name}": band.capacity_pages if band.page_tokens is None else layout.virtual_page_count
            for band in layout.bands
        }
        self.steps = ForwardSteps()
        self.chain = ChainAllocator(layout, self.device, self.device.create_mirrors(lengths), self.steps)
        self.held: dict[str, dict[int, int]] = {band.name: {} for band in layout.bands}
        self.in_flight: list[LaunchRecord] = []
        self.written = 0

    def bytes_of(self, band_name: str, virtual: int) -> np.ndarray:
        band = self.layout.band(band_name)
        unit = int(self.chain.physical_units(band_name, np.array([virtual]))[0])
        return self.device.units(UnitGrid(band.origin_bytes, band.unit_bytes))[unit]

    def take(self, pages: int, slots: int) -> Taken | TakeRefusal:
        asked = {b.name: slots if b.page_tokens is None else pages for b in self.layout.bands}
        could = pack(self.layout, [len(self.held[name]) + count for name, count in asked.items()]) is not None
        before = {name: self.chain.live_units(name).tolist() for name in self.held}
        assert self.chain.units_fit(pages=pages, state_slots=slots) == could
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
        for name, units in self.held.items():
            for virtual, value in units.items():
                assert (self.bytes_of(name, virtual) == value).all(), f"{name} {virtual} lost its bytes"
        self.device.upload(self.device.schedule_stream)
        for band in self.layout.bands:
            table = self.device.tables[f"ids:{band.name}"]
            expected = self.chain.physical_units(band.name, np.arange(len(table)))
            assert (table == expected).all(), "the mirror differs from the host"


UNITS = [
    {"full": 48},
    {"state": 112, "full": 48},
    {"4": 80, "full": 48},
    {"state": 112, "4": 80, "full": 48},
    {"state": 32, "9": 160, "4": 48, "full": 112},
    {"9": 96, "4": 48},
    {"state": 64},
    {"state": 208, "30": 16, "9": 80, "4": 48, "full": 64},
]


@pytest.mark.requirement("A2", "A5", "C1", "C2", "C3", "C5", "C11", "D10", "L2", "L3", "X1")
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_contents_survive_every_take_free_and_rearrangement(data: st.DataObject) -> None:
    """The promise of the allocator: a take succeeds exactly when some layout holds it, and no live byte is lost."""
    layout = layout_of(data.draw(st.sampled_from(UNITS)), data.draw(st.integers(700, 2600)))
    walk = Walk(layout)
    token_bands = [band.name for band in layout.bands if band.page_tokens is not None]
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["take", "take", "free", "launch", "process"]))
        if action == "take":
            pages = data.draw(st.integers(0, 5)) if token_bands else 0
            walk.take(pages, data.draw(st.integers(0, 2)) if "state" in walk.held else 0)
        elif action == "free":
            name = data.draw(st.sampled_from(list(walk.held)))
            free = [
                unit
                for unit in walk.held[name]
                if name != layout.owner or not any(unit in walk.held[other] for other in token_bands if other != name)
            ]
            if free:
                walk.free(name, data.draw(st.lists(st.sampled_from(free), unique=True, min_size=1)))
        elif action == "launch" and len(walk.in_flight) < 2:
            record = walk.steps.forward_launched()
            walk.steps.forward_recorded(record, walk.device.record_event(walk.device.forward_stream))
            walk.in_flight.append(record)
        elif action == "process" and walk.in_flight:
            record = walk.in_flight.pop(0)
            walk.steps.forward_processed(record)
            walk.chain.forward_processed(record.forward)
        walk.check()
