"""The tree's books, counted anew from its nodes: for checks at idle and in tests. Costs what the tree has of nodes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvtide.storage.tree.locks import TreeBooks, counted_on
from kvtide.storage.tree.nodes import FULL_SLOT, NO_STATE, Node
from kvtide.storage.tree.shape import TreeShape


def counted(shape: TreeShape, roots: Iterable[Node]) -> tuple[TreeBooks, int]:
    """The books that the nodes below `roots` make, and how many nodes there are."""
    books, count, waiting = TreeBooks(shape), 0, list(roots)
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        if node.is_root:
            continue
        count += 1
        _add(books, node)
    return books, count


def _add(books: TreeBooks, node: Node) -> None:
    pages, state = len(node.pages), len(books.held) - 1
    books.held[FULL_SLOT] += pages
    if node.locks:
        books.needed[FULL_SLOT] += pages
    for slot, span in enumerate(node.spans, 1):
        books.held[slot] += int(np.count_nonzero(span.bound))
        needed, again = counted_on(span.locks[span.bound], span.given[span.bound])
        books.needed[slot] += needed
        books.again[slot] += again
    books.held[state] += int(node.state != NO_STATE)
    books.needed[state] += int(node.state_locks > 0)
