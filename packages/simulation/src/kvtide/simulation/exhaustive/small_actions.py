"""What a correct scheduler may do in a state of the search.

An action is a tuple of a word and small integers: places of bands, physical units, numbers of a shape's takes. They name what they
act on by where it stands, so equal states have equal actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from kvtide.chain import BandTake
from kvtide.device import IntArray
from kvtide.ledger import Consumer, clearance
from kvtide.simulation.exhaustive.ordered_device import SCHEDULE
from kvtide.simulation.exhaustive.shapes import Shape, Take
from kvtide.simulation.exhaustive.small_world import SmallBand, SmallUse, SmallWorld
from kvtide.simulation.failures import CheckFailedError

Action: TypeAlias = tuple[str | int, ...]
"""A word, then integers."""

Units: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of a band's place and a unit."""

NONE: IntArray = np.empty(0, np.int64)
"""No unit."""


def actions(world: SmallWorld) -> Iterator[Action]:
    """Everything that a correct scheduler may do now, in a fixed order."""
    shape = world.facts.shape
    tabled = [world.by_unit(band.place) for band in world.facts.bands]
    for number, take in enumerate(shape.takes):
        if not (take.promised and world.debt is not None) and (not take.held or unbound(world)):
            yield "take", number
    for number in range(len(shape.room)):
        yield "make room", number
    yield from _frees(world, tabled)
    yield from _forwards(world)
    yield from _uses(world, tabled)
    if world.facts.state is not None:
        yield from _state_copies(world, tabled[world.facts.state.place])
    yield from _rehomings(world, tabled)
    yield ("flush",)


def leaves_alone(world: SmallWorld, action: Action) -> bool:
    """Whether the action will be refused, or given up, so that it must leave the state as it is."""
    match action[0]:
        case "take":
            return not world.chain.units_fit(asked_of(world, world.facts.shape.takes[int(action[1])]))
        case "load" | "receive":
            return not world.chain.units_fit(asked_of(world, world.facts.shape.filled))
        case "make room":
            return not world.chain.units_fit(world.facts.shape.room[int(action[1])])
        case "abort":
            # A launch that is given up has queued nothing.
            return True
        case _:
            return False


def described(shape: Shape, action: Action) -> str:
    """An action in words, for people."""
    word, *numbers = action
    if word == "take":
        return f"take {shape.takes[int(numbers[0])].name}"
    if word == "make room":
        return f"make room for {dict(shape.room[int(numbers[0])])}"
    if word == "launch":
        how = ("writes state alone", "writes all it may", "writes nobody knows what")
        return f"launch a forward that {how[int(numbers[0])]}"
    if word == "rehome":
        place, unit, page = map(int, numbers)
        return f"rehome unit {unit} of band {shape.bands[place].name!r} to page {page} in the order of their units"
    if len(numbers) == 2 and word != "copy slot":
        return f"{word} unit {numbers[1]} of band {shape.bands[int(numbers[0])].name!r}"
    return " ".join(map(str, action))


# ── by kind ──


def _frees(world: SmallWorld, tabled: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Action]:
    reserved = kept(world)
    count = 0
    for band in world.facts.bands:
        for physical, virtual in tabled[band.place]:
            if (band.place, virtual) in reserved or (band.is_owner and window_units(world, virtual)):
                continue
            count += 1
            yield "free", band.place, physical
    if world.facts.owner is not None and world.facts.windows:
        place = world.facts.owner.place
        for physical, virtual in tabled[place]:
            windows = window_units(world, virtual)
            if windows and reserved.isdisjoint((*windows, (place, virtual))):
                yield "release", physical
    if count > 1:
        yield ("free all",)


def _forwards(world: SmallWorld) -> Iterator[Action]:
    if len(world.flying) < world.facts.shape.forwards and any(world.held):
        yield ("launch", 1)
        yield ("launch", 2)
        if world.debt is None:
            yield ("launch", 0)
        yield ("abort",)
    if world.flying:
        yield ("process",)
        if world.chain.steps.newest_unretired is not None:
            yield ("stand behind",)
    if world.debt is not None and touched(world).isdisjoint(world.placed(world.debt[1])):
        yield ("pay",)


def _uses(world: SmallWorld, tabled: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Action]:
    unreadable = {unit for use in world.uses() if use.is_filling for unit in use.units}
    if world.debt is not None:
        unreadable.update(world.debt[1])
    readable = [
        (band.place, physical)
        for band in world.facts.bands
        for physical, virtual in tabled[band.place]
        if (band.place, virtual) not in unreadable
    ]
    if world.copy is None:
        yield from (("back up", *unit) for unit in readable)
        yield ("load",)
    elif world.copy.stage == "announced":
        yield from (("submit",), ("withdraw load",))
    else:
        yield ("end copy",)
    if world.transfer is None:
        known = world.device.behind(SCHEDULE)
        for unit in readable:
            if not world.device.writers_of(world.cells([unit])) & ~known:
                yield "send", *unit
        yield ("receive",)
    elif world.transfer.stage == "announced":
        if publish_after(world, world.transfer) <= world.chain.steps.retired_through:
            yield ("publish",)
        yield ("withdraw receive",)
    elif world.transfer.stage == "open":
        yield from (("end transfer",), ("fail",))
    else:
        yield ("prove",)
    if world.fixed is None:
        yield from (("fix", *unit) for unit in readable)
    else:
        yield ("unfix",)


def _state_copies(world: SmallWorld, slots: Sequence[tuple[int, int]]) -> Iterator[Action]:
    assert world.facts.state is not None, "slots are of a state band"
    place = world.facts.state.place
    filling = {unit for use in world.uses() if use.is_filling for unit in use.units}
    # Nobody copies onto what a copy reads or writes: its request has finished with it, or does not have it yet.
    busy = touched(world) | {one for use in world.uses() for one in use.places}
    for source, virtual in slots:
        for target, other in slots:
            if source == target or (place, target) in busy:
                continue
            if filling.isdisjoint(((place, virtual), (place, other))):
                yield "copy slot", source, target


def _rehomings(world: SmallWorld, tabled: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Action]:
    """A window's unit, and a page that it may stand for, by its place in the order of pages; a prefix tree asks for it (row K8)."""
    if not any(tabled[band.place] for band in world.facts.windows):
        return
    # A tree names no page that a use knows, or that a load or a receive still fills.
    named = {unit for use in world.uses() for unit in use.units}
    filling = {
        virtual // world.facts.bands[place].ratio
        for use in world.uses()
        if use.is_filling
        for place, virtual in use.units
        if world.facts.bands[place].ratio
    }
    pages = pages_in_order(world)
    for band in world.facts.windows:
        for number, page in enumerate(pages):
            if page in filling or unbound_part(world, band, page) is None:
                continue
            for physical, virtual in tabled[band.place]:
                if (band.place, virtual) not in named and virtual // band.ratio != page:
                    yield "rehome", band.place, physical, number


# ── questions about a state ──


def kept(world: SmallWorld) -> set[tuple[int, int]]:
    """Units that nobody may free: reserved for a load, or held until a peer is told of them."""
    return {unit for use in world.uses() if use.stage == "announced" for unit in use.units}


def touched(world: SmallWorld) -> set[tuple[int, int]]:
    """Bands and physical units that are fixed, or under a transfer; a unit may have moved away from there."""
    return {one for use in world.uses() if use.is_fixed or use.is_open_transfer for one in use.places}


def window_units(world: SmallWorld, page: int) -> Units:
    """Units that windows bind of a virtual page."""
    return tuple(
        (band.place, page * band.ratio + part)
        for band in world.facts.windows
        for part in range(band.ratio)
        if page * band.ratio + part in world.held[band.place]
    )


def pages_in_order(world: SmallWorld) -> list[int]:
    """Virtual pages that somebody holds any part of, in the order of the units that they are bound to."""
    found: dict[int, None] = {}
    for band in reversed(world.facts.attention):
        found |= {virtual // band.ratio: None for _, virtual in world.by_unit(band.place)}
    return list(found)


def unbound(world: SmallWorld) -> dict[str, BandTake]:
    """For each window the first (sub-)page of an older page that it does not bind."""
    found = {}
    pages = pages_in_order(world)
    for band in world.facts.windows:
        for page in pages:
            part = unbound_part(world, band, page)
            if part is not None:
                found[band.name] = BandTake(fresh=NONE, held=np.array([part], np.int64))
                break
    return found


def unbound_part(world: SmallWorld, band: SmallBand, page: int) -> int | None:
    """The first (sub-)page of a page that a window does not bind."""
    parts = range(page * band.ratio, (page + 1) * band.ratio)
    return next((part for part in parts if part not in world.held[band.place]), None)


def publish_after(world: SmallWorld, use: SmallUse) -> int:
    """The newest forward that may read a receive's units, as the ledger says."""
    newest = -1
    for place, physical in world.placed(use.units):
        ledger = world.chain.ledger(world.facts.bands[place].name)
        found = clearance(Consumer.NETWORK_RECEIVE, ledger, np.array([physical], np.int64))
        if found.host_waits or len(found.excluded):
            raise CheckFailedError("disturbed_use", "a receive was handed units that are in use")
        newest = max(newest, found.publish_after)
    return newest


def arguments_of(world: SmallWorld, take: Take) -> dict[str, BandTake] | None:
    """What a take tells the allocator of bands."""
    if take.held:
        return unbound(world)
    if take.promised:
        return {band.name: BandTake(unwritten=NONE) for band in world.facts.attention}
    if not take.windows:
        whole = {} if world.facts.owner is not None else {world.facts.layout.owner: BandTake()}
        return {name: how for name, how in whole.items() if name is not None}
    return None


def asked_of(world: SmallWorld, take: Take) -> dict[str, int]:
    """Units by band that a take binds."""
    if take.held:
        return {name: len(how.held) for name, how in unbound(world).items()}
    binds_all = world.facts.layout.owner
    return {
        band.name: take.pages * band.ratio if take.windows or band.is_owner or band.name == binds_all else 0
        for band in world.facts.attention
    } | ({world.facts.state.name: take.slots} if world.facts.state is not None else {})


def virtual_at(world: SmallWorld, place: int, physical: int) -> int:
    """The virtual unit that a band binds to a physical one."""
    return dict(world.by_unit(place))[physical]
