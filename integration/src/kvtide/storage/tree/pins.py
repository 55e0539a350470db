"""Pins: units that would not come free if the tree let go of them now, so it does not offer them (rows K5, K8).

Somebody has fixed them, or sends or receives them: perhaps since before a request handed them over. The tree is not told when such a use
begins, so it asks about all that it holds, where there is any use at all and it or the tree has changed since. A pin is a lock
of a whole node, from the first unit of each window that is kept, and counts on them like any other: whoever else needs one may let go of it and take
another, while this one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvtide.device import IntArray
from kvtide.storage.tree.locks import Locks, TreeLock
from kvtide.storage.tree.nodes import NO_STATE, Bools, Node
from kvtide.storage.tree.shape import TreeShape

Keeps = Callable[[str, IntArray], Bools]
"""Which virtual units of a band would not come free."""


class Pins:
    """Of one tree."""

    def __init__(self, shape: TreeShape, locks: Locks) -> None:
        """None."""
        self._shape = shape
        self._locks = locks
        self.open: list[TreeLock] = []
        """What is pinned."""

    def drop(self) -> list[Node]:
        """End all; nodes that something of was let go."""
        touched = [node for lock in self.open for node in self._locks.close(lock)]
        self.open = []
        return touched

    def set(self, nodes: Sequence[Node], keeps: Keeps) -> None:
        """Pin those of `nodes` that something of is kept; none was pinned."""
        shape = self._shape
        full = self._first_kept(shape.full, [node.pages for node in nodes], keeps)
        states = [np.array([node.state][: node.state != NO_STATE], np.int64) for node in nodes]
        state = self._first_kept(shape.state, states, keeps)
        windows = []
        for place, window in enumerate(shape.windows):
            bound = [np.flatnonzero(node.spans[place].bound) for node in nodes]
            units = [node.units(window, places) for node, places in zip(nodes, bound, strict=True)]
            found = self._first_kept(window.name, units, keeps)
            windows.append({which: int(bound[which][first]) for which, first in found.items()})
        for which in sorted({*full, *state, *(one for window in windows for one in window)}):
            node = nodes[which]
            begins = [
                node.first * window.ratio + kept[which] if which in kept else node.end * window.ratio
                for window, kept in zip(shape.windows, windows, strict=True)
            ]
            self.open.append(self._locks.pin(node, begins, has_state=which in state))

    @staticmethod
    def _first_kept(band: str | None, units: Iterable[IntArray], keeps: Keeps) -> dict[int, int]:
        """By number of the list, the place of its first unit that is kept."""
        lists = list(units)
        if band is None or not any(map(len, lists)):
            return {}
        ends = np.cumsum([len(each) for each in lists])
        places = np.flatnonzero(keeps(band, np.concatenate(lists)))
        which, firsts = np.unique(np.searchsorted(ends, places, side="right"), return_index=True)
        starts = ends - [len(each) for each in lists]
        return {
            one: int(places[first] - starts[one])
            for one, first in zip(which.tolist(), firsts.tolist(), strict=True)
        }
