"""Lists of units as they travel: one-dimensional int64 arrays, and the slices that contiguous ones are worth.

A NumPy call over a slice costs a tenth of one over an index array, and most long lists are runs: pages that a band grew by,
the virtual pages of a prompt. Short lists are not worth the look.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from kvtide.device import IntArray

Index: TypeAlias = slice | IntArray
"""What an array is indexed by: a run of units as a slice, or the units themselves."""

NO_UNITS: IntArray = np.empty(0, np.int64)
"""An empty list of units."""

_WORTH_A_LOOK = 512


def index_of(units: IntArray) -> Index:
    """The slice that names the same units in the same order, if a long list is a run in either direction; else `units`."""
    count = len(units)
    if count < _WORTH_A_LOOK:
        return units
    first, last = units.item(0), units.item(count - 1)
    step = 1 if last > first else -1
    if last - first != step * (count - 1) or not (units[1:] - units[:-1] == step).all():
        return units
    stop = last + step
    return slice(first, stop if stop >= 0 else None, step)


def some(units: IntArray) -> str:
    """The first few units, for an error's text."""
    shown = ", ".join(str(unit) for unit in units[:8].tolist())
    return f"[{shown}]" if len(units) <= 8 else f"[{shown}, … {len(units)} in all]"
