"""Inserting: a request's own pages become the tree's, or give way to those that it has (rows K7, K8).

    tree        ├── known ──┬─ … another prompt
    request     ├── known ──┼── new ──────┤ ● state

| the request's pages | become |
| - | - |
| where the tree has none | the tree's, with the window units that are still bound to them |
| where it has some | duplicates: freed, and the row names the tree's from then on |
| of those, window units that the tree had let go of | the tree's, *rehomed* to its virtual pages |

An insertion begins behind the request's lock, so its cost follows what is new. It changes the tree alone; what the storage has to do
with the chain is in its answer, and cannot fail.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from kvtide.device import IntArray
from kvtide.storage.tree.matching import common_pages
from kvtide.storage.tree.nodes import FULL_SLOT, NO_PAGE, NO_STATE, Bools, Node, WindowSpan, split
from kvtide.storage.tree.shape import TreeShape, TreeWindow


@attrs.frozen(eq=False)
class Inserted:
    """What becomes of the pages that a request handed over."""

    pages: IntArray
    """Virtual pages in their place: what the row must name from now on."""

    rehomed: Mapping[str, tuple[IntArray, IntArray]]
    """Window → virtual units to rehome first, from and to."""

    freed: Mapping[str, IntArray]
    """Band → virtual units to free then, windows before the owner."""

    took_state: bool
    """Whether the state slot is the tree's; if not, the tree had one there."""


@attrs.frozen(kw_only=True, eq=False)
class Handed:
    """What a request hands over: pages behind its lock."""

    shape: TreeShape
    """Of the tree."""

    raw: bytes
    """Tokens of `pages`, int64."""

    first: int
    """Pages before them."""

    pages: IntArray
    """Virtual."""

    held: tuple[int, ...]
    """First unit of each window that the request still binds."""

    def bound(self, place: int, window: TreeWindow, first: int, count: int) -> Bools:
        """Which of a window's units the request binds, of `count` pages from `first` on."""
        bound: Bools = np.zeros(count * window.ratio, np.bool_)
        bound[max(0, self.held[place] - first * window.ratio) :] = True
        return bound

    def live_pages(self) -> IntArray:
        """The pages; without an owner, `NO_PAGE` for those of which nothing is bound: the chain has taken them back."""
        is_live: Bools = np.zeros(len(self.pages), np.bool_)
        for place, window in enumerate(self.shape.windows):
            is_live[max(0, self.held[place] // window.ratio - self.first) :] = True
        return np.where(is_live, self.pages, NO_PAGE)


class Insertion:
    """One insertion in progress."""

    def __init__(self, handed: Handed, added: list[int], stamp: float) -> None:
        self._handed = handed
        self._shape = handed.shape
        self._stamp = stamp
        self._added = added
        """Units by slot that are new to the tree."""
        self._pages = handed.pages if self._shape.full is not None else handed.live_pages()
        self._placed: list[IntArray] = []
        self._rehomed: list[list[tuple[IntArray, IntArray]]] = [[] for _ in self._shape.windows]
        self._freed: list[list[IntArray]] = [[] for _ in self._added]
        self.new_nodes: list[Node] = []
        """Nodes that came about."""
        self.met: list[Node] = []
        """Nodes whose slots may have changed."""

    def run(self, node: Node) -> Node:
        """Place everything behind `node`, where the handed pages begin; the node that ends where they do."""
        handed, page_bytes = self._handed, self._shape.page_tokens * 8
        at, count = 0, len(handed.pages)
        while at < count:
            child = node.children.get(handed.raw[at * page_bytes : (at + 1) * page_bytes])
            if child is None:
                node = self._add(node, at)
                break
            known = len(child.pages)
            if not handed.raw.startswith(child.raw, at * page_bytes):
                known = common_pages(child.raw, handed.raw, at * page_bytes, page_bytes)
                child = split(child, known, self._shape)
                self.new_nodes.append(child)
            self._merge(child, at)
            node, at = child, at + known
        return node

    def answer(self, took_state: bool) -> Inserted:
        """What it came to."""
        names = (self._shape.full, *(window.name for window in self._shape.windows))
        order = (*range(1, len(names)), FULL_SLOT)
        return Inserted(
            pages=np.concatenate([*self._placed, np.empty(0, np.int64)]),
            rehomed={
                window.name: (
                    np.concatenate([source for source, _ in pairs]),
                    np.concatenate([target for _, target in pairs]),
                )
                for window, pairs in zip(self._shape.windows, self._rehomed, strict=True)
                if pairs
            },
            freed={
                name: np.concatenate(self._freed[slot])
                for slot in order
                if (name := names[slot]) is not None and self._freed[slot]
            },
            took_state=took_state,
        )

    def _add(self, parent: Node, at: int) -> Node:
        """A new leaf of all that is left."""
        handed, page_bytes = self._handed, self._shape.page_tokens * 8
        pages = self._pages[at:].copy()
        spans = [
            WindowSpan.of(handed.bound(place, window, handed.first + at, len(pages)))
            for place, window in enumerate(self._shape.windows)
        ]
        stamps = [self._stamp] * (len(spans) + 2)
        leaf = Node(parent, handed.raw[at * page_bytes :], pages, spans, stamps)
        parent.children[leaf.raw[:page_bytes]] = leaf
        self._added[FULL_SLOT] += len(pages)
        for slot, span in enumerate(spans, 1):
            self._added[slot] += span.bound_count
        self._placed.append(pages)
        self.new_nodes.append(leaf)
        return leaf

    def _merge(self, node: Node, at: int) -> None:
        """The request has computed a node's pages again."""
        own = self._pages[at : at + len(node.pages)]
        if self._shape.full is None:
            # A page of which the tree holds nothing has no id; the request's serves.
            dead = node.pages == NO_PAGE
            node.pages[dead] = own[dead]
        else:
            self._freed[FULL_SLOT].append(own)
        adopted = node.pages == own
        for place, (window, span) in enumerate(zip(self._shape.windows, node.spans, strict=True)):
            bound = self._handed.bound(place, window, node.first, len(own))
            if not bound.any():
                continue
            is_adopted = np.repeat(adopted, window.ratio)
            missing = bound & ~span.bound
            for places, to in (
                (np.flatnonzero(missing & ~is_adopted), self._rehomed[place]),
                (np.flatnonzero(bound & span.bound & ~is_adopted), None),
            ):
                if len(places):
                    units = own[places // window.ratio] * window.ratio + places % window.ratio
                    if to is None:
                        self._freed[1 + place].append(units)
                    else:
                        to.append((units, node.units(window, places)))
            gained = np.flatnonzero(missing)
            span.bound[gained] = True
            span.bound_count += len(gained)
            self._added[1 + place] += len(gained)
            node.stamps[1 + place] = self._stamp
        self._placed.append(node.pages.copy())
        self.met.append(node)


def place_state(node: Node, state: int) -> bool:
    """Keep a checkpoint at a node's end; whether there was none."""
    if state == NO_STATE or node.is_root or node.state != NO_STATE:
        return False
    node.state = state
    return True
