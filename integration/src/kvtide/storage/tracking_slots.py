"""Tracking slots: where a row's state is kept at a checkpoint until the tree takes it, and what each strategy holds (rows K7-K9).

| strategy | at rest | while a checkpoint is on its way |
| - | - | - |
| no_buffer | the running slot | and, in the price alone, the copy that the tree is given |
| extra_buffer, plain | running and one tracking slot | the same; a replacement comes when the tree takes it |
| extra_buffer, overlap | running and two | the same |
| extra_buffer_lazy | running and one | running and two: the second is taken when a checkpoint is due |

    forward that ends on the grid   … recorded │ copy: running → tracking │ … processed │ tracking slot → tree, a replacement → row
                                               └ schedule stream, behind the forward, before the next launch

Every slot is in the row's promise, and whatever the tree keeps of states can be evicted, so none of these takes is refused. But
units that are fixed, or under a transfer, may stand in the way for a while. Then the checkpoint is *forgone*: no hit will end there,
and the windows retire as if one did. It is never waited for, so a row holds no more than it was promised either way.

A row copies onto its slots again and again, so they are its own: nobody fixes one or sends from it. A slot on its way goes back to its
row where the tree keeps a checkpoint there already, so it too is nobody else's before the tree has it.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from kvtide.device import IntArray
from kvtide.sizing import CheckpointStrategy, ServingPolicy
from kvtide.storage.evicting_takes import EvictingTakes

NO_TRACKING_SLOT = "no tracking slot"
NO_REPLACEMENT_SLOT = "no replacement slot"


class TrackingSlots:
    """Slots of rows beside their running ones. One owner: the storage's prefix sharing."""

    def __init__(self, policy: ServingPolicy, row_count: int, takes: EvictingTakes) -> None:
        """No row has any."""
        rule = policy.rule
        self.at_rest = rule.slots - 1
        """Slots that a row begins with, and has when no checkpoint is on its way."""
        self._most = rule.slots_at_checkpoint - 1
        self._takes_second_when_due = policy.strategy is CheckpointStrategy.EXTRA_BUFFER_LAZY
        self._takes = takes
        self._free: list[list[int]] = [[] for _ in range(row_count)]
        self._on_their_way: list[deque[tuple[int, int]]] = [deque() for _ in range(row_count)]
        self.stalls: Counter[str] = Counter()
        """Checkpoints that were forgone, and slots that could not be replaced at once, by reason."""

    def begin(self, row: int, slots: IntArray) -> None:
        """A row has these from the start."""
        self._free[row] = slots.tolist()

    def count(self, row: int) -> int:
        """Slots of a row."""
        return len(self._free[row]) + len(self._on_their_way[row])

    def due(self, row: int, length: int) -> int | None:
        """The slot into which the state at `length` is to be copied now; `None` where there is none: the checkpoint is forgone."""
        free = self._free[row]
        if not free:
            self._take(row)
        if not free:
            self.stalls[NO_TRACKING_SLOT] += 1
            return None
        slot = free.pop()
        self._on_their_way[row].append((length, slot))
        if self._takes_second_when_due and not free:
            # Without it the next checkpoint is forgone, if it is due before this one is the tree's.
            self._take(row)
        return slot

    def arrived(self, row: int, length: int) -> int | None:
        """The slot with the state at `length`, whose forward was processed; it is no longer the row's. `None` for a forgone one."""
        waiting = self._on_their_way[row]
        if not waiting or waiting[0][0] != length:
            return None
        return waiting.popleft()[1]

    def keep(self, row: int, slot: int) -> None:
        """The tree had a checkpoint there: the slot is the row's again."""
        self._free[row].append(slot)

    def replace(self, row: int) -> IntArray:
        """Have the row hold what it has at rest, behind a checkpoint; slots that it gives up."""
        free = self._free[row]
        while self.count(row) < self.at_rest:
            if not self._take(row):
                self.stalls[NO_REPLACEMENT_SLOT] += 1
                break
        spare = max(0, min(len(free), self.count(row) - self.at_rest))
        given_up = np.array(free[:spare], np.int64)
        del free[:spare]
        return given_up

    def end(self, row: int) -> IntArray:
        """Every slot of a row that is over."""
        slots = self._free[row] + [slot for _, slot in self._on_their_way[row]]
        self._free[row] = []
        self._on_their_way[row].clear()
        return np.array(slots, np.int64)

    def _take(self, row: int) -> bool:
        if self.count(row) >= self._most:
            return False
        slots = self._takes.try_slots(1)
        if slots is None:
            return False
        self._free[row] += slots.tolist()
        return True
