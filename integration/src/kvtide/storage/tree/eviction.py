"""Eviction: the least memory of the tree that is enough, in the order of the policy's ranks (row K8).

*Planning* takes victims off the queue until the asker says that it is enough, asked after 1, 2, 3, 4, 6, 9, … victims and then between; of the
last victim it takes only what it must. What was taken off in vain goes back, so a refused eviction has changed nothing.
*Carrying out* takes the victims out of the tree; it cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import add

import numpy as np

from kvtide.device import IntArray
from kvtide.storage.tree.eviction_queue import EvictionQueue
from kvtide.storage.tree.locks import TreeBooks
from kvtide.storage.tree.nodes import FULL_SLOT, NO_PAGE, NO_STATE, Node, split
from kvtide.storage.tree.policies import EvictionPolicy
from kvtide.storage.tree.shape import TreeShape
from kvtide.storage.tree.victims import Drawing, Victim

Enough = Callable[[Mapping[str, int]], bool]
"""Whether freeing so many units by band would be enough; a yes stays one when more are freed."""


class Evictor:
    """Evictions from one tree."""

    def __init__(self, shape: TreeShape, books: TreeBooks, policy: EvictionPolicy) -> None:
        """Of an empty tree."""
        self._shape = shape
        self._books = books
        self._state_slot = len(shape.windows) + 1
        self._names = (shape.full, *(window.name for window in shape.windows), shape.state)
        self.policy = policy
        """Ranks what could go."""
        self.queue = EvictionQueue(shape, policy)
        """What could go."""
        self.node_count = 0
        """Nodes of the tree but roots; the tree counts those that come, this those that go."""
        self.bare_roots: list[Node] = []
        """Roots whose last child has gone; the tree forgets them."""

    def evict(self, is_enough: Enough) -> dict[str, IntArray] | None:
        """As `PrefixTree.evict`."""
        if is_enough(self._by_band([0] * len(self._names))):
            return {}
        drawing = Drawing(self._shape, self.queue)
        plan = self._planned(drawing, is_enough)
        freed = None if plan is None else self._carried_out(plan)
        self.queue.settle(drawing.popped, self.node_count)
        return freed

    # ── planning ──

    def _planned(self, drawing: Drawing, is_enough: Enough) -> list[Victim] | None:
        victims: list[Victim] = []
        freed = [[0] * len(self._names)]
        too_few, target = 0, 1
        while True:
            while len(victims) < target and (victim := drawing.next()) is not None:
                victims.append(victim)
                freed.append(_sum(freed[-1], drawing.freed_by(victim)))
            if len(victims) == too_few:
                return None
            if is_enough(self._by_band(freed[-1])):
                break
            too_few, target = len(victims), len(victims) + max(1, len(victims) // 2)
        count = _least(too_few, len(victims), lambda count: is_enough(self._by_band(freed[count])))
        last = victims[count - 1]
        if last.slot != self._state_slot and (last.slot != FULL_SLOT or self._shape.state is None):

            def suffices(unit_count: int) -> bool:
                part = drawing.freed_by(last._replace(unit_count=unit_count))
                return is_enough(self._by_band(_sum(freed[count - 1], part)))

            # Of a leaf only where hits can end at any page.
            last = last._replace(unit_count=_least(0, last.unit_count, suffices))
        return [*victims[: count - 1], last]

    def _by_band(self, units: list[int]) -> dict[str, int]:
        return {name: count for name, count in zip(self._names, units, strict=True) if name is not None}

    # ── carrying out ──

    def _carried_out(self, victims: list[Victim]) -> dict[str, IntArray]:
        freed: list[list[IntArray]] = [[] for _ in self._names]
        states: list[int] = []
        for victim in victims:
            self.policy.evicted(victim.rank)
            node = victim.node
            if not node.is_alive:
                # It held nothing, and went with the last of its children.
                continue
            if victim.slot == FULL_SLOT:
                if victim.unit_count < len(node.pages):
                    self.queue.add_all(split(node, len(node.pages) - victim.unit_count, self._shape))
                    self.node_count += 1
                self._remove(node, freed, states)
            elif victim.slot == self._state_slot:
                self._let_go_of_state(node, states)
            else:
                self._let_go(
                    node, victim.slot, node.spans[victim.slot - 1].evictable()[: victim.unit_count], freed
                )
        if states:
            freed[self._state_slot].append(np.array(states, np.int64))
        order = (*range(1, len(self._names)), FULL_SLOT)
        return {
            name: np.concatenate(freed[slot])
            for slot in order
            if (name := self._names[slot]) is not None and freed[slot]
        }

    def _remove(self, node: Node, freed: list[list[IntArray]], states: list[int]) -> None:
        """Take a leaf that nobody needs out of the tree, with all it holds."""
        parent = node.parent
        assert parent is not None, "a root stays"
        for slot, span in enumerate(node.spans, 1):
            if span.bound_count:
                places = np.flatnonzero(span.bound)
                freed[slot].append(node.units(self._shape.windows[slot - 1], places))
                self._books.held[slot] -= len(places)
        if node.state != NO_STATE:
            self._let_go_of_state(node, states)
        freed[FULL_SLOT].append(node.pages)
        self._take_out(node, parent)
        self.prune(parent)

    def prune(self, node: Node) -> None:
        """Take a node out that nobody needs, that is a leaf and that holds nothing, and those above that become so.

        Only without full attention are there such nodes. One that holds something can be evicted.
        """
        while not node.is_root and not node.children and not node.locks:
            parent = node.parent
            if (
                self._shape.full is not None
                or node.state != NO_STATE
                or any(s.bound_count for s in node.spans)
            ):
                self.queue.add(node, FULL_SLOT)
                return
            assert parent is not None, "a root was told apart"
            self._take_out(node, parent)
            node = parent

    def _take_out(self, node: Node, parent: Node) -> None:
        del parent.children[node.raw[: self._shape.page_tokens * 8]]
        self._books.held[FULL_SLOT] -= len(node.pages)
        node.is_alive = False
        self.node_count -= 1
        if parent.is_root and not parent.children:
            self.bare_roots.append(parent)

    def _let_go_of_state(self, node: Node, states: list[int]) -> None:
        states.append(node.state)
        node.state = NO_STATE
        self._books.held[self._state_slot] -= 1

    def _let_go(self, node: Node, slot: int, places: IntArray, freed: list[list[IntArray]]) -> None:
        freed[slot].append(node.units(self._shape.windows[slot - 1], places))
        node.spans[slot - 1].release(places)
        self._books.held[slot] -= len(places)
        if self._shape.full is None:
            # Without an owner the chain takes back a page of which nothing is bound: its id may soon be another's.
            is_held = np.zeros(len(node.pages), np.bool_)
            for span in node.spans:
                is_held |= span.bound.reshape(len(node.pages), -1).any(axis=1)
            node.pages[~is_held] = NO_PAGE


def _sum(first: list[int], second: list[int]) -> list[int]:
    return list(map(add, first, second))


def _least(too_few: int, enough: int, suffices: Callable[[int], bool]) -> int:
    """The least count that suffices, where `too_few` does not and `enough` does."""
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if suffices(middle):
            enough = middle
        else:
            too_few = middle
    return enough
