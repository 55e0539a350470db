"""Takes in the search: asked about, carried out, and what they hand out looked at."""

from __future__ import annotations

from kvtide.chain import Taken, TakeRefusal
from kvtide.simulation.exhaustive.ordered_device import ZERO, cells_of
from kvtide.simulation.exhaustive.shapes import Take
from kvtide.simulation.exhaustive.small_actions import Units, arguments_of, asked_of
from kvtide.simulation.exhaustive.small_world import SmallWorld, fill, spoil
from kvtide.simulation.failures import CheckFailedError


def take_units(world: SmallWorld, take: Take) -> tuple[Taken, Units] | None:
    """Take, and check what came against the question, the order of accesses, and former tenants; `None` if refused."""
    asked = asked_of(world, take)
    fits = world.chain.units_fit(asked)
    bands = arguments_of(world, take)
    taken = world.chain.take(pages=take.pages, state_slots=take.slots, bands=bands)
    if isinstance(taken, TakeRefusal) == fits:
        raise CheckFailedError("capacity_answer", f"units_fit says {fits} to {asked}, the take {taken}")
    if isinstance(taken, TakeRefusal):
        return None
    units: list[tuple[int, int]] = []
    for band in world.facts.bands:
        if not band.ratio:
            bound = taken.state_slots.tolist()
        elif take.held:
            assert bands is not None, "it names windows"
            bound = bands[band.name].held.tolist() if band.name in bands else []
        elif asked[band.name]:
            bound = [page * band.ratio + part for page in taken.pages.tolist() for part in range(band.ratio)]
        else:
            bound = []
        for virtual, physical in zip(bound, world.physical(band.place, bound), strict=True):
            if virtual in world.held[band.place]:
                raise CheckFailedError(
                    "wrong_binding", f"unit {virtual} of band {band.name!r} was handed out twice"
                )
            world.held[band.place].add(virtual)
            units.append((band.place, virtual))
            cells = cells_of(band.grid, physical)
            found = world.device.contents[cells.start : cells.stop]
            if not take.promised and any(cell != ZERO for cell in found):
                raise CheckFailedError(
                    "lost_write", f"unit {physical} of band {band.name!r} was handed out, and not zeroed"
                )
            fill(world, band.place, virtual, physical)
            if take.promised:
                spoil(world, band.place, physical)
    return taken, tuple(units)


def pay(world: SmallWorld, taken: Taken, units: Units) -> None:
    """Who was to write some units will not: they are zeroed, and readable from now on."""
    world.chain.pay_zero_debt(taken)
    for place, virtual in units:
        physical = world.physical(place, [virtual])[0]
        cells = cells_of(world.facts.bands[place].grid, physical)
        if any(cell != ZERO for cell in world.device.contents[cells.start : cells.stop]):
            raise CheckFailedError("lost_write", f"unit {physical} was owed zeroing, and not zeroed")
        fill(world, place, virtual, physical)


def written(world: SmallWorld, taken: Taken, units: Units) -> None:
    """Whoever was to write some units does."""
    world.chain.written(taken)
    for place, virtual in units:
        fill(world, place, virtual, world.physical(place, [virtual])[0])


def take(world: SmallWorld, number: int) -> str:
    """One of the shape's takes."""
    how = world.facts.shape.takes[number]
    got = take_units(world, how)
    if got is not None and how.promised:
        world.debt = got
    return "refused" if got is None else "taken"


def make_room(world: SmallWorld, number: int) -> str:
    """One of the shape's demands, without a take."""
    asked = world.facts.shape.room[number]
    fits = world.chain.units_fit(asked)
    refusal = world.chain.ensure_capacity(asked)
    if (refusal is None) != fits:
        raise CheckFailedError(
            "capacity_answer", f"units_fit says {fits} to {asked}, ensure_capacity {refusal}"
        )
    if fits and not world.chain.units_fit(asked):
        raise CheckFailedError("capacity_answer", f"room was made for {asked}, and now they do not fit")
    return "refused" if refusal is not None else "room"
