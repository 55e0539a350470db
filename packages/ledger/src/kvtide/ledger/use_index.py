"""From a page to the uses that name it: one linked list a page, kept in arrays.

    first[page] ─→ node ─→ node ─→ 0            a node is one (page, use)
                    │ ↑
                    └─┘ next, previous           so that a use leaves each of its lists without walking it

Adding a use of n pages costs O(n), asking for n pages O(n + uses found), ending a use O(its pages), each a few NumPy calls:
no Python loop runs over pages. A list is walked as deep as the page with the most uses, all pages at once.
"""

from __future__ import annotations

import numpy as np

from kvtide.device import IntArray

_FIRST_NODES = 64
_NO_USE = -1


class UseIndex:
    """Pages of one band, each with the uses that name it; a use is a small integer. It never waits, on host or stream."""

    def __init__(self, page_count: int) -> None:
        """An empty index of `[0, page_count)`; zeroed memory, so untouched pages cost nothing."""
        self._first: IntArray = np.zeros(page_count, np.int64)
        self._next: IntArray = np.zeros(_FIRST_NODES, np.int64)
        self._previous: IntArray = np.zeros(_FIRST_NODES, np.int64)
        self._page: IntArray = np.zeros(_FIRST_NODES, np.int64)
        self._use: IntArray = np.zeros(_FIRST_NODES, np.int64)
        # Node 0 ends every list. The stack's top `_free_count` entries are free nodes, lowest on top.
        self._free: IntArray = np.arange(_FIRST_NODES - 1, 0, -1, dtype=np.int64)
        self._free_count = _FIRST_NODES - 1

    def add(self, use: int, pages: IntArray) -> IntArray | None:
        """Enter `use` on each of `pages`; its nodes, or None with nothing changed if a page is named twice."""
        count = len(pages)
        if count > self._free_count:
            self._grow(count)
        nodes = self._free[self._free_count - count : self._free_count].copy()
        followers = self._first[pages]
        self._first[pages] = nodes
        if not np.array_equal(self._first[pages], nodes):
            self._first[pages] = followers
            return None
        self._free_count -= count
        self._next[nodes] = followers
        self._previous[followers] = nodes
        self._previous[nodes] = 0
        self._page[nodes] = pages
        self._use[nodes] = use
        return nodes

    def remove(self, nodes: IntArray) -> IntArray:
        """Take a use's nodes, as `add` gave them, out of their lists; its pages, in the order they were added."""
        pages, before, after = self._page[nodes], self._previous[nodes], self._next[nodes]
        leads = before == 0
        self._first[pages[leads]] = after[leads]
        self._next[before] = (
            after  # nodes of one use lie in different lists, so none of these is another's neighbour
        )
        self._previous[after] = before
        self._use[nodes] = _NO_USE
        self._free[self._free_count : self._free_count + len(nodes)] = nodes
        self._free_count += len(nodes)
        return pages

    def pages_of(self, nodes: IntArray) -> IntArray:
        """The page of each node."""
        return self._page[nodes]

    def uses_of(self, nodes: IntArray) -> IntArray:
        """The use of each node; another's, or −1, for a node that its use has left."""
        return self._use[nodes]

    def find(self, pages: IntArray) -> tuple[IntArray, IntArray]:
        """Every pair of a place in `pages` and a node of a use that names the page there, as two arrays of one length."""
        nodes = self._first[pages]
        places = nodes.nonzero()[0]
        nodes = nodes[places]
        found_places, found_nodes = [places], [nodes]
        while len(nodes):
            nodes = self._next[nodes]
            more = nodes.nonzero()[0]
            if not len(more):
                break
            nodes, places = nodes[more], places[more]
            found_places.append(places)
            found_nodes.append(nodes)
        if len(found_places) == 1:
            return found_places[0], found_nodes[0]
        return np.concatenate(found_places), np.concatenate(found_nodes)

    def _grow(self, count: int) -> None:
        """At least double, so that growth costs O(1) a node over time."""
        old = len(self._next)
        new = max(2 * old, old + count)
        for name in ("_next", "_previous", "_page", "_use"):
            grown = np.zeros(new, np.int64)
            grown[:old] = getattr(self, name)
            setattr(self, name, grown)
        free = np.zeros(new, np.int64)
        fresh = np.arange(new - 1, old - 1, -1, dtype=np.int64)
        free[: len(fresh)] = fresh
        free[len(fresh) : len(fresh) + self._free_count] = self._free[: self._free_count]
        self._free, self._free_count = free, len(fresh) + self._free_count
