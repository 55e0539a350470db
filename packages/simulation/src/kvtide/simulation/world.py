"""The state of one run: the requests of one scheduler, its forwards in flight, and the allocators it drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from kvtide.device import IntArray
from kvtide.simulation import scheduler
from kvtide.simulation.allocators import Allocators
from kvtide.simulation.bands import NONE, SimulatedBand
from kvtide.simulation.forward import plan_forward
from kvtide.simulation.holders import Holder
from kvtide.simulation.rank import Rank
from kvtide.simulation.requests import Batch, BatchEntry, BatchTake, Request, renamed
from kvtide.simulation.scenario import Scenario
from kvtide.simulation.uses import Kind, Stage, Use

T = TypeVar("T")


class World(Allocators):
    """See the module's docstring."""

    ends_within_waits = True
    """Whether a request may be over while a relief waits: a trace holds what an allocator is told between its answers, not within one."""

    def __init__(self, scenario: Scenario) -> None:
        """Empty arenas and no request; raises `PlanError` for a scenario that cannot be laid out."""
        super().__init__(scenario)
        self.requests: list[Request] = []
        """Running, in the order of their admission."""
        self.free_rows = list(range(scenario.row_count))
        self.batch = Batch()
        """What the next forward will run."""
        self.flying: list[tuple[Request, ...]] = []
        """Requests of each forward in flight, oldest first; some may be over."""
        self.flying_writes: list[dict[str, IntArray]] = []
        """What each of them writes, by band."""
        self.holders: list[Holder] = []
        """Whoever else holds units, in the order of joining."""
        self.looks = 0
        """How often all of this was looked at."""
        self._admitted = 0

    # ── requests ──

    def open_request(self, state_slots: IntArray) -> Request:
        """A new request in a free row."""
        request = Request(self._admitted, self.free_rows.pop(0), state_slots=state_slots.tolist())
        self._admitted += 1
        self.requests.append(request)
        return request

    def append_pages(self, request: Request, pages: IntArray) -> None:
        """A request's row grows by virtual pages."""
        for rank in self.ranks:
            scheduler.stage_row(rank, request.row, len(request.pages), pages)
        request.pages = np.concatenate([request.pages, pages])

    def retire(self, requests: Sequence[Request], band: SimulatedBand, units: IntArray) -> None:
        """Free window pages of running requests; a virtual page that returns leaves its row."""
        self.free(band, units)
        self._forget_returned(requests)

    def rehome_rows(
        self, giver: Request, taker: Request, band: SimulatedBand, sources: IntArray, targets: IntArray
    ) -> None:
        """Let a window's pages of one request stand for another's; a virtual page that returns leaves its row."""
        self.rehome(band, sources, targets)
        self.batch.takes = [take.renamed(band.name, sources, targets) for take in self.batch.takes]
        for writes in self.flying_writes:
            if band.name in writes:
                writes[band.name] = renamed(writes[band.name], sources, targets)
        # Forwards that look at the pages under their old names are over whoever has them now, too.
        self.flying = [
            (*each, taker) if giver in each and taker not in each else each for each in self.flying
        ]
        self._forget_returned([giver])

    def _forget_returned(self, requests: Sequence[Request]) -> None:
        """Columns of virtual pages that have returned read as the sink."""
        for request in requests:
            gone = np.flatnonzero((request.pages > 0) & ~self.minted[request.pages])
            request.pages[gone] = 0
            for column in gone.tolist():
                for rank in self.ranks:
                    scheduler.stage_row(rank, request.row, column, np.zeros(1, np.int64))

    def close(self, requests: Sequence[Request]) -> None:
        """Free all that requests hold, windows first, and their rows."""
        for band, units in self.held_by(requests):
            self.free(band, units)
        self._forget(requests)

    def held_by(self, requests: Sequence[Request]) -> list[tuple[SimulatedBand, IntArray]]:
        """Virtual units that requests hold in each band, windows first and state last."""
        bands = sorted(self.bands, key=lambda band: (band.is_state, band.is_owner))
        return [
            (band, np.concatenate([*(request.bound(band, self.shadow) for request in requests), NONE]))
            for band in bands
        ]

    def _forget(self, requests: Sequence[Request]) -> None:
        """They are over, and hold nothing."""
        for request in requests:
            self.requests.remove(request)
            self.batch.drop(request)
            self.free_rows.append(request.row)

    def make_room(self, operation: str, asked: Mapping[str, int], call: Callable[[Rank], T]) -> list[T]:
        """See `Allocators.make_room`: with a last send that it waits for, a request may be over before the call goes on."""
        closing = self.closing()
        units = {name: self.held_by([request]) for name, request in closing.items()}
        for rank in self.ranks:
            rank.freed_with = dict(units)
        answers = super().make_room(operation, asked, call)
        for name, request in closing.items():
            if name not in self.ranks[0].freed_with:
                for band, freed in units[name]:
                    self.note_freed(band, freed)
                self._forget([request])
                self.facts["requests over within a wait"] += 1
        for rank in self.ranks:
            rank.freed_with = {}
        return answers

    def closing(self) -> dict[str, Request]:
        """Name of a last send → the request that a relief ends which waits for it."""
        if not self.ends_within_waits:
            return {}
        return {
            use.name: use.parked
            for use in self.uses.uses
            if use.closes and use.is_open_transfer and use.parked is not None
        }

    # ── uses ──

    def park(self, use: Use, request: Request) -> None:
        """A request may not run before its load, its receive or its last send lets it."""
        self.requests.remove(request)
        use.parked = request

    def unpark(self, use: Use) -> Request | None:
        """Its request, if it has one, may run from now on."""
        request, use.parked = use.parked, None
        if request is not None:
            self.requests.append(request)
        return request

    def over(self, use: Use) -> None:
        """The ledger was told that an open use is over: a receive has arrived, a request may run again."""
        super().over(use)
        self.unpark(use)

    # ── forwards ──

    def launch(
        self,
        entries: Sequence[BatchEntry],
        *,
        unknown: Sequence[SimulatedBand] = (),
        has_completion: bool = False,
        while_open: Callable[[Rank], None] | None = None,
    ) -> None:
        """Launch one forward over `entries` and record it on every rank; the open batch's takes are paid by its writes.

        The ledger is told that writes in `unknown` bands are unknown. `while_open` runs between launch and recording.
        """
        work = plan_forward(self.bands, self.shadow, entries)
        for each in work.bands:
            self.shadow.write(each.band, each.written, each.mask, each.numbers)
        writes: dict[str, IntArray | None] = {each.band.name: each.written for each in work.bands}
        writes |= dict.fromkeys(band.name for band in unknown)
        loads = [
            load
            for load in self.uses.of(Kind.LOAD, Stage.OPEN)
            if any(np.isin(each.looked_up, load.units.get(each.band.name, NONE)).any() for each in work.bands)
        ]

        def launch_on(rank: Rank) -> None:
            record = rank.steps.forward_launched()
            if while_open is not None:
                while_open(rank)
            scheduler.wait_for_loads(rank, [load.ends[rank.place] for load in loads])
            scheduler.launch(
                rank,
                record,
                work,
                writes,
                declares_read_end=self.scenario.declares_read_end,
                has_completion=has_completion,
            )
            for take in self.batch.takes:
                rank.chain.written(take.taken[rank.place])

        self.on_each("launch", launch_on)
        for entry in entries:
            entry.request.length = entry.end
        self.flying.append(tuple(entry.request for entry in entries))
        self.flying_writes.append({each.band.name: each.written for each in work.bands})
        self.facts["forwards"] += 1
        self.batch = Batch()
        for holder in self.holders:
            holder.launched(entries)

    def abandon(self, *, is_launched: bool = False, has_metadata: bool = False) -> None:
        """Give the open batch up, perhaps after its launch, perhaps after its metadata phase was queued; its debts are paid."""
        if is_launched:
            work = plan_forward(self.bands, self.shadow, self.batch.entries)
            queued = work if has_metadata else None
            self.on_each("abort", lambda rank: scheduler.abort(rank, rank.steps.forward_launched(), queued))
        for take in self.batch.takes:
            self.on_each("pay_zero_debt", partial(_pay, take))
            for name, units in take.promised.items():
                self.shadow.pay(name, units)
        entries, self.batch = self.batch.entries, Batch()
        for holder in self.holders:
            holder.abandoned(entries, is_launched=is_launched)

    def process(self) -> tuple[Request, ...]:
        """Process the oldest forward in flight on every rank; its requests."""
        for rank in self.ranks:
            scheduler.process_oldest(rank)
        self.flying_writes.pop(0)
        requests = self.flying.pop(0)
        for holder in self.holders:
            holder.processed(requests)
        return requests

    def forwards_over(self, request: Request) -> int:
        """Forwards in flight that include a request."""
        return sum(request in each for each in self.flying)


def _pay(take: BatchTake, rank: Rank) -> None:
    rank.chain.pay_zero_debt(take.taken[rank.place])
