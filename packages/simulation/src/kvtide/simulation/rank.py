"""One rank: the shipped allocator over a device of its own; a modelled one runs work when the rank's seed says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from kvtide.chain import ChainAllocator
from kvtide.device import Event, IntArray, ModelledDevice, ModelledEvent, ModelledStream, Stream, UnitGrid
from kvtide.ledger import CheckLevel, ForwardSteps, InvariantChecks, LaunchRecord, NetworkTransfer
from kvtide.plan import ArenaLayout
from kvtide.simulation.bands import SimulatedBand
from kvtide.simulation.scenario import Scenario
from kvtide.simulation.shadow import Words

ROWS = "rows"
"""Mirror of the request table: `[row_count, column_count]` virtual pages."""


@attrs.frozen(eq=False)
class FlyingForward:
    """One rank's side of a forward that was launched and not processed."""

    record: LaunchRecord
    """In the ledger."""

    end: ModelledEvent
    """What the host waits for before it processes the forward: its own event, or a completion behind it."""


class Rank:
    """Decides as every other rank does; its device runs work when its own seed says."""

    def __init__(
        self,
        place: int,
        scenario: Scenario,
        layout: ArenaLayout,
        bands: tuple[SimulatedBand, ...],
        device: ModelledDevice,
    ) -> None:
        """An empty arena on a device of its own, which nobody has used; `place` is the rank's number."""
        self.place = place
        self.bands = bands
        self.device = device
        self.results: ModelledStream = device.create_stream("results")
        """Where a forward's result is copied to the host."""
        self.column_count = layout.virtual_page_count
        """Pages a row; one request may hold the whole arena."""
        mirrors = device.create_mirrors(
            {
                **{f"ids:{band.name}": band.id_count for band in bands},
                ROWS: scenario.row_count * self.column_count,
            }
        )
        self._prepare_device()
        self.rows = mirrors[ROWS]
        """Where rows are staged."""
        self.steps = ForwardSteps()
        self.chain = ChainAllocator(
            layout,
            device,
            mirrors,
            self.steps,
            checks=InvariantChecks(CheckLevel.STRICT),
            wait_for_transfers=self._wait_for_transfers if scenario.waits_for_transfers else None,
        )
        self.backups: ModelledStream = device.create_stream("backups")
        """Where copies to host memory run."""
        self.loads: ModelledStream = device.create_stream("loads")
        """Where copies from host memory run."""
        self.refills: ModelledStream = device.create_stream("refills")
        """Where copies from host memory onto units that were there before run."""
        self.transfers: dict[NetworkTransfer, ModelledEvent] = {}
        """Transfers that a relief may wait for, and their ends."""
        self.waited: list[NetworkTransfer] = []
        """Those that reliefs have waited for since somebody looked."""
        self.freed_with: dict[str, list[tuple[SimulatedBand, IntArray]]] = {}
        """Name of a transfer → what a relief that waits for it frees there and then, in this order."""
        self.waiter_calls = 0
        """How often a relief has waited."""
        self._ids = {band.name: np.arange(band.id_count) for band in bands}
        self.flying: list[FlyingForward] = []
        """Oldest first."""
        self.units: dict[str, Words] = {band.name: self._words_of(band) for band in bands}
        """Band → its units as words, `[unit_count, words]`; the bytes as they are now, for work that runs."""

    def _prepare_device(self) -> None:
        """With its mirrors made, and nothing queued: sinks are written by anybody."""
        for band in self.bands:
            if band.has_sink:
                self.device.allow_unordered(self.device.unit_spans(band.grid, np.zeros(1, np.int64))[0])

    def _words_of(self, band: SimulatedBand) -> Words:
        """The units of a band, a view of the arena."""
        start = band.grid.origin_bytes
        end = start + band.unit_count * band.grid.unit_bytes
        return self.device.arena_buffer.bytes[start:end].view(np.uint64).reshape(band.unit_count, band.words)

    def _wait_for_transfers(self, transfers: Sequence[NetworkTransfer]) -> None:
        """The host waits until each is over, and ends it; the other rank is asked in the same round."""
        self.waiter_calls += 1
        for transfer in transfers:
            self.device.wait_on_host(self.transfers.pop(transfer))
            self.chain.uses.end(transfer)
            for band, units in self.freed_with.pop(transfer.name, ()):
                free(self.chain, band, units)
            self.waited.append(transfer)

    @property
    def schedule_waits(self) -> int:
        """Waits that were queued on the schedule stream so far."""
        count: int = self.device.schedule_stream.wait_count
        return count

    def table(self, band: SimulatedBand) -> IntArray:
        """Physical unit of every virtual unit, as the host has it."""
        return self.chain.physical_units(band.name, self._ids[band.name])

    def fingerprint(self) -> tuple[Any, ...]:
        """Everything that a refused call must leave alone: places, ids, waits made, work queued."""
        chain, device = self.chain, self.device
        return (
            tuple((chain.span(band.name), self.table(band).tobytes()) for band in self.bands),
            self.steps.retired_through,
            device.schedule_stream.queued_count,
            device.forward_stream.queued_count,
        )

    def mirror(self, name: str) -> Any:
        """A mirror's entries as they are now, int32; for work that runs, and for the host once nothing does."""
        span = self.device.mirror_span(name)
        return span.buffer.bytes[span.start_byte : span.end_byte].view(np.int32)


def free(chain: ChainAllocator, band: SimulatedBand, units: IntArray) -> None:
    """Free pages of one attention band, or state slots."""
    if band.is_state:
        chain.free_state_slots(units)
    else:
        chain.free_pages(band.name, units)


class WatchedDevice(ModelledDevice):
    """Remembers what its schedule stream was made to wait for."""

    def __init__(self, *args: Any, **named: Any) -> None:
        """As a modelled device."""
        super().__init__(*args, **named)
        self.waited_for: dict[int, Event] = {}
        """Events by identity."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See `Device.wait_event`."""
        if stream is self.schedule_stream:
            self.waited_for[id(event)] = event
        super().wait_event(stream, event)


def modelled_device(
    scenario: Scenario, layout: ArenaLayout, bands: tuple[SimulatedBand, ...], place: int
) -> WatchedDevice:
    """A rank's modelled device, which names units in its reports."""
    names = {band.grid: band.name for band in bands}

    def name_units(grid: UnitGrid, first: int, end: int) -> str:
        return f"band {names[grid]!r} units [{first}, {end})"

    return WatchedDevice(
        layout.arena_bytes,
        seed=scenario.rank_seeds[place],
        random_queries=scenario.random_queries,
        name_units=name_units,
    )
