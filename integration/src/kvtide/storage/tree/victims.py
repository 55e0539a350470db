"""Victims: what an eviction would take, one after the other, before any of it goes.

| slot | victim | leaves |
| - | - | - |
| full | a leaf that nobody needs, with all it holds | its parent, perhaps a leaf now |
| window | a node's units that nobody needs, the front ones first | a tombstone: matches may end behind what is left |
| state | a node's checkpoint | a tombstone: no hit ends there any more |

Of a leaf that nobody needs, a window or a checkpoint does not go alone: no hit could end in what is left.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvtide.storage.tree.eviction_queue import EvictionQueue
from kvtide.storage.tree.nodes import FULL_SLOT, NO_STATE, Node
from kvtide.storage.tree.shape import TreeShape


class Victim(NamedTuple):
    """One step of an eviction."""

    node: Node
    """Whose."""

    slot: int
    """`FULL_SLOT` for all that the node holds."""

    unit_count: int
    """Units of the slot, the front ones; of a leaf its pages, the last ones."""

    rank: float
    """That it had."""


class Drawing:
    """Victims taken off the queue in turn, as if those before had gone. The tree is as it was."""

    def __init__(self, shape: TreeShape, queue: EvictionQueue) -> None:
        """None yet."""
        self._shape = shape
        self._queue = queue
        self._state_slot = len(shape.windows) + 1
        self.popped: list[tuple[Node, int]] = []
        """Entries that were taken off the queue."""
        self._gone: dict[Node, int] = {}
        """Slots of each node that went before, as bits."""
        self._children_gone: dict[Node, int] = {}

    def next(self) -> Victim | None:
        """The next one; `None` where nothing more can go."""
        while (found := self._queue.pop()) is not None:
            rank, node, slot = found
            self.popped.append((node, slot))
            if self._gone.get(node, 0) & ((1 << FULL_SLOT) | (1 << slot)):
                continue
            is_leaf = len(node.children) == self._children_gone.get(node, 0)
            if is_leaf and not node.locks:
                return self._choose(node, FULL_SLOT, len(node.pages), rank)
            if slot == FULL_SLOT:
                continue
            if slot == self._state_slot:
                count = int(self._queue.is_candidate(node, slot))
            elif node.locks:
                count = len(node.spans[slot - 1].evictable())
            else:
                count = node.spans[slot - 1].bound_count
            if count:
                return self._choose(node, slot, count, rank)
        return None

    def freed_by(self, victim: Victim) -> list[int]:
        """Units, by slot, that a victim frees beside those before it."""
        node, count = victim.node, victim.unit_count
        units = [0] * (self._state_slot + 1)
        units[victim.slot] = count
        if victim.slot != FULL_SLOT:
            return units
        gone, is_whole = self._gone[node], count == len(node.pages)
        for slot, (window, span) in enumerate(zip(self._shape.windows, node.spans, strict=True), 1):
            if gone & (1 << slot) or not span.bound_count:
                continue
            units[slot] = (
                span.bound_count if is_whole else int(np.count_nonzero(span.bound[-count * window.ratio :]))
            )
        if node.state != NO_STATE and not gone & (1 << self._state_slot):
            units[self._state_slot] = 1
        return units

    def _choose(self, node: Node, slot: int, count: int, rank: float) -> Victim:
        self._gone[node] = self._gone.get(node, 0) | (1 << slot)
        parent = node.parent
        if slot == FULL_SLOT and parent is not None and not parent.is_root:
            gone = self._children_gone[parent] = self._children_gone.get(parent, 0) + 1
            if gone == len(parent.children) and not parent.locks:
                self._queue.add(parent, FULL_SLOT)
        return Victim(node, slot, count, rank)
