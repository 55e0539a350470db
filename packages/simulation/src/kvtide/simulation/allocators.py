"""The ranks' allocators: told the same, asked the same, and held to one answer.

Everything an operation does to the allocator goes through here, to every rank alike, with the seam told to refuse device reads
and host waits meanwhile (row V3). Answers that differ from rank to rank end the run at once, and so do those that an exhaustive
search of layouts contradicts. Who asks, and for whom, stands in `world`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from kvtide.chain import BandTake, Taken, TakeRefusal
from kvtide.device import IntArray
from kvtide.plan import pack
from kvtide.simulation.bands import NONE, SimulatedBand, simulated_bands
from kvtide.simulation.claims import held_places, immovable, moved_holds
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.handed import IN_PLACE, MOVED, SETTLED, Figures, Handed
from kvtide.simulation.rank import Rank, free, modelled_device
from kvtide.simulation.reach import Need, some_layout_holds
from kvtide.simulation.refusals import check_refusal, freeable_units
from kvtide.simulation.scenario import Scenario
from kvtide.simulation.shadow import Shadow
from kvtide.simulation.uses import Kind, Use, UseBook

T = TypeVar("T")


class Allocators:
    """One allocator a rank, and the shadow that says what each of them must hold."""

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
            Rank(
                place,
                scenario,
                self.layout,
                self.bands,
                modelled_device(scenario, self.layout, self.bands, place),
            )
            for place in range(len(scenario.rank_seeds))
        ]
        self.uses = UseBook()
        """Copies, transfers and fixed units that are not over."""
        self.facts: Counter[str] = Counter()
        """What happened how often, beside the operations' outcomes."""

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
        """Whether nothing fixes a state slot and no transfer touches it: nobody copies onto one that stays for somebody else."""
        return self.state is not None and not any(
            (use.is_fixed or use.is_touched) and slot in use.units.get(self.state.name, NONE)
            for use in self.uses.uses
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
        held = held_places(self.uses, self.ranks[0])
        needs = self._needs_around_holds(asked) if held else None
        waits = self.scenario.waits_for_transfers and any(use.is_open_transfer for use in self.uses.uses)
        goes_around = waits and self.some_layout_holds(asked, around_transfers=True)
        answers = self.on_each(operation, call, may_wait_for="network" if waits else None)
        waited = self.waited_for(operation)
        if waited and goes_around:
            raise CheckFailedError(
                "needless_wait", f"{operation} waits for {waited}, around which a layout goes"
            )
        moved = moved_holds(held, self.ranks[0])
        if moved and needs is not None and some_layout_holds(self.layout, *needs):
            raise CheckFailedError(
                "disturbed_use",
                f"{operation} moves units that {moved[0].name} holds, around which a layout goes",
            )
        self.end_waited(waited)
        return answers

    def waited_for(self, operation: str) -> list[str]:
        """Names of the transfers that reliefs have waited for since the last call, alike on every rank; `end_waited` comes next."""
        waited = []
        for rank in self.ranks:
            waited.append([transfer.name for transfer in rank.waited])
            rank.waited = []
        if any(each != waited[0] for each in waited):
            raise CheckFailedError("rank_divergence", f"ranks wait for {waited} in one round of {operation}")
        return waited[0]

    def end_waited(self, names: Sequence[str]) -> None:
        """Transfers of these names, which the ledger knows to be over, are."""
        for use in [use for use in self.uses.uses if use.is_open_transfer and use.name in names]:
            self.facts[f"{use.kind.value}s waited for"] += 1
            self.over(use)

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
        if isinstance(answers[0], TakeRefusal):
            self.check_unchanged("a refused take", before)
            self.note_refused(answers[0], asked)
            return None
        units, promised = self.note_taken(taken[0], bands)
        now = self.figures()
        how = IN_PLACE
        if now.moved > figures.moved:
            how = MOVED
        elif now.settles > figures.settles:
            how = SETTLED
        return Handed(taken, units, promised, how)

    def free(self, band: SimulatedBand, units: IntArray) -> None:
        """Free pages of one attention band, or state slots, on every rank; virtual pages that nobody holds any more return."""
        self.on_each("a free", lambda rank: free(rank.chain, band, units))
        self.note_freed(band, units)

    def rehome(self, band: SimulatedBand, sources: IntArray, targets: IntArray) -> None:
        """Let a window's pages stand for others on every rank; virtual pages that nobody holds any more return."""
        self.on_each("rehome_window", lambda rank: rank.chain.rehome_window(band.name, sources, targets))
        self.note_rehomed(band, sources, targets)

    def copy_state(self, sources: IntArray, targets: IntArray) -> None:
        """Copy state slots on every rank."""
        self.on_each("copy_state_slots", lambda rank: rank.chain.copy_state_slots(sources, targets))
        self.note_copied(sources, targets)

    # ── what a call has changed, for whoever calls each rank's allocator himself ──

    def note_taken(
        self, taken: Taken, bands: Mapping[str, BandTake] | None
    ) -> tuple[dict[str, IntArray], dict[str, IntArray]]:
        """A take has handed these out; virtual units bound, and those of them promised to be written whole, by band."""
        units, promised = self._handed_out(taken, bands)
        for band in self.bands:
            self.shadow.bind(band.name, units[band.name], promised[band.name])
        self.minted[taken.pages] = True
        self.facts["takes"] += 1
        self.facts["units promised"] += sum(map(len, promised.values()))
        self.facts["units of older pages bound"] += sum(len(one.held) for one in (bands or {}).values())
        return units, promised

    def note_refused(self, refusal: TakeRefusal, asked: Mapping[str, int]) -> None:
        """A call for `asked` was refused; what the refusal says beside that is compared with every layout."""
        freeable = freeable_units(self.uses, self.layout, self.ranks[0])
        check_refusal(refusal, asked, layout=self.layout, freeable=freeable, holds=self.some_layout_holds)
        self.facts["refusals"] += 1

    def note_freed(self, band: SimulatedBand, units: IntArray) -> None:
        """Pages of one attention band, or state slots, were freed."""
        self.shadow.unbind(band.name, units)
        if not band.is_state:
            self._return_pages(np.unique(units // band.ratio))

    def note_rehomed(self, band: SimulatedBand, sources: IntArray, targets: IntArray) -> None:
        """A window's pages stand for others."""
        self.shadow.rehome(band.name, sources, targets)
        self._return_pages(np.unique(sources // band.ratio))

    def note_copied(self, sources: IntArray, targets: IntArray) -> None:
        """State slots were copied."""
        assert self.state is not None, "state slots are copied"
        self.shadow.copy(self.state.name, sources, targets)

    def _return_pages(self, pages: IntArray) -> None:
        """Note those of `pages` of which no band binds a part any more."""
        held = np.zeros(len(pages), np.bool_)
        for each in self.attention:
            held |= self.shadow.bound[each.name][each.sub_pages(pages)].reshape(-1, each.ratio).any(axis=1)
        self.minted[pages[~held]] = False

    def figures(self) -> Figures:
        """What one rank's allocator has done since the start."""
        statistics = self.ranks[0].chain.statistics()
        return Figures(
            moved=statistics.moved_units,
            zeroed=sum(band.zeroed_units for band in statistics.bands),
            settles=sum(band.settles for band in statistics.bands),
        )

    # ── uses ──

    def written_whole(self, use: Use) -> None:
        """Those of its units that are still held have been written by it."""
        for part in use.parts:
            held = part.still_held(self.shadow)
            words = use.words[part.band.name][held]
            self.shadow.write(part.band, part.units[held], np.ones(words.shape, np.bool_), words[:, 0])
        if use.parked is not None and not use.parked.length:
            use.parked.length = len(use.parked.pages) * self.layout.page_tokens

    def over(self, use: Use) -> None:
        """The ledger was told that an open use is over: a receive has arrived."""
        if use.kind is Kind.RECEIVE:
            self.written_whole(use)
        self.uses.close(use)

    # ── helpers ──

    def _needs_around_holds(self, asked: Mapping[str, int]) -> tuple[list[Need], list[tuple[int, int]]]:
        """What a layout for `asked` has to go around where nothing moves that is held."""
        counts = [len(self.held(band)) + asked.get(band.name, 0) for band in self.bands]
        return immovable(
            self.uses, self.layout, self.ranks[0], counts, around_transfers=True, around_holds=True
        )

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
