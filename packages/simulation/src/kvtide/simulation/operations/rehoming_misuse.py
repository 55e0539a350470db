"""Mistakes in rehoming: what stands for nothing, what stands for something already, and what nobody has minted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from kvtide.device import IntArray
from kvtide.simulation.operations.mistakes import Call, Mistake


def _from_unbound(at: Mistake) -> Call | None:
    """A source that stands for nothing."""
    free = _unbound(at)
    return (
        None if len(free) < 2 else _rehome(at, free[[at.pick % len(free)]], free[[(at.pick + 1) % len(free)]])
    )


def _to_bound(at: Mistake) -> Call | None:
    """A target that stands for a page already, beside one that does not."""
    held, free = _held(at), _unbound(at)
    if len(held) < 3 or not len(free):
        return None
    sources = held[[at.pick % len(held), (at.pick + 1) % len(held)]]
    return _rehome(at, sources, np.append(free[:1], held[(at.pick + 2) % len(held)]))


def _to_unminted(at: Mistake) -> Call | None:
    """A target of a page that nobody holds."""
    held, free = _held(at), np.flatnonzero(~at.world.minted)
    if not len(held) or not len(free):
        return None
    target = free[[at.pick % len(free)]] * at.band.ratio
    return _rehome(at, held[[at.pick % len(held)]], target)


def _source_twice(at: Mistake) -> Call | None:
    """One source for two targets."""
    held, free = _held(at), _unbound(at)
    if not len(held) or len(free) < 2:
        return None
    return _rehome(at, held[[at.pick % len(held)] * 2], free[:2])


def _target_twice(at: Mistake) -> Call | None:
    """Two sources for one target."""
    held, free = _held(at), _unbound(at)
    if len(held) < 2 or not len(free):
        return None
    return _rehome(at, held[:2], free[[at.pick % len(free)] * 2])


def _too_few_targets(at: Mistake) -> Call | None:
    """A source without one."""
    held, free = _held(at), _unbound(at)
    return None if len(held) < 2 or not len(free) else _rehome(at, held[:2], free[:1])


def _no_window(at: Mistake) -> Call | None:
    """Pages that their owner minted, or state slots."""
    held = at.world.held(at.band)
    return None if _is_window(at) or not len(held) else _rehome(at, held[:1], held[:1])


def _is_window(at: Mistake) -> bool:
    return any(at.band is window for window in at.world.windows)


def _held(at: Mistake) -> IntArray:
    """What a window binds; nothing for another band."""
    return at.world.held(at.band) if _is_window(at) else np.empty(0, np.int64)


def _unbound(at: Mistake) -> IntArray:
    """(Sub-)pages of minted pages that stand for nothing in a window; nothing for another band."""
    if not _is_window(at):
        return np.empty(0, np.int64)
    units = at.band.sub_pages(np.flatnonzero(at.world.minted))
    return units[~at.world.shadow.bound[at.band.name][units]]


def _rehome(at: Mistake, sources: IntArray, targets: IntArray) -> Call:
    return lambda rank: rank.chain.rehome_window(at.band.name, sources, targets)


OF_REHOMING: Mapping[str, Callable[[Mistake], Call | None]] = MappingProxyType(
    {
        "a rehoming of what is not bound": _from_unbound,
        "a rehoming onto what is bound": _to_bound,
        "a rehoming onto a page never minted": _to_unminted,
        "a rehoming of one page twice": _source_twice,
        "a rehoming onto one page twice": _target_twice,
        "a rehoming with too few targets": _too_few_targets,
        "a rehoming in no window": _no_window,
    }
)
"""By name."""
