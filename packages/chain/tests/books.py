"""Everything an allocator knows, as plain values that compare: for "nothing has changed" and "both are the same"."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvtide.chain import ChainAllocator

_SHARED = ("_device", "_mirror", "_checks", "layout", "_grid", "grid", "_snapshots", "_epoch", "_stays")


def books_of(chain: ChainAllocator) -> object:
    """All of its state, deep; devices, mirrors, grids and the snapshot that is kept left out."""
    return _plain(chain, {})


def _plain(value: object, seen: dict[int, int]) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, dict):
        return {_name(key, seen): _plain(entry, seen) for key, entry in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(entry, seen) for entry in value]
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if value is None or isinstance(value, int | str | float):
        return value
    if id(value) in seen:
        return f"object {seen[id(value)]}"
    if type(value).__module__.startswith(("kvtide.chain", "kvtide.ledger")) and hasattr(value, "__dict__"):
        seen[id(value)] = len(seen)
        return {name: _plain(entry, seen) for name, entry in vars(value).items() if name not in _SHARED}
    return _name(value, seen)


def _name(value: object, seen: dict[int, int]) -> object:
    if value is None or isinstance(value, int | str | tuple):
        return value
    return f"object {seen.setdefault(id(value), len(seen))}"
