"""Mistakes in takes, frees and copies: what is not bound, not there, named twice, or somebody else's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from kvtide.chain import BandTake
from kvtide.simulation.bands import NONE
from kvtide.simulation.operations.mistakes import Call, Mistake, free_of


def _unbound(at: Mistake) -> Call | None:
    """Freed before, or never taken."""
    free = np.flatnonzero(~at.world.shadow.bound[at.band.name])[0 if at.band.is_state else at.band.ratio :]
    return free_of(at.band, free[at.pick % len(free)][None]) if len(free) else None


def _twice(at: Mistake) -> Call | None:
    """One unit twice in a call, beside one that may be freed."""
    held = at.world.held(at.band)
    return (
        free_of(at.band, held[[at.pick % len(held), (at.pick + 1) % len(held), at.pick % len(held)]])
        if len(held)
        else None
    )


def _sink(at: Mistake) -> Call | None:
    """The virtual page that is never minted, or a sub-page of it."""
    return None if at.band.is_state else free_of(at.band, np.array([at.pick % at.band.ratio], np.int64))


def _masked(at: Mistake) -> Call | None:
    """−1, a padded row, beside units that may be freed."""
    return free_of(at.band, np.append(at.world.held(at.band)[:2], -1))


def _out_of_range(at: Mistake) -> Call | None:
    """Past the last id."""
    return free_of(at.band, np.array([at.band.id_count + at.pick], np.int64))


def _still_held_by_a_window(at: Mistake) -> Call | None:
    """An owner's page before its windows."""
    if not at.band.is_owner:
        return None
    pages = at.world.held(at.band)
    for window in at.world.windows:
        units = window.sub_pages(pages)
        pages_held = pages[at.world.shadow.bound[window.name][units].reshape(-1, window.ratio).any(axis=1)]
        if len(pages_held):
            return free_of(at.band, pages_held[[at.pick % len(pages_held)]])
    return None


def _bound_already(at: Mistake) -> Call | None:
    """A window binds what it holds."""
    held = at.world.held(at.band)
    if at.band.is_state or at.band.is_owner or not len(held):
        return None
    asked = {at.band.name: BandTake(fresh=NONE, held=held[[at.pick % len(held)]])}
    return lambda rank: rank.chain.take(bands=asked)


def _never_minted(at: Mistake) -> Call | None:
    """A window binds a sub-page of a page that nobody holds."""
    free = np.flatnonzero(~at.world.minted)
    if at.band.is_state or at.band.is_owner or not len(free):
        return None
    unit = free[at.pick % len(free)] * at.band.ratio
    asked = {at.band.name: BandTake(fresh=NONE, held=np.array([unit], np.int64))}
    return lambda rank: rank.chain.take(bands=asked)


def _negative(at: Mistake) -> Call | None:
    """A take of less than nothing."""
    return lambda rank: rank.chain.take(pages=-1 - at.pick)


def _bound_nowhere(at: Mistake) -> Call | None:
    """Without a full band: a page of which nothing is bound, which nobody would ever free."""
    if not at.world.attention or any(each.is_owner for each in at.world.attention):
        return None
    return lambda rank: rank.chain.take(pages=1 + at.pick, bands={})


def _copied_onto_itself(at: Mistake) -> Call | None:
    """Sources that are targets."""
    held = at.world.held(at.band)
    if not at.band.is_state or not len(held):
        return None
    slots = held[[at.pick % len(held)]]
    return lambda rank: rank.chain.copy_state_slots(slots, slots)


def _copied_from_nowhere(at: Mistake) -> Call | None:
    """A source that nobody holds."""
    held, free = at.world.held(at.band), np.flatnonzero(~at.world.shadow.bound[at.band.name])
    if not at.band.is_state or not len(held) or not len(free):
        return None
    source, target = free[[at.pick % len(free)]], held[[at.pick % len(held)]]
    return lambda rank: rank.chain.copy_state_slots(source, target)


OF_UNITS: Mapping[str, Callable[[Mistake], Call | None]] = MappingProxyType(
    {
        "a free of what is not bound": _unbound,
        "a free of one unit twice": _twice,
        "a free of the sink": _sink,
        "a free of a masked row": _masked,
        "a free past the last id": _out_of_range,
        "a free before the windows": _still_held_by_a_window,
        "a take of what is bound": _bound_already,
        "a take for a page never minted": _never_minted,
        "a take of less than nothing": _negative,
        "a take of a page that is bound nowhere": _bound_nowhere,
        "a copy onto itself": _copied_onto_itself,
        "a copy of what is not bound": _copied_from_nowhere,
    }
)
"""By name."""
