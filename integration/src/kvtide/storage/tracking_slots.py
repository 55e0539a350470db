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

Whatever is written there is a whole state, so no slot is zeroed; and all rows of a step are served with one take (row K1). Where that
is not to be had whole, rows are served in order as far as it goes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

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

    def counts(self, rows: Sequence[int]) -> IntArray:
        """Slots of each of `rows`."""
        return np.array([self._count(row) for row in rows], np.int64)

    def due(self, rows: Sequence[int], lengths: Sequence[int]) -> IntArray:
        """Slots into which the states of rows at `lengths` are to be copied now; −1 for a row that has none: its checkpoint is forgone."""
        free = self._free
        self._take([row for row in rows if not free[row]])
        slots = np.full(len(rows), -1, np.int64)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if free[row]:
                slots[place] = slot = free[row].pop()
                self._on_their_way[row].append((length, slot))
            else:
                self.stalls[NO_TRACKING_SLOT] += 1
        return slots

    def copied(self, rows: Sequence[int]) -> None:
        """The states of rows are on their way in the slots that were due last: have what the next checkpoint needs before they arrive.

        Only behind the copy: where this raises, each slot on its way holds its state.
        """
        if self._takes_second_when_due:
            # Without it the next checkpoint is forgone, if it is due before this one is the tree's.
            self._take([row for row in rows if not self._free[row]])

    def forgo(self, rows: Sequence[int]) -> None:
        """Nothing was copied into the slots that were due last: they are on no way to the tree."""
        for row in rows:
            self._free[row].append(self._on_their_way[row].pop()[1])

    def arrived(self, row: int, length: int) -> int | None:
        """The slot with the state at `length`, whose forward was processed; it is no longer the row's. `None` for a forgone one."""
        waiting = self._on_their_way[row]
        if not waiting or waiting[0][0] != length:
            return None
        return waiting.popleft()[1]

    def keep(self, row: int, slot: int) -> None:
        """The tree had a checkpoint there: the slot is the row's again."""
        self._free[row].append(slot)

    def give_up(self, rows: Sequence[int]) -> IntArray:
        """Slots that rows need no longer, behind a checkpoint: those beyond what they hold at rest."""
        given_up: list[int] = []
        for row in rows:
            free = self._free[row]
            spare = max(0, min(len(free), self._count(row) - self.at_rest))
            given_up += free[:spare]
            del free[:spare]
        return np.array(given_up, np.int64)

    def replace(self, rows: Sequence[int]) -> None:
        """Have rows hold what they do at rest, behind a checkpoint."""
        self._take([row for row in rows for _ in range(self.at_rest - self._count(row))])
        short = sum(self._count(row) < self.at_rest for row in rows)
        if short:
            self.stalls[NO_REPLACEMENT_SLOT] += short

    def end(self, row: int) -> IntArray:
        """Every slot of a row that is over."""
        slots = self._free[row] + [slot for _, slot in self._on_their_way[row]]
        self._free[row] = []
        self._on_their_way[row].clear()
        return np.array(slots, np.int64)

    # ── helpers ──

    def _count(self, row: int) -> int:
        return len(self._free[row]) + len(self._on_their_way[row])

    def _is_priced(self, row: int) -> bool:
        """Whether one slot more is in a row's promise."""
        return self._count(row) < self._most

    def _take(self, rows: Sequence[int]) -> None:
        """One slot more for each of `rows`, as far as they are priced and can be had."""
        wanting = [row for row in rows if self._is_priced(row)]
        # Fewer slots than rows are an answer too: the last rows go without.
        for row, slot in zip(wanting, self._takes.try_most_slots(len(wanting)).tolist(), strict=False):
            self._free[row].append(slot)
