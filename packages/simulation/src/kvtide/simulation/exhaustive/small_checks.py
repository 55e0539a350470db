"""What must hold in every state of the search, whichever way led there; asked once of each.

| holds | against |
| - | - |
| every byte has at most one owner, every unit is counted once | `verify_units` |
| what is bound is what somebody holds; units lie apart, inside the arena and behind the prefix | the shadow |
| virtual pages are minted while some band binds a part of them, and only then | the shadow |
| what is fixed or under a transfer lies where it lay, and nobody else has its bytes | the shadow |
| a forward that has retired lies behind the schedule stream | the order of accesses |
| nothing pends behind a forward that is over | forwards in flight |
| `units_fit` and `admits` say yes exactly where some layout holds | an exhaustive placement (`reach`) |
| questions are answered from what the chain is now (looked at after every action) | `verify_snapshots` |
| with everything ended and freed, books are those of a new chain | some states, chosen by their digest |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtide.chain import ChainStatistics
from kvtide.plan import ArenaLayout
from kvtide.simulation.exhaustive.ordered_device import CELL_BYTES, SCHEDULE
from kvtide.simulation.exhaustive.small_steps import free_units, step
from kvtide.simulation.exhaustive.small_world import SmallUse, SmallWorld
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.reach import Need, some_layout_holds


class Placements:
    """Exhaustive answers to capacity questions; a tiny arena has few different ones, so each is worked out once."""

    def __init__(self, layout: ArenaLayout) -> None:
        """Of one arena."""
        self._layout = layout
        self._known: dict[tuple[tuple[Need, ...], tuple[tuple[int, int], ...]], bool] = {}
        self.asked: set[tuple[object, ...]] = set()
        """Facts of capacity about which the allocator has answered: spans, live units, counts, what stays. Its answers are pure
        functions of them (D4), as long as no snapshot is stale, which is looked at after every action."""

    def holds(self, needs: tuple[Need, ...], blocked: tuple[tuple[int, int], ...]) -> bool:
        """Whether bands can stand so (`some_layout_holds`)."""
        question = needs, blocked
        answer = self._known.get(question)
        if answer is None:
            answer = self._known[question] = some_layout_holds(self._layout, needs, blocked)
        return answer


def check_state(world: SmallWorld, placements: Placements) -> None:
    """Raise `CheckFailedError`, or `InvariantError`, for a state that should not be."""
    world.chain.verify_units()
    live = [set(world.chain.live_units(band.name).tolist()) for band in world.facts.bands]
    _check_claims(world, _check_bindings(world, live))
    statistics = world.chain.statistics()
    _check_ids(world, statistics)
    _check_order(world, statistics)
    _check_answers(world, statistics, live, placements)


def _check_bindings(world: SmallWorld, live_by_place: Sequence[set[int]]) -> dict[int, tuple[int, int]]:
    """Cell → band and virtual unit of whoever has it."""
    owners: dict[int, tuple[int, int]] = {}
    prefix = world.facts.layout.prefix_bytes // CELL_BYTES
    for band in world.facts.bands:
        live = live_by_place[band.place]
        placed = world.by_unit(band.place)
        if {physical for physical, _ in placed} != live or len(live) != len(placed):
            raise CheckFailedError(
                "wrong_binding", f"band {band.name!r} binds units {sorted(live)}, held are those of {placed}"
            )
        for physical, virtual in placed:
            for cell in world.cells([(band.place, physical)]):
                if cell in owners or not prefix <= cell < len(world.device.contents):
                    raise CheckFailedError(
                        "byte_accounting",
                        f"unit {physical} of band {band.name!r} lies on bytes of {owners.get(cell, 'nobody in the arena')}",
                    )
                owners[cell] = band.place, virtual
    return owners


def _check_ids(world: SmallWorld, statistics: ChainStatistics) -> None:
    pages = {virtual // band.ratio for band in world.facts.attention for virtual in world.held[band.place]}
    minted = max(world.facts.layout.virtual_page_count - 1, 0) - statistics.free_page_ids
    if minted != len(pages):
        raise CheckFailedError(
            "ledger_leak", f"{minted} virtual pages are not free, parts are held of {len(pages)}"
        )


def _check_claims(world: SmallWorld, owners: Mapping[int, tuple[int, int]]) -> None:
    for use in _claims(world):
        for (place, physical), cells in zip(
            use.places, map(world.cells, ([one] for one in use.places)), strict=True
        ):
            found = {owners[cell] for cell in cells if cell in owners}
            own = {
                unit
                for unit in use.units
                if unit[0] == place and world.placed([unit]) == ((place, physical),)
            }
            if found and found != own:
                raise CheckFailedError(
                    "disturbed_use",
                    f"unit {physical} of band {place}, under a {use.kind}, now lies under {found}",
                )
            if not found and use.is_fixed and use.stage != "quarantined" and use.units:
                raise CheckFailedError(
                    "disturbed_use", f"unit {physical} of band {place} is fixed, and has moved"
                )


def _claims(world: SmallWorld) -> list[SmallUse]:
    return [use for use in world.uses() if use.is_fixed or use.is_open_transfer]


def _check_order(world: SmallWorld, statistics: ChainStatistics) -> None:
    retired = world.chain.steps.retired_through
    behind = world.device.behind(SCHEDULE)
    for record, event in world.flying:
        if record.forward <= retired and event.behind & ~behind:
            raise CheckFailedError(
                "unordered_overlap",
                f"forward {record.forward} counts as retired, and the schedule stream has not waited for it",
            )
    if not world.flying:
        left = [band.name for band in statistics.bands if band.pending_units]
        if left:
            raise CheckFailedError("ledger_leak", f"nothing is in flight, and units of {left} pend")


def _check_answers(
    world: SmallWorld, statistics: ChainStatistics, live: Sequence[set[int]], placements: Placements
) -> None:
    chain, facts = world.chain, world.facts
    held = [len(units) for units in world.held]
    around = not facts.shape.waits_for_transfers
    stays: list[set[int]] = [set() for _ in facts.bands]
    blocked = set()
    for use in _claims(world):
        if not (use.is_fixed or around):
            continue
        for place, physical in use.places:
            span = chain.span(facts.bands[place].name)
            if span.first_page <= physical < span.end_page:
                stays[place].add(physical)
            else:
                start = facts.bands[place].grid.origin_bytes + physical * facts.bands[place].grid.unit_bytes
                blocked.add((start, start + facts.bands[place].grid.unit_bytes))
    extra = [len(units - own) for units, own in zip(stays, live, strict=True)]
    # Freed, a unit that stays gives no room; one that is under a transfer is not named.
    evictable = [count - len(own & units) for count, own, units in zip(held, live, stays, strict=True)]
    if any(use.is_open_transfer for use in world.uses()):
        evictable = [0] * len(held)
    runs = tuple(sorted(blocked))
    facts_of_capacity = (
        *((chain.span(band.name), *sorted(units)) for band, units in zip(facts.bands, live, strict=True)),
        *((band.pending_units, band.vacated_units, band.withheld_units) for band in statistics.bands),
        *map(frozenset, stays),
        runs,
        *evictable,
    )
    if facts_of_capacity in placements.asked:
        return
    placements.asked.add(facts_of_capacity)
    for asked in facts.shape.questions:
        counts = [asked.get(band.name, 0) for band in facts.bands]
        for freed in ([0] * len(held), evictable):
            needs = tuple(
                Need(count - less + more + ask, tuple(sorted(units)))
                for count, less, more, ask, units in zip(held, freed, extra, counts, stays, strict=True)
            )
            expected = placements.holds(needs, runs)
            if any(freed):
                named = {band.name: less for band, less in zip(facts.bands, freed, strict=True)}
                answer, question = chain.admits(asked, named), f"admits, {named} evicted,"
            else:
                answer, question = chain.units_fit(asked), "units_fit"
            if answer != expected:
                raise CheckFailedError(
                    "capacity_answer",
                    f"{question} says {answer} to {asked}; {'some' if expected else 'no'} layout holds them",
                )
            if freed == evictable:
                break


def check_drains(world: SmallWorld, empty: tuple[object, ...]) -> None:
    """Raise unless the state, once everything is ended and freed, has the books of an empty chain; the state is used up."""
    while world.flying:
        step(world, ("process",))
    for use in list(world.uses()):
        if use.kind == "fix":
            step(world, ("unfix",))
        elif use.stage == "quarantined":
            step(world, ("prove",))
        elif use.stage == "announced":
            step(world, ("withdraw load" if use.kind == "load" else "withdraw receive",))
        else:
            step(world, ("end copy" if use is world.copy else "end transfer",))
    if world.debt is not None:
        step(world, ("pay",))
    units = [
        (band.place, virtual) for band in world.facts.bands for virtual in sorted(world.held[band.place])
    ]
    free_units(world, tuple(units))
    for band in world.facts.bands:
        span, ledger = world.chain.span(band.name), world.chain.ledger(band.name)
        ledger.check_idle()
        if span.page_count or not ledger.is_clear:
            raise CheckFailedError(
                "ledger_leak",
                f"band {band.name!r} still spans {span} with nothing held, clear: {ledger.is_clear}",
            )
    left = world.chain.books()
    if left != empty:
        raise CheckFailedError(
            "ledger_leak", f"with nothing held the books are {left}, those of a new chain {empty}"
        )
