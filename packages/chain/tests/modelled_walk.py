"""The shipped allocator on a modelled device: forwards overlap, what runs when is drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import numpy as np

from kvtide.chain import ChainAllocator, Taken
from kvtide.device import (
    ByteSpan,
    Event,
    IntArray,
    ModelledDevice,
    ModelledEvent,
    RunningWork,
    Stream,
    UnitGrid,
)
from kvtide.ledger import Access, ForwardSteps, HostCopy, LaunchRecord, NetworkTransfer, Reservation
from kvtide.plan import ArenaLayout


class WaitDroppingDevice(ModelledDevice):
    """A modelled device that forgets a wait when it is told to."""

    drop_next_wait = False
    """Whether the next wait of a stream is dropped."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        drop, self.drop_next_wait = self.drop_next_wait, False
        if not drop:
            super().wait_event(stream, event)


@attrs.frozen(eq=False)
class FlyingForward:
    """A forward that has been launched and not processed."""

    record: LaunchRecord
    end: ModelledEvent


class ModelledWalk:
    """Takes, frees and overlapping forwards; every forward reads ids from the mirrors and the units they name.

    It checks that each holds what its last writer left there, and writes a value of its own to most of them.
    """

    def __init__(self, layout: ArenaLayout, seed: int, *, device_seed: int | None = None) -> None:
        """Calls are drawn from `seed`, timing from `device_seed` if it is another."""
        self.layout = layout
        self.random = random.Random(seed)
        self.grids = {band.name: UnitGrid(band.origin_bytes, band.unit_bytes) for band in layout.bands}
        names = {grid: name for name, grid in self.grids.items()}
        self.device = WaitDroppingDevice(
            layout.arena_bytes,
            seed=seed if device_seed is None else device_seed,
            random_queries=True,
            name_units=lambda grid, first, end: f"band {names[grid]!r} pages [{first}, {end})",
        )
        self.steps = ForwardSteps()
        lengths = {f"ids:{band.name}": layout.id_count(band) for band in layout.bands}
        self.chain = ChainAllocator(
            layout,
            self.device,
            self.device.create_mirrors(lengths),
            self.steps,
            wait_for_transfers=self.wait_for_transfers,
        )
        for band in layout.bands:
            if band.has_sink:
                self.device.allow_unordered(
                    self.device.unit_spans(self.grids[band.name], np.zeros(1, np.int64))[0]
                )
        self.held: dict[str, dict[int, int]] = {band.name: {} for band in layout.bands}
        """Band → virtual id → the value of its last writer; 0 as it comes from a take."""
        self.flying: list[FlyingForward] = []
        self.busy: dict[object, list[tuple[str, int]]] = {}
        """Units that an open copy or send reads: their requests run no forward meanwhile."""
        self.copies: list[HostCopy] = []
        self.sends: list[tuple[NetworkTransfer, ModelledEvent]] = []
        self.reservations: list[Reservation] = []
        self.copy_stream = self.device.create_stream("backups")
        self.host_pool = self.device.create_buffer("host pool", 1 << 16)
        self.host_waits = 0
        self.upload_waits_for_forwards = True
        self.with_uses = False
        self.moves = 0
        self.sent_units = 0

    def run(self, step_count: int) -> None:
        """Random calls of a scheduler, each allocator call where it may not wait; ends with nothing in flight."""
        actions = (self.take, self.take, self.free, self.launch, self.launch, self.process)
        if self.with_uses:
            actions += (
                self.take,
                self.free,
                self.flush,
                self.back_up,
                self.send,
                self.reserve,
                self.end_a_use,
                self.end_a_use,
            )
        for _ in range(step_count):
            self.random.choice(actions)()
            self.chain.verify_byte_accounting()
        while self.copies or self.sends or self.reservations:
            self.end_a_use()
        while self.flying:
            self.process()
        self.device.synchronize()
        for name, units in self.held.items():
            for virtual, value in units.items():
                unit = int(self.chain.physical_units(name, np.array([virtual]))[0])
                assert (self.device.units(self.grids[name])[unit] == value).all(), (
                    f"{name} {virtual} lost its bytes"
                )

    # ── a scheduler's calls ──

    def take(self) -> None:
        pages = self.random.randrange(5) if len(self._token_bands()) else 0
        slots = self.random.randrange(3) if "state" in self.held else 0
        before = self.chain.statistics().moved_units
        with self.device.no_host_waits("take", except_on="network"):
            taken = self.chain.take(pages=pages, state_slots=slots)
        self.moves += self.chain.statistics().moved_units - before
        if isinstance(taken, Taken):
            for name in self.held:
                units = taken.state_slots if name == "state" else taken.pages
                self.held[name].update(dict.fromkeys(units.tolist(), 0))

    def free(self) -> None:
        name = self.random.choice(list(self.held))
        others = [other for other in self._token_bands() if other != name]
        free = [
            unit
            for unit in self.held[name]
            if name != self.layout.owner or not any(unit in self.held[other] for other in others)
        ]
        chosen = self.random.sample(free, self.random.randrange(len(free) + 1))
        reserved = self.chain.ledger(name).reserved(
            self.chain.physical_units(name, np.array(chosen, np.int64))
        )
        chosen = [
            unit for unit, is_reserved in zip(chosen, reserved.tolist(), strict=True) if not is_reserved
        ]
        with self.device.no_host_waits("free"):
            if name == "state":
                self.chain.free_state_slots(np.array(chosen, np.int64))
            else:
                self.chain.free_pages(name, np.array(chosen, np.int64))
        for unit in chosen:
            del self.held[name][unit]

    def launch(self) -> None:
        """As `KVStorage.launch_forward`: barrier, upload, the forward stream behind it; then a forward in two pieces."""
        if len(self.flying) >= 2:
            return
        device = self.device
        if self.flying and self.upload_waits_for_forwards:
            device.wait_event(device.schedule_stream, self.flying[-1].end)
        record = self.steps.forward_launched()
        device.upload(device.schedule_stream)
        device.wait_event(device.forward_stream, device.record_event(device.schedule_stream))
        busy = {unit for units in self.busy.values() for unit in units}
        touched = [unit for unit in self._draw_units() if unit not in busy]
        written = [unit for unit in touched if self.random.random() < 0.7]
        value = record.forward % 250 + 1
        expected = {unit: self.held[unit[0]][unit[1]] for unit in touched}
        found: dict[tuple[str, int], ByteSpan] = {}

        def metadata(work: RunningWork) -> None:
            for name, virtual in touched:
                physical = work.read(device.mirror_span(f"ids:{name}", virtual, virtual + 1)).view(np.int32)
                found[name, virtual] = self._unit(name, physical.astype(np.int64))

        def body(work: RunningWork) -> None:
            for unit, span in found.items():
                assert (work.read(span) == expected[unit]).all(), (
                    f"forward {record.forward} reads a wrong {unit}"
                )
                if unit in written:
                    work.write(span, value)

        name = f"forward {record.forward}"
        device.submit(
            device.forward_stream,
            f"metadata of {name}",
            reads=[device.mirror_span(f"ids:{band}", virtual, virtual + 1) for band, virtual in touched],
            run=metadata,
        )
        spans = {
            (band, virtual): self._unit(band, self.chain.physical_units(band, np.array([virtual])))
            for band, virtual in touched
        }
        device.submit(
            device.forward_stream,
            name,
            reads=list(spans.values()),
            writes=[spans[unit] for unit in written],
            run=body,
        )
        end = device.record_event(device.forward_stream)
        writes: dict[str, list[int]] = {name: [] for name in self.held}
        for band, virtual in written:
            writes[band].append(virtual)
        self.chain.forward_recorded(
            self.steps.forward_recorded(record, end),
            {name: np.array(units, np.int64) for name, units in writes.items()},
        )
        self.flying.append(FlyingForward(record, end))
        for band, virtual in written:
            self.held[band][virtual] = value

    def process(self) -> None:
        if not self.flying:
            return
        forward = self.flying.pop(0)
        self.device.wait_on_host(forward.end)
        self.steps.host_synchronised(forward.end)
        self.steps.forward_processed(forward.record)
        with self.device.no_host_waits("forward_processed"):
            self.chain.forward_processed(forward.record.forward)

    # ── what others do with units ──

    def flush(self) -> None:
        before, retired = self.chain.statistics().moved_units, self.steps.retired_through
        with self.device.no_host_waits("flush"):
            self.chain.flush_opportunistic(self.random.randrange(1, 4))
        assert self.steps.retired_through == retired, "a flush waited for a forward"
        self.moves += self.chain.statistics().moved_units - before

    def back_up(self) -> None:
        """Copy some live units to the host, on a stream of its own behind both others."""
        units = self._draw_units()[:4]
        if not units:
            return
        device, stream = self.device, self.copy_stream
        for other in (device.forward_stream, device.schedule_stream):
            device.wait_event(stream, device.record_event(other))
        spans = [
            self._unit(band, self.chain.physical_units(band, np.array([virtual]))) for band, virtual in units
        ]
        expected = [self.held[unit[0]][unit[1]] for unit in units]

        def read(work: RunningWork) -> None:
            for span, value in zip(spans, expected, strict=True):
                assert (work.read(span) == value).all(), "a backup reads what was not there"

        device.submit(stream, "backup", reads=spans, run=read)
        copy = HostCopy("backup", Access.READ, device.record_event(stream))
        self.chain.uses.begin(copy, _by_band(units))
        self.busy[copy] = units
        self.copies.append(copy)

    def send(self) -> None:
        """Let a network engine read some live units, once the host has seen that what wrote them is over."""
        units = self._draw_units()[:3]
        if not units or self.flying:
            return
        self.device.synchronize()
        spans = [
            self._unit(band, self.chain.physical_units(band, np.array([virtual]))) for band, virtual in units
        ]
        expected = [self.held[unit[0]][unit[1]] for unit in units]

        def read(work: RunningWork) -> None:
            for span, value in zip(spans, expected, strict=True):
                assert (work.read(span) == value).all(), "a send reads what was not there"

        end = self.device.start_transfer(f"send {len(self.sends)}", reads=spans, run=read)
        transfer = NetworkTransfer(f"send {len(self.sends)}", Access.READ)
        self.chain.uses.begin(transfer, _by_band(units))
        self.busy[transfer] = units
        self.sends.append((transfer, end))
        self.sent_units += len(units)

    def reserve(self) -> None:
        """Fix some live units for a while."""
        units = self._draw_units()[:2]
        if units and not self.reservations:
            self.reservations.append(Reservation("load"))
            self.chain.uses.fix(self.reservations[0], _by_band(units))

    def end_a_use(self) -> None:
        """Agree that something is over."""
        choice = self.random.randrange(3)
        if choice == 0 and self.copies:
            copy = self.copies.pop(self.random.randrange(len(self.copies)))
            assert isinstance(copy.finish, ModelledEvent)
            self.device.wait_on_host(copy.finish)
            self.chain.uses.end(copy)
            del self.busy[copy]
        elif choice == 1 and self.sends:
            transfer, end = self.sends.pop(self.random.randrange(len(self.sends)))
            self.device.wait_on_host(end)
            self.chain.uses.end(transfer)
            del self.busy[transfer]
        elif self.reservations:
            self.chain.uses.unfix(self.reservations.pop())

    def wait_for_transfers(self, transfers: Sequence[NetworkTransfer]) -> None:
        self.host_waits += 1
        for transfer, end in [each for each in self.sends if each[0] in transfers]:
            self.device.wait_on_host(end)
            self.chain.uses.end(transfer)
            del self.busy[transfer]
            self.sends.remove((transfer, end))

    # ── helpers ──

    def _token_bands(self) -> list[str]:
        return [band.name for band in self.layout.bands if band.page_tokens is not None]

    def _draw_units(self) -> list[tuple[str, int]]:
        """Some of what is held in each band."""
        return [
            (name, virtual)
            for name, units in self.held.items()
            for virtual in units
            if self.random.random() < 0.6
        ]

    def _unit(self, band: str, physical: IntArray) -> ByteSpan:
        return self.device.unit_spans(self.grids[band], physical)[0]


def _by_band(units: Sequence[tuple[str, int]]) -> dict[str, IntArray]:
    names = {name for name, _ in units}
    return {
        name: np.array([virtual for band, virtual in units if band == name], np.int64)
        for name in sorted(names)
    }
