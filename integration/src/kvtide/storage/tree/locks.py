"""Locks: what running requests need of the tree, each sub-pool for itself, and the counts that follow from it (row K8).

| sub-pool | a request needs | until |
| - | - | - |
| full | every page of its prefix | it is over |
| window | the units that its next token reads | it has advanced past them |
| state | the checkpoint that it starts from | the copy of it is queued |

What nobody needs can be evicted. A window unit is in the price of everybody who needs it, whether it came with a hit or was computed: a
request lets go of it as it advances and takes another unit in its place. What several need is there once, and the others keep it
while one takes anew. The books say how many units are *counted on again* in that way; admission keeps room for them beside what it
promised. So a hit costs, of windows, what computing its tail would.
"""

from __future__ import annotations

import numpy as np

from kvtide.storage.tree.matching import Match
from kvtide.storage.tree.nodes import FULL_SLOT, NO_STATE, Counts, Node
from kvtide.storage.tree.shape import TreeShape


class TreeLock:
    """One request's hold on the tree. Only the tree changes it."""

    __slots__ = ("begins", "cut", "hit_pages", "is_open", "match", "node", "root", "state_node")

    def __init__(self, root: Node, node: Node, begins: list[int], match: Match | None) -> None:
        self.root = root
        """Of its extra key."""
        self.node = node
        """The last node of its prefix."""
        self.begins = begins
        """First unit of each window that it needs; none behind the node's end."""
        self.match = match
        """What it came from; `None` of a pin."""
        self.hit_pages = node.end
        """Pages that it was given; those behind are its own work, and in its price."""
        self.state_node: Node | None = None
        """Whose checkpoint it is about to copy."""
        self.cut: Node | None = None
        """The node that was cut in two for it, to be joined again should its request not be admitted."""
        self.is_open = True
        """Whether it holds anything."""

    @property
    def pages(self) -> int:
        """Pages of its prefix that the tree has."""
        return self.node.end


class TreeBooks:
    """Units by slot, in the order of the shape's bands."""

    def __init__(self, shape: TreeShape) -> None:
        slots = len(shape.windows) + 2
        self.held = [0] * slots
        """In the tree."""
        self.needed = [0] * slots
        """Of them, those that some request needs."""
        self.again = [0] * slots
        """How often window units are counted on by one request beside others."""


class Locks:
    """Opens, moves and ends locks, and keeps the books of them."""

    def __init__(self, shape: TreeShape, books: TreeBooks) -> None:
        self._shape = shape
        self._books = books
        self._state_slot = len(shape.windows) + 1

    def open(self, root: Node, node: Node, match: Match) -> TreeLock:
        """Need a hit that ends at `node`'s end, its checkpoint included; that is no use of it yet."""
        begins = [window.first_unit(node.end) for window in self._shape.windows]
        lock = TreeLock(root, node, begins, match)
        self._hold(lock, has_state=node.state != NO_STATE)
        return lock

    def pin(self, node: Node, begins: list[int], *, has_state: bool) -> TreeLock:
        """Need a node with all above it, its windows' units from `begins` on, and its checkpoint or not; that is no use of them."""
        root = node
        while root.parent is not None:
            root = root.parent
        lock = TreeLock(root, node, begins, None)
        self._hold(lock, has_state=has_state)
        return lock

    def used(self, lock: TreeLock, stamp: float) -> None:
        """The hit is a request's: what it needs was used."""
        _stamp_full(lock.node, stamp)
        if lock.node.state != NO_STATE:
            lock.node.stamps[self._state_slot] = stamp
        for place, window in enumerate(self._shape.windows):
            node: Node | None = lock.node
            while node is not None and node.end * window.ratio > lock.begins[place]:
                node.stamps[1 + place] = stamp
                node = node.parent

    def end_copy(self, lock: TreeLock) -> Node | None:
        """The checkpoint's copy is queued: nobody need wait with evicting it; its node."""
        node, lock.state_node = lock.state_node, None
        if node is not None:
            node.state_locks -= 1
            if not node.state_locks:
                self._books.needed[self._state_slot] -= 1
        return node

    def extend(self, lock: TreeLock, node: Node, stamp: float) -> None:
        """The lock's request has computed the pages up to `node`'s end, or others like them; they are in its price."""
        before, lock_end = lock.node, lock.pages
        each: Node | None = node
        while each is not None and each is not before:
            self._count(each, 1)
            each = each.parent
        _stamp_full(node, stamp)
        lock.node = node
        for place, window in enumerate(self._shape.windows):
            begin = max(lock.begins[place], lock_end * window.ratio)
            self._shift(lock, place, (begin, node.end * window.ratio), 1, stamp)

    def advance(self, lock: TreeLock, begins: tuple[int, ...]) -> list[Node]:
        """The request needs no unit of a window before `begins` any more; nodes that something of was let go."""
        touched: list[Node] = []
        for place, window in enumerate(self._shape.windows):
            before, begin = lock.begins[place], min(begins[place], lock.pages * window.ratio)
            if begin > before:
                touched += self._shift(lock, place, (before, begin), -1)
                lock.begins[place] = begin
        return touched

    def close(self, lock: TreeLock) -> list[Node]:
        """The request is over; every node of its prefix."""
        touched = []
        self.end_copy(lock)
        for place, window in enumerate(self._shape.windows):
            self._shift(lock, place, (lock.begins[place], lock.pages * window.ratio), -1)
        each: Node | None = lock.node
        while each is not None:
            self._count(each, -1)
            touched.append(each)
            each = each.parent
        lock.is_open = False
        return touched

    # ── helpers ──

    def _hold(self, lock: TreeLock, *, has_state: bool) -> None:
        node, each = lock.node, lock.node
        while True:
            self._count(each, 1)
            if each.parent is None:
                break
            each = each.parent
        for place, window in enumerate(self._shape.windows):
            self._shift(lock, place, (lock.begins[place], node.end * window.ratio), 1)
        if self._shape.state is not None and has_state:
            lock.state_node = node
            if not node.state_locks:
                self._books.needed[self._state_slot] += 1
            node.state_locks += 1

    def _count(self, node: Node, change: int) -> None:
        """A node's full attention is needed by one request more, or one less."""
        was_needed = node.locks > 0
        node.locks += change
        self._books.needed[FULL_SLOT] += len(node.pages) * ((node.locks > 0) - was_needed)

    def _shift(
        self,
        lock: TreeLock,
        place: int,
        units: tuple[int, int],
        change: int,
        stamp: float | None = None,
    ) -> list[Node]:
        """Units `[begin, end)` of a window, along the lock's prefix, are needed by one request more or less."""
        touched: list[Node] = []
        begin, end = units
        ratio, slot, books = self._shape.windows[place].ratio, 1 + place, self._books
        node: Node | None = lock.node
        while node is not None and node.end * ratio > begin and begin < end:
            base = node.first * ratio
            if base < end:
                span, part = node.spans[place], slice(max(begin - base, 0), min(end, node.end * ratio) - base)
                needed, again = counted_on(span.locks[part])
                span.locks[part] += change
                needed_now, again_now = counted_on(span.locks[part])
                books.needed[slot] += needed_now - needed
                books.again[slot] += again_now - again
                touched.append(node)
                if stamp is not None:
                    node.stamps[slot] = stamp
            node = node.parent
        return touched


def counted_on(locks: Counts) -> tuple[int, int]:
    """Units needed, and how often units are counted on again: by each request that needs one but the first."""
    needed = int(np.count_nonzero(locks))
    return needed, int(locks.sum()) - needed


def _stamp_full(node: Node, stamp: float) -> None:
    """A prefix was used, up to `node`'s end."""
    each: Node | None = node
    while each is not None:
        each.stamps[FULL_SLOT] = stamp
        each = each.parent
