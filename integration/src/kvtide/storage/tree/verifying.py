"""The tree's locks and books, counted anew: locks from those that are open, books from the nodes. For checks at idle and in tests."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from kvtide.device import IntArray
from kvtide.ledger import InvariantError
from kvtide.storage.tree.locks import TreeBooks, TreeLock, counted_on
from kvtide.storage.tree.nodes import FULL_SLOT, NO_STATE, Node, nodes_below
from kvtide.storage.tree.shape import TreeShape


@attrs.define(eq=False)
class _Needed:
    """Of one node: how many locks run through it, and how many need each unit."""

    windows: list[IntArray]
    """By window and unit."""
    locks: int = 0
    states: int = 0


def counted(shape: TreeShape, roots: Iterable[Node]) -> tuple[TreeBooks, int]:
    """The books that the nodes below `roots` make, and how many nodes there are."""
    books, count = TreeBooks(shape), 0
    for node in nodes_below(roots):
        if not node.is_root:
            count += 1
            _add(books, node)
    return books, count


def verify_locks(shape: TreeShape, roots: Iterable[Node], locks: Iterable[TreeLock]) -> None:
    """Raise `InvariantError` unless what the nodes say is needed is what `locks`, all that somebody still has to end, need."""
    needed: dict[Node, _Needed] = {}
    for lock in locks:
        _need(shape, needed, lock)
    for node in nodes_below(roots):
        expected = needed.pop(node, None) or _nothing(node)
        found = _Needed(
            [span.locks.astype(np.int64) for span in node.spans],
            node.locks,
            node.state_locks,
        )
        if _told(found) != _told(expected):
            raise InvariantError(
                "tree.locks",
                f"pages {node.first} to {node.end} of a prefix say that they are needed by {_told(found)}, the open locks need "
                f"{_told(expected)}: requests, by window and unit, the checkpoint",
                "a lock was dropped without an unlock, or an unlock missed a node",
            )
    if needed:
        raise InvariantError(
            "tree.locks",
            f"open locks need {len(needed)} nodes that are not in the tree",
            "something was evicted that somebody needs",
        )


def _need(shape: TreeShape, needed: dict[Node, _Needed], lock: TreeLock) -> None:
    node: Node | None = lock.node
    while node is not None:
        of_node = needed.setdefault(node, _nothing(node))
        of_node.locks += 1
        of_node.states += node is lock.state_node
        for place, window in enumerate(shape.windows):
            begin, base = lock.begins[place], node.first * window.ratio
            of_node.windows[place][max(0, begin - base) :] += 1
        node = node.parent


def _nothing(node: Node) -> _Needed:
    return _Needed([np.zeros(len(span.locks), np.int64) for span in node.spans])


def _told(needed: _Needed) -> tuple[object, ...]:
    return needed.locks, [counts.tolist() for counts in needed.windows], needed.states


def _add(books: TreeBooks, node: Node) -> None:
    pages, state = len(node.pages), len(books.held) - 1
    books.held[FULL_SLOT] += pages
    if node.locks:
        books.needed[FULL_SLOT] += pages
    for slot, span in enumerate(node.spans, 1):
        books.held[slot] += int(np.count_nonzero(span.bound))
        needed, again = counted_on(span.locks[span.bound])
        books.needed[slot] += needed
        books.again[slot] += again
    books.held[state] += int(node.state != NO_STATE)
    books.needed[state] += int(node.state_locks > 0)
