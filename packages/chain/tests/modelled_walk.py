"""The shipped allocator on a modelled device: forwards overlap, what runs when is drawn from a seed."""

from __future__ import annotations

import random

import attrs
import numpy as np

from kvtide.chain import Taken
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
from kvtide.ledger import ForwardSteps, LaunchRecord
from kvtide.plan import ArenaLayout

from .walk import chain_over


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
    """Takes, frees and overlapping forwards; every forward reads ids from the mirrors and touches the units they name.

    A forward checks that each unit it reads holds what its last writer left there, and writes a value of its own.
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
        self.chain = chain_over(layout, self.device, self.steps)
        for band in layout.bands:
            if band.has_sink:
                self.device.allow_unordered(
                    self.device.unit_spans(self.grids[band.name], np.zeros(1, np.int64))[0]
                )
        self.held: dict[str, dict[int, int]] = {band.name: {} for band in layout.bands}
        """Band → virtual id → the value of its last writer; 0 as it comes from a take."""
        self.flying: list[FlyingForward] = []
        self.upload_waits_for_forwards = True
        self.moves = 0

    def run(self, step_count: int) -> None:
        """Random calls of a scheduler, each allocator call where it may not wait; ends with nothing in flight."""
        for _ in range(step_count):
            self.random.choice((self.take, self.take, self.free, self.launch, self.launch, self.process))()
            self.chain.verify_byte_accounting()
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
        with self.device.no_host_waits("take"):
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
        touched = self._draw_units()
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
                work.write(span, value)

        name = f"forward {record.forward}"
        device.submit(
            device.forward_stream,
            f"metadata of {name}",
            reads=[device.mirror_span(f"ids:{band}", virtual, virtual + 1) for band, virtual in touched],
            run=metadata,
        )
        spans = [
            self._unit(band, self.chain.physical_units(band, np.array([virtual])))
            for band, virtual in touched
        ]
        device.submit(device.forward_stream, name, reads=spans, writes=spans, run=body)
        end = device.record_event(device.forward_stream)
        self.steps.forward_recorded(record, end)
        self.flying.append(FlyingForward(record, end))
        for band, virtual in touched:
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
