"""Lists of units as they travel inside: the ids, and what an array is indexed by to reach them.

A NumPy call over a slice costs a tenth of one over an index array, and most long lists are runs: pages that a band grew by,
the virtual pages of a prompt. So a long list is looked at once, when it comes in. Short ones are not worth the look.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from kvtide.device import IntArray

Index: TypeAlias = slice | IntArray
"""A run of units as a slice, in either direction, or the units themselves."""

NO_UNITS: IntArray = np.empty(0, np.int64)
"""An empty list of ids."""

_WORTH_A_LOOK = 512


class Units(NamedTuple):
    """Units of one kind, each named once."""

    ids: IntArray
    """One-dimensional int64."""

    where: Index
    """Indexes an array by the same units, in the same order."""


def units_of(ids: IntArray) -> Units:
    """`ids`, known as a run if the list is long and is one."""
    count = len(ids)
    if count < _WORTH_A_LOOK:
        return Units(ids, ids)
    first, last = ids.item(0), ids.item(count - 1)
    step = 1 if last > first else -1
    if last - first != step * (count - 1) or not (ids[1:] - ids[:-1] == step).all():
        return Units(ids, ids)
    return Units(ids, _slice(first, last, step))


def run_of(first: int, end: int, step: int = 1) -> Units:
    """The units `first, first + step, …` before `end`."""
    ids = np.arange(first, end, step)
    return Units(ids, _slice(first, ids.item(-1), step) if len(ids) else ids)


def joined(first: Units, second: Units) -> Units:
    """Both lists, one behind the other."""
    if not len(first.ids):
        return second
    if not len(second.ids):
        return first
    return units_of(np.concatenate([first.ids, second.ids]))


def bounds(where: slice) -> tuple[int, int]:
    """Lowest and highest unit of a run."""
    last = (-1 if where.stop is None else where.stop) - where.step
    return (where.start, last) if where.step > 0 else (last, where.start)


def some(ids: IntArray) -> str:
    """The first few units, for an error's text."""
    shown = ", ".join(str(unit) for unit in ids[:8].tolist())
    return f"[{shown}]" if len(ids) <= 8 else f"[{shown}, … {len(ids)} in all]"


def _slice(first: int, last: int, step: int) -> slice:
    stop = last + step
    return slice(first, stop if stop >= 0 else None, step)
