"""Nodes: runs of whole pages of tokens, each with a slot for every sub-pool (row K8).

    root ── "You are a …" 12 pages ─┬─ "Translate …" 5 pages     a node's key is its tokens as bytes; children differ in their
                                    └─ "Summarise …" 9 pages     first page, by which they are found

A slot may be a *tombstone*: what it held has been evicted, or was never kept. Full attention is all there or, with the node, gone; a
window keeps some of its units, each with its own locks; a state belongs to the node's last token. Nodes know nothing of the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray
from kvtide.storage.tree.shape import TreeShape, TreeWindow

NO_STATE = -1
"""Instead of a state slot."""

NO_PAGE = 0
"""Instead of a virtual page, where no band binds anything of it any more; page 0 is never minted."""

FULL_SLOT = 0
"""Of a node's stamps: full attention; windows follow in order, state is last."""

Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int32]


class WindowSpan:
    """One window's units of one node, by place in the node."""

    __slots__ = ("bound", "bound_count", "locks")

    def __init__(self, bound: Bools, locks: Counts) -> None:
        self.bound = bound
        """Which units the tree holds."""
        self.locks = locks
        """Requests that need each."""
        self.bound_count = int(np.count_nonzero(bound))
        """Units held."""

    @staticmethod
    def of(bound: Bools) -> WindowSpan:
        """Nobody needs any of them."""
        return WindowSpan(bound, np.zeros(len(bound), np.int32))

    def evictable(self) -> IntArray:
        """Places of the units that nobody needs, the first ones first: those the fewest matches end behind."""
        return np.flatnonzero(self.bound & (self.locks == 0))

    def release(self, places: IntArray) -> None:
        """Let go of units."""
        self.bound[places] = False
        self.bound_count -= len(places)

    def cut(self, units: int) -> WindowSpan:
        """Keep what lies behind the first `units`, and return those."""
        front = WindowSpan(self.bound[:units].copy(), self.locks[:units].copy())
        self.bound, self.locks = self.bound[units:].copy(), self.locks[units:].copy()
        self.bound_count -= front.bound_count
        return front

    def put_behind(self, front: WindowSpan) -> None:
        """Take back what was cut off."""
        self.bound = np.concatenate([front.bound, self.bound])
        self.locks = np.concatenate([front.locks, self.locks])
        self.bound_count += front.bound_count


class Node:
    """Some whole pages behind `parent`, `None` of a root, which has no page. Whoever holds the tree mutates it."""

    __slots__ = (
        "children",
        "first",
        "is_alive",
        "locks",
        "pages",
        "parent",
        "queued",
        "raw",
        "spans",
        "stamps",
        "state",
        "state_locks",
    )

    def __init__(
        self,
        parent: Node | None,
        raw: bytes,
        pages: IntArray,
        spans: list[WindowSpan],
        stamps: list[float],
    ) -> None:
        """No child, no state, nobody needs it."""
        self.parent = parent
        self.raw = raw
        """Its tokens, int64, as bytes."""
        self.first: int = 0 if parent is None else parent.end
        """Pages before it."""
        self.pages = pages
        """Virtual pages, `NO_PAGE` for those of which nothing is held."""
        self.spans = spans
        """One a window."""
        self.state = NO_STATE
        """Virtual state slot of the checkpoint behind its last token."""
        self.children: dict[bytes, Node] = {}
        """By the bytes of their first page."""
        self.locks = 0
        """Requests whose prefix runs through it."""
        self.state_locks = 0
        """Requests that are about to copy its state."""
        self.stamps = stamps
        """What the eviction policy noted at the last use of each slot."""
        self.queued = [False] * len(stamps)
        """Whether each slot is in the eviction queue."""
        self.is_alive = True
        """Whether it is in the tree."""

    @property
    def end(self) -> int:
        """Pages up to its end."""
        return self.first + len(self.pages)

    @property
    def is_root(self) -> bool:
        """Whether it stands for the empty prefix."""
        return self.parent is None

    def units(self, window: TreeWindow, places: IntArray) -> IntArray:
        """Virtual units of a window at places in the node."""
        if window.ratio == 1:
            return self.pages[places]
        units: IntArray = self.pages[places // window.ratio] * window.ratio + places % window.ratio
        return units


def root_of(shape: TreeShape) -> Node:
    """An empty prefix."""
    none = np.empty(0, np.int64)
    spans = [WindowSpan.of(np.empty(0, np.bool_)) for _ in shape.windows]
    return Node(None, b"", none, spans, [0.0] * (len(shape.windows) + 2))


def nodes_below(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node, `roots` among them."""
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        yield node


def split(node: Node, page_count: int, shape: TreeShape) -> Node:
    """Cut a node behind its first pages; the new node in front of it.

    The node itself keeps its end, its state and its children, so whoever points at a node's end still does.
    """
    parent = node.parent
    assert parent is not None, "a root has no page to cut"
    page_bytes = shape.page_tokens * 8
    cut = page_count * page_bytes
    spans = [
        span.cut(page_count * window.ratio) for span, window in zip(node.spans, shape.windows, strict=True)
    ]
    front = Node(parent, node.raw[:cut], node.pages[:page_count].copy(), spans, node.stamps.copy())
    front.locks = node.locks
    parent.children[front.raw[:page_bytes]] = front
    node.raw, node.pages = node.raw[cut:], node.pages[page_count:].copy()
    node.parent, node.first = front, front.end
    front.children[node.raw[:page_bytes]] = node
    return front


def join(front: Node) -> bool:
    """Undo the split that made `front`, if nobody has come to need it for itself; whether it is gone."""
    parent, (node, *others) = front.parent, front.children.values()
    assert parent is not None, "a root was never cut off"
    if others or front.locks != node.locks:
        return False
    page_bytes = len(front.raw) // len(front.pages)
    for span, before in zip(node.spans, front.spans, strict=True):
        span.put_behind(before)
    node.raw, node.pages = front.raw + node.raw, np.concatenate([front.pages, node.pages])
    node.parent, node.first = parent, front.first
    parent.children[node.raw[:page_bytes]] = node
    front.is_alive = False
    return True
