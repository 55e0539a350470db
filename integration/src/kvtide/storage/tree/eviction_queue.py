"""What could be evicted, in the order of its ranks: one queue over all slots of all nodes.

Each slot of a node is in the queue once at most, so the queue is as long as the tree. The rank that an entry was put in with may be
too low by the time it comes up, since its slot was used in between: then it goes back with the rank that it has. So a use costs
nothing here, however long the prefix. A rank that has *fallen*, as that of a checkpoint does where another one comes to lie in front of it, is
not looked for: such an entry comes up late, at the rank that it was put in with. One checkpoint behind a system prompt lowers those of all
prompts that go on from there, and to find them would cost an insertion their number.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from kvtide.storage.tree.nodes import FULL_SLOT, NO_STATE, Node
from kvtide.storage.tree.policies import EvictionPolicy
from kvtide.storage.tree.shape import TreeShape

_SLACK = 64


class EvictionQueue:
    """Entries of one tree."""

    def __init__(self, shape: TreeShape, policy: EvictionPolicy) -> None:
        """Empty."""
        self._shape = shape
        self._policy = policy
        self._state_slot = len(shape.windows) + 1
        names = (shape.full, *(window.name for window in shape.windows), shape.state)
        self._bytes = [0 if name is None else shape.unit_bytes[name] for name in names]
        self._entries: list[tuple[float, int, int, Node]] = []
        self._pushed = 0

    def add_all(self, node: Node) -> None:
        """Something of a node may have become evictable."""
        if node.is_root or not node.is_alive:
            return
        if not node.children and not node.locks:
            self.add(node, FULL_SLOT)
        for slot, span in enumerate(node.spans, 1):
            if span.bound_count:
                self.add(node, slot)
        if node.state != NO_STATE:
            self.add(node, self._state_slot)

    def add(self, node: Node, slot: int) -> None:
        """Put a slot in, unless it is."""
        if not node.queued[slot]:
            node.queued[slot] = True
            self._put(node, slot, self._rank(node, slot))

    def pop(self) -> tuple[float, Node, int] | None:
        """The entry of least rank, which may be no candidate any more."""
        while self._entries:
            rank, slot, _, node = heapq.heappop(self._entries)
            if not node.is_alive:
                continue
            now = self._rank(node, slot)
            if now <= rank:
                node.queued[slot] = False
                return rank, node, slot
            self._put(node, slot, now)
        return None

    def settle(self, popped: list[tuple[Node, int]], node_count: int) -> None:
        """What was popped goes back where it is still there; `node_count` nodes are left in the tree."""
        for node, slot in popped:
            if node.is_alive and self.is_candidate(node, slot):
                self.add(node, slot)
        if len(self._entries) > _SLACK + 2 * len(self._bytes) * node_count:
            self._entries = [entry for entry in self._entries if entry[3].is_alive]
            heapq.heapify(self._entries)

    def is_candidate(self, node: Node, slot: int) -> bool:
        """Whether nobody needs something that a slot holds."""
        if slot == FULL_SLOT:
            return not node.children and not node.locks
        if slot == self._state_slot:
            return node.state != NO_STATE and not node.state_locks
        span = node.spans[slot - 1]
        return span.bound_count > 0 and bool((span.bound & (span.locks == 0)).any())

    def _put(self, node: Node, slot: int, rank: float) -> None:
        self._pushed += 1
        heapq.heappush(self._entries, (rank, slot, self._pushed, node))

    def _rank(self, node: Node, slot: int) -> float:
        """As things are now; of a leaf that nobody needs, no slot goes before its pages would."""
        own = self._own_rank(node, slot)
        if slot == FULL_SLOT or node.children or node.locks:
            return own
        return max(own, self._own_rank(node, FULL_SLOT))

    def _own_rank(self, node: Node, slot: int) -> float:
        if slot == FULL_SLOT and node.state == NO_STATE and self._shape.state is not None:
            # Once it is a leaf no hit ends in it.
            return -math.inf
        return self._policy.rank(node.stamps[slot], _SlotWorth(self._shape, self._bytes, node, slot))


class _SlotWorth(NamedTuple):
    """Of one slot of a node; of full attention, that is of all the node holds."""

    shape: TreeShape
    unit_bytes: list[int]
    node: Node
    slot: int

    @property
    def freed_bytes(self) -> int:
        _, sizes, node, slot = self
        spans = node.spans
        if slot > len(spans):
            return sizes[slot]
        if slot != FULL_SLOT:
            return spans[slot - 1].bound_count * sizes[slot]
        freed = len(node.pages) * sizes[FULL_SLOT]
        if node.state != NO_STATE:
            freed += sizes[-1]
        for place, span in enumerate(spans, 1):
            if span.bound_count:
                freed += span.bound_count * sizes[place]
        return freed

    @property
    def computed_tokens(self) -> int:
        shape, _, node, slot = self
        spans, page_count = node.spans, len(node.pages)
        if FULL_SLOT < slot <= len(spans):
            return spans[slot - 1].bound_count * shape.page_tokens // shape.windows[slot - 1].ratio
        if shape.state is not None:
            # Computing goes on from the checkpoint before.
            page_count += node.first
            above = node.parent
            while above is not None:
                if above.state != NO_STATE:
                    page_count -= above.first + len(above.pages)
                    break
                above = above.parent
        return page_count * shape.page_tokens
