"""Rules of the chain's books: which ids are free, where spans end, what a call may name, what is answered beside yes and no."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvtide.chain import TakeRefusal
from kvtide.device import IntArray
from kvtide.simulation.mutations.mutation import (
    Mutation,
    Replacement,
    around,
    during,
    instead,
    nothing_during,
    nowhere,
    without,
)

_ALLOCATOR = "kvtide.chain:ChainAllocator"
_REFUSAL = "kvtide.chain:TakeRefusal"
_PAGES = "kvtide.chain.id_space:VirtualPages"
_IDS = "kvtide.chain.id_space:IdSpace"
_CALLS = "kvtide.chain.allocator"
_TERMS = "kvtide.chain.pricing_terms"
_BAND = "kvtide.chain.band:Band"
_STEPS = "kvtide.ledger:ForwardSteps"
_SIGNALS = "kvtide.ledger.signal_uses:SignalUses"


def _parts_counted_once(original: Replacement) -> Replacement:
    """Sub-pages of one page that go together count as one."""

    def unbound(pages: Any, virtual: IntArray, ratio: int) -> None:
        counts = pages._bound_counts
        if counts is not None:
            before = counts[virtual // ratio] - 1
            original(pages, virtual, ratio)
            counts[virtual // ratio] = before

    return unbound


def _all_but_one(space: Any, ids: IntArray) -> None:
    space._free[space._free_count : space._free_count + len(ids)] = ids[::-1]
    space._free_count += max(0, len(ids) - 1)


def _recorded_once_more(original: Replacement) -> Replacement:
    def record(uses: Any, signal: Any, pages: IntArray) -> None:
        if signal not in uses:
            original(uses, signal, pages)

    return record


def _ended_by_whoever_has_it(uses: Any, what: object, kind: str, has: Any, act: Any) -> None:
    for band in uses._bands:
        if has(band):
            act(band)
            band.release_withheld()


def _asked_once(original: Replacement) -> Replacement:
    """The host has never waited, as far as the take can tell."""

    def take(chain: Any, **named: Any) -> Any:
        relief = chain._relief
        make_room, count = relief.make_room, relief.host_wait_count

        def uncounted(asked: Any) -> Any:
            made = make_room(asked)
            relief.host_wait_count = count
            return made

        relief.make_room = uncounted
        try:
            return original(chain, **named)
        finally:
            del relief.make_room

    return take


def _debts_of_others(original: Replacement) -> Replacement:
    return lambda debts, band, sources, targets: original(debts, band, sources, targets[::-1].copy())


def _tidied_away(original: Replacement) -> Replacement:
    """No fence is met any more once the arrays are made anew."""

    def tidy(fences: Any) -> None:
        before = fences._number_count
        original(fences)
        if fences._number_count < before:
            fences._kinds[: fences._number_count] = -1

    return tidy


def _sent_is_free(original: Replacement) -> Replacement:
    def snapshot(band: Any, *, holds_stay: bool) -> Any:
        found, withheld = original(band, holds_stay=holds_stay), band.withheld_pages
        return found._replace(network_free=int(np.count_nonzero(~band.usage.is_fixed(withheld))))

    return snapshot


def _without_quarantine(original: Replacement) -> Replacement:
    return lambda *args, **named: original(*args, **named)._replace(quarantined_bytes=())


def _for_nothing(original: Replacement) -> Replacement:
    return lambda *args, **named: original(*args, **named)._replace(cost=1)


def _final_as_it_stands(refusal: TakeRefusal) -> bool:
    """What is live counts, as if it were there for good."""
    return not refusal._fits([band.live + band.asked for band in refusal.bands])


def _each_band_alone(refusal: TakeRefusal) -> dict[str, int]:
    def most(place: int, asked: int) -> int:
        alone = [
            [count if place == other else 0 for other in range(len(refusal.bands))]
            for count in range(asked + 1)
        ]
        return max(counts[place] for counts in alone if refusal._fits(counts))

    return {band.name: most(place, band.asked) for place, band in enumerate(refusal.bands) if band.asked}


def _staying_counted_twice(band: Any) -> int:
    occupied: int = band.occupied
    stays: int = sum(extent.page_count for extent in (*band.fixed, *band.network))
    return max(0, occupied - stays)


def book_rules() -> Iterator[Mutation]:
    """See the module's docstring."""
    yield from _ids()
    yield from _calls()
    yield from _prices()
    yield from _answers()
    yield from _large()


def _ids() -> Iterator[Mutation]:
    yield Mutation(
        id="ids.parts",
        rule="a virtual page returns once no band binds any part of it, also when parts go together",
        rows=("C1", "P10"),
        plant=around(f"{_PAGES}.unbound", _parts_counted_once),
    )
    yield Mutation(
        id="ids.pages",
        rule="a free gives back every virtual page that is freed",
        rows=("C1",),
        plant=during(f"{_ALLOCATOR}.free_pages", f"{_IDS}.give_back", _all_but_one),
    )
    yield Mutation(
        id="ids.slots",
        rule="a free gives back every virtual state slot that is freed",
        rows=("C1",),
        plant=during(f"{_ALLOCATOR}.free_state_slots", f"{_IDS}.give_back", _all_but_one),
    )


def _calls() -> Iterator[Mutation]:
    for name, outer, inner, rule in (
        (
            "copied_from",
            "ChainAllocator.copy_state_slots",
            "check_may_read",
            "no state is copied from where a peer still writes",
        ),
        (
            "copied_onto",
            "ChainAllocator.copy_state_slots",
            "check_may_write",
            "no state is copied onto what is fixed or under a transfer",
        ),
        (
            "paid_onto",
            "ChainAllocator.pay_zero_debt",
            "check_may_write",
            "no debt is paid on what is fixed or under a transfer",
        ),
    ):
        yield Mutation(
            id=f"call.{name}",
            rule=rule,
            rows=("L8", "C7"),
            plant=nothing_during(f"{_CALLS}:{outer}", f"{_CALLS}:{inner}"),
        )
    yield Mutation(
        id="call.frees_held",
        rule="what a receive holds is freed by nobody",
        rows=("L8", "T4"),
        plant=during(f"{_CALLS}:units_to_free", "kvtide.ledger:PageUsage.is_held", nowhere),
    )
    yield Mutation(
        id="call.rehomes_onto",
        rule="a window's page is rehomed onto minted pages that stand for nothing, each once",
        rows=("L8", "K8"),
        plant=without("kvtide.chain.rehoming:check_unbound"),
    )
    yield Mutation(
        id="call.rehomes_once",
        rule="a window's page is rehomed to one page",
        rows=("L8", "K8"),
        plant=nothing_during(
            "kvtide.chain.allocator:plan_rehoming", "kvtide.chain.id_space:UnitIds.names_twice", False
        ),
    )
    yield Mutation(
        id="call.begins_once",
        rule="a use is begun once",
        rows=("L8", "L4"),
        plant=around(f"{_SIGNALS}.record", _recorded_once_more),
    )
    yield Mutation(
        id="call.ends_once",
        rule="a use that is over, or never began, is ended by nobody",
        rows=("L8", "L4"),
        plant=around("kvtide.chain.uses:ChainUses._of_all", lambda _: _ended_by_whoever_has_it),
    )


def _prices() -> Iterator[Mutation]:
    for end in ("up", "down"):
        yield Mutation(
            id=f"price.{end}",
            rule=f"a flush of the grow-{end} end costs what it may move",
            rows=("C4",),
            plant=around(f"{_TERMS}:_grow_{end}_terms", _for_nothing),
        )
    yield Mutation(
        id="plan.quarantine",
        rule="plans go around quarantined bytes that left a band",
        rows=("C4", "T6"),
        plant=around("kvtide.chain.relief:Relief._look", _without_quarantine),
    )
    yield Mutation(
        id="plan.vacated_sent",
        rule="vacated units that a send reads are free only to whoever would wait for it",
        rows=("C4", "C7"),
        plant=around(f"{_BAND}.snapshot", _sent_is_free),
    )
    yield Mutation(
        id="take.asked_again",
        rule="what a take names is looked at again once the host has waited",
        rows=("C6", "L8"),
        plant=around(f"{_ALLOCATOR}.take", _asked_once),
    )
    yield Mutation(
        id="debt.rehomed",
        rule="the debt of a page goes along when it is rehomed",
        rows=("A5", "K8"),
        plant=without("kvtide.chain.takes:ZeroDebts.rename"),
    )
    yield Mutation(
        id="debt.named",
        rule="and each page keeps its own",
        rows=("A5", "K8"),
        plant=around("kvtide.chain.takes:ZeroDebts.rename", _debts_of_others),
    )
    yield Mutation(
        id="retire.settle",
        rule="a forward whose units are settled has retired",
        rows=("L6",),
        plant=nothing_during(f"{_BAND}._settle", f"{_STEPS}.wait_queued"),
    )
    yield Mutation(
        id="retire.move",
        rule="a forward that a move waits for has retired",
        rows=("L6",),
        plant=nothing_during(f"{_BAND}._wait_writers", f"{_STEPS}.wait_queued"),
    )


def _answers() -> Iterator[Mutation]:
    yield Mutation(
        id="answer.final",
        rule="a refusal is final only where an empty arena could not hold what was asked for",
        rows=("C5",),
        plant=lambda patch: patch.replace(f"{_REFUSAL}.is_final", property(_final_as_it_stands)),
    )
    yield Mutation(
        id="answer.largest",
        rule="what an empty arena would hold of it is held in all bands at once",
        rows=("C5",),
        plant=instead(f"{_REFUSAL}.largest", _each_band_alone),
    )
    yield Mutation(
        id="answer.serves",
        rule="a unit that stays is one, be it fixed and sent, among those that could be freed for what was refused",
        rows=("C5", "L4"),
        plant=instead("kvtide.chain.refusal:movable_units", _staying_counted_twice),
    )
    yield Mutation(
        id="answer.keeps",
        rule="what a receive holds would not come free",
        rows=("K5", "T4"),
        plant=during("kvtide.chain.uses:ChainUses.keeps", "kvtide.ledger:PageUsage.is_held", nowhere),
    )


def _large() -> Iterator[Mutation]:
    yield Mutation(
        id="large.fences",
        rule="fences outlive the arrays that they stand in",
        rows=("L4",),
        plant=around("kvtide.ledger:FencedBytes._tidy", _tidied_away),
    )
    yield Mutation(
        id="large.holes",
        rule="holes far from the anchor are found again",
        rows=("C2",),
        plant=without("kvtide.chain.hole_set:HoleSet._flag"),
    )
