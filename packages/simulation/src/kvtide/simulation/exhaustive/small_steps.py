"""Doing what can be done in a state of the search, and checking what only the transition can tell.

Answers are compared with what was taken, contents with whose they are, units that pend with what was freed under a forward; the
device finds accesses that nothing orders.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtide.ledger import RecordedForward
from kvtide.simulation.exhaustive.ordered_device import FORWARD, NOBODYS, SCHEDULE, cells_of
from kvtide.simulation.exhaustive.small_actions import (
    Action,
    Units,
    kept,
    pages_in_order,
    touched,
    unbound_part,
    virtual_at,
    window_units,
)
from kvtide.simulation.exhaustive.small_takes import make_room, pay, take, written
from kvtide.simulation.exhaustive.small_uses import USE_STEPS
from kvtide.simulation.exhaustive.small_world import SmallWorld, contents_of, fill, spoil
from kvtide.simulation.failures import CheckFailedError


def step(world: SmallWorld, action: Action) -> str:
    """Do it; what became of it, in words. Raises `CheckFailedError`, or whatever the allocator raises, for what is wrong."""
    world.waited, world.tables = False, None
    outcome = _STEPS[str(action[0])](world, *(int(number) for number in action[1:]))
    world.tables = {}
    _check_contents(world)
    return outcome


# ── frees ──


def free_units(world: SmallWorld, units: Units) -> None:
    """Free units, windows before their owner; each pends if a forward is in flight, and only then."""
    chain, facts = world.chain, world.facts
    withheld = touched(world)
    figures = chain.statistics().bands
    for band in facts.bands:
        virtual = [unit for place, unit in units if place == band.place]
        if not virtual:
            continue
        physical = world.physical(band.place, virtual)
        before = figures[band.place]
        ids = np.array(virtual, np.int64)
        if band.ratio:
            chain.free_pages(band.name, ids)
        else:
            chain.free_state_slots(ids)
        figures = chain.statistics().bands
        after = figures[band.place]
        free = sum((band.place, unit) not in withheld for unit in physical)
        pends = free if world.flying else 0
        grew = after.pending_units - before.pending_units, after.withheld_units - before.withheld_units
        if grew != (pends, len(virtual) - free):
            raise CheckFailedError(
                "byte_accounting",
                f"{len(virtual)} units of band {band.name!r} were freed, {len(virtual) - free} of them withheld, under "
                f"{len(world.flying)} forwards: {grew[0]} more pend, {grew[1]} more are withheld",
            )
        for unit, place in zip(virtual, physical, strict=True):
            world.forget(band.place, unit)
            spoil(world, band.place, place)


def _free(world: SmallWorld, place: int, physical: int) -> str:
    free_units(world, ((place, virtual_at(world, place, physical)),))
    return "freed"


def _release(world: SmallWorld, physical: int) -> str:
    owner = world.facts.owner
    assert owner is not None, "it owns the page"
    page = virtual_at(world, owner.place, physical)
    free_units(world, (*window_units(world, page), (owner.place, page)))
    return "freed"


def _free_all(world: SmallWorld) -> str:
    reserved = kept(world)
    units = [
        (band.place, virtual)
        for band in world.facts.bands
        for virtual in world.held[band.place]
        if (band.place, virtual) not in reserved
    ]
    # An owner's page stays while a window keeps a part of it.
    stays = {
        (place, virtual)
        for place, virtual in units
        if world.facts.bands[place].is_owner and not reserved.isdisjoint(window_units(world, virtual))
    }
    free_units(world, tuple(sorted(unit for unit in units if unit not in stays)))
    return "freed"


# ── forwards, and time for gain ──


def _launch(world: SmallWorld, writes: int) -> str:
    """A forward over all that may be read: it reads all of it, and writes state alone, all of it, or nobody knows what."""
    device, chain = world.device, world.chain
    left_out = {unit for use in world.uses() if use.is_filling for unit in use.units}
    owed = world.owed()
    for use in world.uses():
        if use.kind == "load" and use.event is not None:
            device.order_behind(FORWARD, use.event.behind)
    device.order_behind(FORWARD, device.behind(SCHEDULE))
    # Nobody writes what a copy or a peer reads. A state is written by whoever reads it, so a forward leaves such a state out.
    finished = {unit for use in world.uses() if use.kind in ("backup", "send") for unit in use.units}
    left_out |= {(place, unit) for place, unit in finished if not world.facts.bands[place].ratio}
    units = [
        (band.place, virtual)
        for band in world.facts.bands
        for virtual in sorted(world.held[band.place])
        if (band.place, virtual) not in left_out
    ]
    writes_to = [
        (place, unit)
        for place, unit in units
        if (place, unit) not in finished and (writes or not world.facts.bands[place].ratio)
    ]
    record = chain.steps.forward_launched()
    event = device.work(
        FORWARD,
        f"forward {record.forward}",
        world.cells(world.placed([unit for unit in units if unit not in owed])),
        world.cells(world.placed(writes_to)),
    )
    recorded = chain.steps.forward_recorded(record, event)
    chain.forward_recorded(
        recorded,
        {
            band.name: None
            if writes == 2
            else np.array([unit for place, unit in writes_to if place == band.place], np.int64)
            for band in world.facts.bands
        },
    )
    world.flying.append((record, event))
    if world.debt is not None:
        written(world, *world.debt)
        world.debt = None
    return "launched"


def _abort(world: SmallWorld) -> str:
    """Of a launch that has queued no work."""
    steps = world.chain.steps
    steps.forward_aborted(steps.forward_launched())
    return "given up"


def _process(world: SmallWorld) -> str:
    record, event = world.flying.pop(0)
    world.device.host |= event.behind
    world.chain.steps.host_synchronised(event)
    world.chain.steps.forward_processed(record)
    world.chain.forward_processed(record.forward)
    return "processed"


def _stand_behind(world: SmallWorld) -> str:
    """The schedule stream waits for the newest forward, as it does where no read end is declared."""
    newest = world.chain.steps.newest_recorded
    assert isinstance(newest, RecordedForward), "one is in flight"
    world.device.wait_event(SCHEDULE, newest.event)
    world.chain.steps.wait_queued(newest.event)
    return "behind"


def _pay(world: SmallWorld) -> str:
    assert world.debt is not None, "somebody owes"
    pay(world, *world.debt)
    world.debt = None
    return "paid"


def _flush(world: SmallWorld) -> str:
    unretired = world.chain.steps.retired_through
    moved = world.chain.flush_opportunistic()
    if world.chain.steps.retired_through != unretired:
        raise CheckFailedError("needless_wait", "a flush made for gain waits for a forward in flight")
    return "moved" if moved else "nothing moved"


def _copy_slot(world: SmallWorld, source: int, target: int) -> str:
    state = world.facts.state
    assert state is not None, "it has slots"
    virtual = [virtual_at(world, state.place, source), virtual_at(world, state.place, target)]
    world.chain.copy_state_slots(np.array(virtual[:1], np.int64), np.array(virtual[1:], np.int64))
    first = contents_of(state.place, virtual[0])
    cells = cells_of(state.grid, target)
    if world.device.contents[cells.start : cells.stop] != list(range(first, first + len(cells))):
        raise CheckFailedError("lost_write", f"state slot {target} does not hold what slot {source} did")
    fill(world, state.place, virtual[1], target)
    return "copied"


def _rehome(world: SmallWorld, place: int, physical: int, number: int) -> str:
    """What nobody has written yet goes along with its debt."""
    band = world.facts.bands[place]
    source, target = (
        virtual_at(world, place, physical),
        unbound_part(world, band, pages_in_order(world)[number]),
    )
    assert target is not None, "the page has a part that is not bound"
    is_owed = (place, source) in world.owed()
    world.chain.rehome_window(band.name, np.array([source], np.int64), np.array([target], np.int64))
    world.held[place].remove(source)
    world.held[place].add(target)
    if not is_owed:
        fill(world, place, target, physical)
        return "rehomed"
    assert world.debt is not None, "no use names it"
    taken, units = world.debt
    world.debt = taken, tuple((place, target) if unit == (place, source) else unit for unit in units)
    return "rehomed with its debt"


_STEPS: dict[str, Callable[..., str]] = {
    "take": take,
    "make room": make_room,
    "free": _free,
    "release": _release,
    "free all": _free_all,
    "launch": _launch,
    "abort": _abort,
    "process": _process,
    "stand behind": _stand_behind,
    "pay": _pay,
    "flush": _flush,
    "copy slot": _copy_slot,
    "rehome": _rehome,
    **USE_STEPS,
}

WORDS = tuple(_STEPS)
"""Of all actions."""


# ── contents ──


def _check_contents(world: SmallWorld) -> None:
    """After work of the schedule stream: every unit that is held has its own bytes, and what is left behind is nobody's."""
    if not world.device.queued:
        return
    world.device.queued = 0
    owed = world.owed()
    fresh = [NOBODYS] * len(world.device.contents)
    for band in world.facts.bands:
        for physical, unit in world.by_unit(band.place):
            if (band.place, unit) in owed:
                continue
            cells = cells_of(band.grid, physical)
            found = world.device.contents[cells.start : cells.stop]
            first = contents_of(band.place, unit)
            if found != list(range(first, first + len(cells))):
                raise CheckFailedError(
                    "lost_write",
                    f"unit {physical} of band {band.name!r} does not hold what was written to it",
                )
            fresh[cells.start : cells.stop] = found
    world.device.contents = fresh
