"""The state of one run: ranks that are told the same, the requests of one scheduler, and what memory must hold.

Everything an operation does to the allocator goes through here, to every rank alike, with the seam told to refuse device reads
and host waits meanwhile (row V3). Answers that differ from rank to rank end the run at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import attrs
import numpy as np

from kvtide.chain import BandTake, Taken, TakeRefusal
from kvtide.device import IntArray
from kvtide.plan import pack
from kvtide.simulation import scheduler
from kvtide.simulation.bands import NONE, SimulatedBand, simulated_bands
from kvtide.simulation.claims import immovable
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.forward import plan_forward
from kvtide.simulation.rank import Rank
from kvtide.simulation.reach import some_layout_holds
from kvtide.simulation.requests import Batch, BatchEntry, BatchTake, Request
from kvtide.simulation.scenario import Scenario
from kvtide.simulation.shadow import Shadow
from kvtide.simulation.uses import Kind, Stage, Use, UseBook

T = TypeVar("T")


@attrs.frozen(eq=False)
class Handed:
    """What a take handed out, by band."""

    taken: tuple[Taken, ...]
    """One a rank."""

    units: Mapping[str, IntArray]
    """Band → virtual units bound."""

    promised: Mapping[str, IntArray]
    """Band → those of them that the taking forward is to write whole."""

    how: str
    """What it took: "in place", "settled" or "moved"."""

    @property
    def pages(self) -> IntArray:
        """New virtual pages."""
        return self.taken[0].pages

    @property
    def state_slots(self) -> IntArray:
        """New virtual state slots."""
        return self.taken[0].state_slots


class Figures(NamedTuple):
    """What one rank's allocator has done since the start."""

    moved: int
    """Units moved."""

    zeroed: int
    """Units zeroed on hand-out."""

    settles: int
    """Waits queued for pending units that a take needed."""


class World:
    """See the module's docstring."""

    def __init__(self, scenario: Scenario) -> None:
        """Empty arenas; raises `PlanError` for a scenario that cannot be laid out."""
        self.scenario = scenario
        self.layout = scenario.layout()
        self.bands = simulated_bands(scenario, self.layout)
        """In chain order."""
        self.state = next((band for band in self.bands if band.is_state), None)
        """The state band, if there is one."""
        self.attention = tuple(band for band in self.bands if not band.is_state)
        """The others."""
        self.windows = tuple(band for band in self.attention if not band.is_owner)
        """Attention bands that let go of pages as a request advances."""
        self.shadow = Shadow(self.bands)
        self.minted = np.zeros(self.layout.virtual_page_count, np.bool_)
        """Which virtual pages somebody holds."""
        self.ranks = [
            Rank(place, scenario, self.layout, self.bands) for place in range(len(scenario.rank_seeds))
        ]
        self.requests: list[Request] = []
        """Running, in the order of their admission."""
        self.free_rows = list(range(scenario.row_count))
        self.batch = Batch()
        """What the next forward will run."""
        self.flying: list[tuple[Request, ...]] = []
        """Requests of each forward in flight, oldest first; some may be over."""
        self.flying_writes: list[dict[str, IntArray]] = []
        """What each of them writes, by band."""
        self.uses = UseBook()
        """Copies, transfers and fixed units that are not over."""
        self.facts: Counter[str] = Counter()
        """What happened how often, beside the operations' outcomes."""
        self._admitted = 0

    # ── every rank alike ──

    def on_each(
        self, operation: str, call: Callable[[Rank], T], *, may_wait_for: str | None = None
    ) -> list[T]:
        """`call` on every rank, where it may neither read the device nor wait; their answers, which must agree.

        `may_wait_for` names the one stream that the host may wait for all the same.
        """
        answers = []
        for rank in self.ranks:
            with rank.device.no_host_waits(operation, except_on=may_wait_for):
                answers.append(call(rank))
        first = _comparable(answers[0])
        for rank, answer in zip(self.ranks, answers, strict=True):
            if _comparable(answer) != first:
                raise CheckFailedError(
                    "rank_divergence",
                    f"{operation} answers {_comparable(answer)} on rank {rank.place}, {first} on rank 0",
                )
        return answers

    def unchanged(self, operation: str, call: Callable[[Rank], T]) -> list[T]:
        """As `on_each`, for a call that must change nothing and queue nothing."""
        before = [rank.fingerprint() for rank in self.ranks]
        answers = self.on_each(operation, call)
        self.check_unchanged(operation, before)
        return answers

    def check_unchanged(self, operation: str, before: Sequence[tuple[Any, ...]]) -> None:
        """Raise `CheckFailedError` for a rank whose fingerprint is not what it was."""
        for rank, then in zip(self.ranks, before, strict=True):
            if rank.fingerprint() != then:
                raise CheckFailedError(
                    "changed_by_refusal", f"{operation} changed rank {rank.place} all the same"
                )

    def held(self, band: SimulatedBand) -> IntArray:
        """Virtual units of a band that somebody holds, ascending."""
        return np.flatnonzero(self.shadow.bound[band.name])

    def movable(self, band: SimulatedBand) -> IntArray:
        """Those of them that nothing fixes and no transfer touches."""
        held = self.held(band)
        free = np.ones(len(held), np.bool_)
        for use in self.uses.uses:
            if use.is_fixed or use.is_touched:
                free &= ~np.isin(held, use.units.get(band.name, NONE))
        return held[free]

    def may_be_written(self, slot: int) -> bool:
        """Whether nothing fixes a state slot: nobody copies onto one that stays for somebody else."""
        return self.state is not None and not any(
            use.is_fixed and slot in use.units.get(self.state.name, NONE) for use in self.uses.uses
        )

    # ── capacity ──

    def units_asked(
        self, pages: int, state_slots: int, bands: Mapping[str, BandTake] | None
    ) -> dict[str, int]:
        """Units that a take binds, by band."""
        asked = {}
        for band in self.bands:
            if band.is_state:
                asked[band.name] = state_slots
            elif band.is_owner or bands is None:
                asked[band.name] = pages * band.ratio
            elif band.name in bands:
                fresh, held = bands[band.name].fresh, bands[band.name].held
                asked[band.name] = (pages * band.ratio if fresh is None else len(fresh)) + len(held)
            else:
                asked[band.name] = 0
        return asked

    def some_layout_holds(
        self,
        asked: Mapping[str, int],
        freed: Mapping[str, int] | None = None,
        *,
        around_transfers: bool | None = None,
    ) -> bool:
        """Whether any layout holds what is live but `freed`, and `asked`; an exhaustive answer.

        What transfers touch stays where it is, unless the allocator may wait for them, or `around_transfers` says so.
        """
        if around_transfers is None:
            around_transfers = not self.scenario.waits_for_transfers
        held = [len(self.held(band)) for band in self.bands]
        freed_units = [(freed or {}).get(band.name, 0) for band in self.bands]
        claimed = any(use.is_fixed or (around_transfers and use.is_touched) for use in self.uses.uses)
        if claimed and any(freed_units):
            # Whatever stays gives no room when it is freed.
            needs, _ = immovable(
                self.uses, self.layout, self.ranks[0], held, around_transfers=around_transfers
            )
            for place, (band, need) in enumerate(zip(self.bands, needs, strict=True)):
                live = set(self.ranks[0].chain.live_units(band.name).tolist())
                staying = sum(page in live for page in need.stays)
                freed_units[place] = min(freed_units[place], held[place] - staying)
        counts = [
            live - less + asked.get(band.name, 0)
            for band, live, less in zip(self.bands, held, freed_units, strict=True)
        ]
        if not claimed:
            return pack(self.layout, counts) is not None
        needs, blocked = immovable(
            self.uses, self.layout, self.ranks[0], counts, around_transfers=around_transfers
        )
        return some_layout_holds(self.layout, needs, blocked)

    def make_room(self, operation: str, asked: Mapping[str, int], call: Callable[[Rank], T]) -> list[T]:
        """As `on_each`, for a call that may wait for transfers, if it was told how and no layout goes around them."""
        waits = self.scenario.waits_for_transfers and any(use.is_open_transfer for use in self.uses.uses)
        goes_around = waits and self.some_layout_holds(asked, around_transfers=True)
        answers = self.on_each(operation, call, may_wait_for="network" if waits else None)
        waited = []
        for rank in self.ranks:
            waited.append([transfer.name for transfer in rank.waited])
            rank.waited = []
        if any(each != waited[0] for each in waited):
            raise CheckFailedError("rank_divergence", f"ranks wait for {waited} in one round of {operation}")
        if waited[0] and goes_around:
            raise CheckFailedError(
                "needless_wait", f"{operation} waits for {waited[0]}, around which a layout goes"
            )
        for use in [use for use in self.uses.uses if use.is_open_transfer and use.name in waited[0]]:
            self.facts[f"{use.kind.value}s waited for"] += 1
            self.over(use)
        return answers

    def ask(self, asked: Mapping[str, int]) -> bool:
        """Ask whether units fit; a wrong answer, or one that changes something, ends the run."""
        return self.question("units_fit", lambda rank: rank.chain.units_fit(asked), asked)

    def question(
        self,
        name: str,
        call: Callable[[Rank], bool],
        asked: Mapping[str, int],
        freed: Mapping[str, int] | None = None,
    ) -> bool:
        """Any question whose answer is whether some layout holds what is live but `freed`, and `asked`."""
        answer = self.unchanged(name, call)[0]
        if answer != self.some_layout_holds(asked, freed):
            raise CheckFailedError(
                "capacity_answer",
                f"{name} says {answer} to {dict(asked)} less {freed or 'nothing'}, {'no' if answer else 'some'} layout holds them",
            )
        return answer

    # ── takes and frees ──

    def take(
        self, *, pages: int = 0, state_slots: int = 0, bands: Mapping[str, BandTake] | None = None
    ) -> Handed | None:
        """Take on every rank; `None` if refused, as it must be exactly when no layout holds it: ids never run out before bytes."""
        asked = self.units_asked(pages, state_slots, bands)
        fits = self.ask(asked)
        before = [rank.fingerprint() for rank in self.ranks]
        figures = self.figures()
        answers = self.make_room(
            "take", asked, lambda rank: rank.chain.take(pages=pages, state_slots=state_slots, bands=bands)
        )
        taken = tuple(answer for answer in answers if isinstance(answer, Taken))
        if bool(taken) != fits:
            raise CheckFailedError(
                "capacity_answer", f"units_fit said {fits} to {asked}, the take says {answers[0]}"
            )
        if not taken:
            self.check_unchanged("a refused take", before)
            self.facts["refusals"] += 1
            return None
        units, promised = self._handed_out(taken[0], bands)
        for band in self.bands:
            self.shadow.bind(band.name, units[band.name], promised[band.name])
        self.minted[taken[0].pages] = True
        now = self.figures()
        how = (
            "moved"
            if now.moved > figures.moved
            else "settled"
            if now.settles > figures.settles
            else "in place"
        )
        self.facts["takes"] += 1
        self.facts["units promised"] += sum(map(len, promised.values()))
        self.facts["units of older pages bound"] += sum(len(one.held) for one in (bands or {}).values())
        return Handed(taken, units, promised, how)

    def free(self, band: SimulatedBand, units: IntArray) -> None:
        """Free pages of one attention band, or state slots, on every rank; virtual pages that nobody holds any more return."""
        if band.is_state:
            self.on_each("free_state_slots", lambda rank: rank.chain.free_state_slots(units))
        else:
            self.on_each("free_pages", lambda rank: rank.chain.free_pages(band.name, units))
        self.shadow.unbind(band.name, units)
        if not band.is_state:
            self._return_pages(np.unique(units // band.ratio))

    def rehome(
        self, requests: Sequence[Request], band: SimulatedBand, sources: IntArray, targets: IntArray
    ) -> None:
        """Let a window's pages of `requests` stand for others; a virtual page that returns leaves its row."""
        self.on_each("rehome_window", lambda rank: rank.chain.rehome_window(band.name, sources, targets))
        self.shadow.rehome(band.name, sources, targets)
        self._return_pages(np.unique(sources // band.ratio))
        self._forget_returned(requests)

    def copy_state(self, sources: IntArray, targets: IntArray) -> None:
        """Copy state slots on every rank."""
        self.on_each("copy_state_slots", lambda rank: rank.chain.copy_state_slots(sources, targets))
        assert self.state is not None, "state slots are copied"
        self.shadow.copy(self.state.name, sources, targets)

    def figures(self) -> Figures:
        """What one rank's allocator has done since the start."""
        statistics = self.ranks[0].chain.statistics()
        return Figures(
            moved=statistics.moved_units,
            zeroed=sum(band.zeroed_units for band in statistics.bands),
            settles=sum(band.settles for band in statistics.bands),
        )

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

    def close(self, requests: Sequence[Request]) -> None:
        """Free all that requests hold, windows first, and their rows."""
        for band in sorted(self.attention, key=lambda band: band.is_owner):
            held = [request.bound(band, self.shadow) for request in requests]
            self.free(band, np.concatenate([*held, NONE]))
        if self.state is not None:
            self.free(
                self.state, np.array([slot for each in requests for slot in each.state_slots], np.int64)
            )
        for request in requests:
            self.requests.remove(request)
            self.batch.drop(request)
            self.free_rows.append(request.row)

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

    def written_whole(self, use: Use) -> None:
        """Those of its units that are still held have been written by it."""
        for part in use.parts:
            held = part.still_held(self.shadow)
            words = use.words[part.band.name][held]
            self.shadow.write(part.band, part.units[held], np.ones(words.shape, np.bool_), words[:, 0])
        if use.parked is not None and not use.parked.length:
            use.parked.length = len(use.parked.pages) * self.layout.page_tokens

    def over(self, use: Use) -> None:
        """The ledger was told that an open use is over: a receive has arrived, a request may run again."""
        if use.kind is Kind.RECEIVE:
            self.written_whole(use)
        self.uses.close(use)
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
        self.batch = Batch()

    def process(self) -> tuple[Request, ...]:
        """Process the oldest forward in flight on every rank; its requests."""
        for rank in self.ranks:
            scheduler.process_oldest(rank)
        self.flying_writes.pop(0)
        return self.flying.pop(0)

    def forwards_over(self, request: Request) -> int:
        """Forwards in flight that include a request."""
        return sum(request in each for each in self.flying)

    # ── helpers ──

    def _return_pages(self, pages: IntArray) -> None:
        """Note those of `pages` of which no band binds a part any more."""
        held = np.zeros(len(pages), np.bool_)
        for each in self.attention:
            held |= self.shadow.bound[each.name][each.sub_pages(pages)].reshape(-1, each.ratio).any(axis=1)
        self.minted[pages[~held]] = False

    def _forget_returned(self, requests: Sequence[Request]) -> None:
        """Columns of virtual pages that have returned read as the sink."""
        for request in requests:
            gone = np.flatnonzero((request.pages > 0) & ~self.minted[request.pages])
            request.pages[gone] = 0
            for column in gone.tolist():
                for rank in self.ranks:
                    scheduler.stage_row(rank, request.row, column, np.zeros(1, np.int64))

    def _handed_out(
        self, taken: Taken, bands: Mapping[str, BandTake] | None
    ) -> tuple[dict[str, IntArray], dict[str, IntArray]]:
        """Virtual units that a take bound, and those of them it left unzeroed on a promise, by band."""
        units: dict[str, IntArray] = {}
        promised: dict[str, IntArray] = {}
        for band, asked in self._asked_of(bands):
            if band.is_state:
                bound = taken.state_slots
            elif asked is None:
                bound = band.sub_pages(taken.pages) if band.is_owner or bands is None else NONE
            else:
                fresh = band.sub_pages(taken.pages)
                bound = np.concatenate([fresh if asked.fresh is None else fresh[asked.fresh], asked.held])
            is_promised = np.zeros(len(bound), np.bool_)
            if asked is not None and asked.unwritten is not None:
                is_promised[:] = True
                is_promised[asked.unwritten] = False
            units[band.name], promised[band.name] = bound, bound[is_promised]
        return units, promised

    def _asked_of(
        self, bands: Mapping[str, BandTake] | None
    ) -> Iterator[tuple[SimulatedBand, BandTake | None]]:
        for band in self.bands:
            yield band, None if bands is None else bands.get(band.name)


def _comparable(answer: object) -> Any:
    """An answer as a value that can be compared between ranks."""
    if isinstance(answer, Taken):
        return ("taken", answer.pages.tolist(), answer.state_slots.tolist())
    if isinstance(answer, TakeRefusal):
        return answer.rule, answer.bands
    return answer.tolist() if isinstance(answer, np.ndarray) else answer


def _pay(take: BatchTake, rank: Rank) -> None:
    rank.chain.pay_zero_debt(take.taken[rank.place])
