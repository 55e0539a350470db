"""What is known of each row that shares prefixes: its tokens, how far the tree has them, and what of its price the tree holds.

    tokens      ├──────────── known to the host ────────────┤
    the tree's  ├── given with the hit ──┼── handed over ──┤ end of the tree's pages
    full                                 [ charged ──────── )
    window                    [ charged ─────────────────── )   from the first unit that the row still reads

*Charged* are units that the tree holds and the row counts as its own, since they are in its price: of full attention what it has handed over, of a
window that and the tail that came with the hit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray
from kvtide.ledger import InvariantError
from kvtide.sizing import SizedPlan
from kvtide.storage.tree import TreeLock


class SharedRows:
    """By row. One owner: `PrefixSharing`."""

    def __init__(self, sized: SizedPlan, *, full_place: int | None, window_places: Sequence[int]) -> None:
        """None shares. Places are those of the tree's bands in the chain."""
        row_count = sized.max_running_requests
        self._full_place = full_place
        self._window_places = list(window_places)
        self.is_shared: npt.NDArray[np.bool_] = np.zeros(row_count, np.bool_)
        """Rows that were admitted with their tokens."""
        self.locks: dict[int, TreeLock] = {}
        """Of each of them."""
        self.branches: IntArray = np.zeros(row_count, np.int64)
        """Tokens of the prompt that the tree knew when the row was admitted."""
        self.ends: IntArray = np.zeros(row_count, np.int64)
        """Pages, from the first, that are the tree's."""
        self.begins: IntArray = np.zeros((len(self._window_places), row_count), np.int64)
        """First page of each window that the row needs of the tree."""
        self.charged: IntArray = np.zeros((len(sized.plan.sub_pools), row_count), np.int64)
        """Units, `[bands, rows]`, in chain order."""
        self.known: IntArray = np.zeros(row_count, np.int64)
        """Tokens that the scheduler has told, from the first."""
        self._tokens: IntArray = np.zeros((row_count, sized.max_context_tokens), np.int64)

    def open(self, row: int, lock: TreeLock, prompt: IntArray, branch_tokens: int) -> IntArray:
        """A request begins with a hit; units, by band, that it is charged no longer, as `recount`: negative, for it was charged nothing."""
        self.locks[row] = lock
        self.is_shared[row] = True
        self._tokens[row, : len(prompt)], self.known[row] = prompt, len(prompt)
        self.branches[row] = branch_tokens
        self.ends[row] = lock.pages
        return self.recount(row)

    def close(self, row: int) -> tuple[TreeLock, IntArray]:
        """Its request is over: its lock, which is still to be ended, and what it was charged."""
        charged: IntArray = self.charged[:, row].copy()
        self.is_shared[row] = False
        self.charged[:, row] = 0
        self.begins[:, row] = 0
        self.known[row] = self.branches[row] = self.ends[row] = 0
        return self.locks.pop(row), charged

    def learn(self, rows: IntArray, lengths: IntArray, chosen: IntArray) -> None:
        """`chosen[i]`: the token behind the first `lengths[i]` of row `rows[i]`, −1 for none."""
        is_next = (chosen >= 0) & (lengths == self.known[rows])
        self._tokens[rows[is_next], lengths[is_next]] = chosen[is_next]
        self.known[rows[is_next]] += 1

    def tokens(self, row: int, first: int, end: int) -> IntArray:
        """Tokens `[first, end)` of a row, which are known."""
        tokens: IntArray = self._tokens[row, first:end]
        return tokens

    def recount(self, row: int) -> IntArray:
        """What the row is charged follows from its lock, which has changed; units that are charged no longer, negative for more."""
        lock, before = self.locks[row], self.charged[:, row].copy()
        self.begins[:, row] = lock.begins
        if self._full_place is not None:
            self.charged[self._full_place, row] = lock.pages - lock.hit_pages
        self.charged[self._window_places, row] = lock.pages - self.begins[:, row]
        return before - self.charged[:, row]

    def verify(self, rows: IntArray) -> None:
        """Raise `InvariantError` unless each lock is that of one of `rows`, those in use, and each row that shares has one."""
        strays, sharing = (
            sorted(self.locks.keys() - set(rows.tolist())),
            np.flatnonzero(self.is_shared).tolist(),
        )
        if strays or self.locks.keys() != set(sharing):
            raise InvariantError(
                "tree.locks",
                f"rows {sorted(self.locks)} have locks, of which {strays} are not in use; rows {sharing} share",
                "a row was closed without its lock",
            )
