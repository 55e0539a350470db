"""What is looked at after each action, and what only where nothing is in flight.

After an action only host tables are compared, all of them, which costs a few microseconds a band; contents are checked by the
forwards that read them. Whole arenas and mirrors are compared at rest.
"""

from __future__ import annotations

import numpy as np

from kvtide.chain import ChainStatistics
from kvtide.simulation.claims import check_claims, check_keeps
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.rank import ROWS, Rank, WatchedDevice
from kvtide.simulation.shadow import check_words
from kvtide.simulation.use_steps import end_all
from kvtide.simulation.world import World


def after_action(world: World) -> None:
    """Ranks agree, tables bind what is held and nothing else, bytes add up."""
    first = world.ranks[0]
    tables = [first.table(band) for band in world.bands]
    figures = first.chain.statistics()
    for rank in world.ranks[1:]:
        for band, table in zip(world.bands, tables, strict=True):
            own = rank.table(band)
            if not np.array_equal(own, table):
                unit = int(np.flatnonzero(own != table)[0])
                raise CheckFailedError(
                    "rank_divergence",
                    f"virtual unit {unit} of band {band.name!r} is unit {own[unit]} on rank {rank.place}, {table[unit]} on rank 0",
                )
            if rank.chain.span(band.name) != first.chain.span(band.name):
                raise CheckFailedError(
                    "rank_divergence", f"band {band.name!r} stands elsewhere on rank {rank.place}"
                )
        if rank.chain.statistics() != figures:
            raise CheckFailedError(
                "rank_divergence", f"rank {rank.place} counts {rank.chain.statistics()}, rank 0 {figures}"
            )
        if rank.steps.retired_through != first.steps.retired_through:
            raise CheckFailedError(
                "rank_divergence",
                f"forwards have retired through {rank.steps.retired_through} on rank {rank.place}, {first.steps.retired_through} "
                "on rank 0",
            )
    for band, table in zip(world.bands, tables, strict=True):
        bound = table != (-1 if band.is_state else 0)
        held = world.shadow.bound[band.name]
        if not np.array_equal(bound, held):
            unit = int(np.flatnonzero(bound != held)[0])
            raise CheckFailedError(
                "wrong_binding",
                f"virtual unit {unit} of band {band.name!r} is {'held and not bound' if held[unit] else 'bound and not held'}",
            )
    for rank in world.ranks:
        _check_retirement(rank)
    _check_ids(world, figures)
    # One for all: the others have equal tables, spans and figures.
    first.chain.verify_byte_accounting()
    check_claims(world.uses, world.shadow, world.bands, first)
    # One band at a time: it takes as long as all that is above.
    world.looks += 1
    check_keeps(world.uses, world.shadow, world.bands[world.looks % len(world.bands)], first)
    for holder in world.holders:
        holder.check()


def at_rest(world: World) -> None:
    """Bring every rank to rest, then compare whole arenas and mirrors and look for records of work that is over."""
    world.abandon()
    while world.flying:
        world.process()
    end_all(world)
    for rank in world.ranks:
        rank.device.upload(rank.device.schedule_stream)
        rank.device.synchronize()
        _check_contents(world, rank)
        _check_mirrors(world, rank)
        _check_ledger(world, rank)
    after_action(world)


def at_end(world: World) -> None:
    """Free everything; nothing may be left of it, neither bytes nor ids."""
    at_rest(world)
    world.close(list(world.requests))
    for holder in world.holders:
        holder.let_go()
    at_rest(world)
    for rank in world.ranks:
        for band in world.bands:
            span = rank.chain.span(band.name)
            if span.page_count:
                raise CheckFailedError(
                    "ledger_leak",
                    f"band {band.name!r} of rank {rank.place} still spans {span} with nothing held",
                )


def _check_retirement(rank: Rank) -> None:
    """A forward that the schedule stream was made to wait for has retired: what comes behind the wait need not fear it."""
    if not isinstance(rank.device, WatchedDevice):
        return
    for forward in rank.flying:
        number = forward.record.forward
        if (
            number > rank.steps.retired_through
            and id(rank.steps.recorded(number).event) in rank.device.waited_for
        ):
            raise CheckFailedError(
                "needless_wait",
                f"the schedule stream of rank {rank.place} waits for forward {number}, which has not retired: others will wait again",
            )


def _check_ids(world: World, figures: ChainStatistics) -> None:
    """Every id that can be minted is either held by somebody or free."""
    held_slots = 0 if world.state is None else len(world.held(world.state))
    slot_count = 0 if world.state is None else world.state.id_count
    # Virtual page 0 is never minted.
    page_count = max(world.layout.virtual_page_count - 1, 0)
    for what, free, held, count in (
        ("virtual pages", figures.free_page_ids, int(np.count_nonzero(world.minted)), page_count),
        ("virtual state slots", figures.free_slot_ids, held_slots, slot_count),
    ):
        if free + held != count:
            raise CheckFailedError(
                "wrong_binding", f"of {count} {what} {held} are held and {free} can be minted"
            )


def _check_contents(world: World, rank: Rank) -> None:
    for band in world.bands:
        shadow = world.shadow
        # What was promised to be copied over, and was not so far, nobody may look at.
        live = np.flatnonzero(shadow.bound[band.name] & ~shadow.undefined[band.name])
        found = rank.units[band.name][rank.chain.physical_units(band.name, live)]
        check_words(f"rank {rank.place} at rest", band, live, shadow.words[band.name][live], found)


def _check_mirrors(world: World, rank: Rank) -> None:
    wanted = {f"ids:{band.name}": (rank.mirror(f"ids:{band.name}"), rank.table(band)) for band in world.bands}
    for request in world.requests:
        first = request.row * rank.column_count
        entries = rank.mirror(ROWS)[first : first + len(request.pages)]
        wanted[f"row {request.row}"] = (entries, request.pages)
    for name, (found, expected) in wanted.items():
        if not np.array_equal(found, expected):
            place = int(np.flatnonzero(found != expected)[0])
            raise CheckFailedError(
                "stale_mirror",
                f"at rest on rank {rank.place}, {name} holds {found[place]} at entry {place}, the host {expected[place]}",
            )


def _check_ledger(world: World, rank: Rank) -> None:
    for band in world.bands:
        ledger = rank.chain.ledger(band.name)
        ledger.check_idle()
        if not ledger.is_clear:
            raise CheckFailedError(
                "ledger_leak", f"band {band.name!r} of rank {rank.place} is at rest and not clear"
            )
    owed = rank.chain.statistics().owed_units
    if owed:
        raise CheckFailedError(
            "ledger_leak", f"rank {rank.place} is at rest and owes the zeroing of {owed} units"
        )
