"""What rows give the prefix tree, and let go of it again: their pages, place by place, and states that come with them (rows K7, K8).

hand over   tree.insert ── what it had already: freed, or rehomed into its holes ── the row's columns name what is the tree's
let go      windows move on ── tree.advance ── what the row is charged ── columns that nothing keeps the id of read as the sink
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_units import RowUnits
from kvtide.storage.shared_rows import SharedRows
from kvtide.storage.tree import NO_STATE, Checkpoint, Inserted, PrefixTree


class SharingObserver(Protocol):
    """Is told what becomes of virtual ids beside what rows show, in the order in which the storage does it."""

    def rehomed(self, band: str, sources: IntArray, targets: IntArray) -> None:
        """What a window binds to `sources` stands for `targets` from now on."""

    def states_copied(self, sources: IntArray, targets: IntArray) -> None:
        """State slots hold what others did when the forwards that are recorded have run."""


class HandedPages:
    """Pages between the rows of one storage and its tree. One owner: `PrefixSharing`."""

    def __init__(
        self,
        tree: PrefixTree,
        rows: SharedRows,
        chain: ChainAllocator,
        requests: RequestTable,
        *,
        units: RowUnits,
        window_places: Sequence[int],
    ) -> None:
        """Nothing has been handed over. `window_places`: the tree's windows in the chain."""
        self._tree = tree
        self._rows = rows
        self._chain = chain
        self._requests = requests
        self._units = units
        self._window_places = window_places
        self._page_tokens = tree.shape.page_tokens
        self.observer: SharingObserver | None = None
        """Is told of rehomed pages, and by `PrefixSharing` of copies."""

    def let_go(self, rows: IntArray) -> None:
        """Need no window unit of the tree that no token of the rows, nor a hit on their latest checkpoints, reads any more."""
        if not self._window_places:
            return
        kept = self._units.first_kept_pages(rows, self._window_places)
        kept = np.minimum(kept, self._rows.ends[rows])
        behind = (kept > self._rows.begins[:, rows]).any(axis=0)
        for row, firsts in zip(rows[behind].tolist(), kept.T[behind].tolist(), strict=True):
            self._tree.advance(self._rows.locks[row], firsts)
            self._units.let_go(row, self._rows.recount(row))
            self.forget_let_go(row)

    def ends(self, due: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, list[int]]]:
        """Of each row and length: the page where it ends, and the first that the row keeps of each window."""
        kept = self._units.first_kept_pages(np.array([row for row, _ in due], np.int64), self._window_places)
        for (row, length), firsts in zip(due, kept.T.tolist(), strict=True):
            yield row, length // self._page_tokens, firsts

    def checkpoint(self, row: int, end: int) -> Checkpoint | None:
        """The prefix that ends at page `end` of the row, and the state kept there; `None` where the row may not hand it over."""
        if not self._may_hand_over(row, end):
            return None
        first = int(self._rows.ends[row]) * self._page_tokens
        return self._tree.checkpoint(
            self._rows.locks[row], self._rows.tokens(row, first, end * self._page_tokens)
        )

    def hand_over(self, row: int, end: int, kept: Sequence[int], state: int = NO_STATE) -> bool:
        """Give the tree the row's pages up to `end`, and its state there; whether it took the state. `kept` of windows as `ends` says.

        Nothing where there is nothing new, or the scheduler has not said which tokens they hold.
        """
        first = int(self._rows.ends[row])
        if not self._may_hand_over(row, end) or (end == first and state == NO_STATE):
            return False
        page_tokens = self._page_tokens
        inserted = self._tree.insert(
            self._rows.locks[row],
            self._rows.tokens(row, first * page_tokens, end * page_tokens),
            self._requests.pages[row, first:end].astype(np.int64),
            held_from=[self._units.first_held(place, row) for place in self._window_places],
            needed_from=kept,
            state=state,
        )
        self._carry_out(row, first, inserted)
        self._rows.ends[row] = end
        self._units.start_behind(row, end)
        # What went over was the row's own, and stays in its counts.
        self._rows.recount(row)
        self.forget_let_go(row)
        return inserted.took_state

    def forget_let_go(self, row: int) -> None:
        """Have the row's columns read as the sink where no window of it needs the tree's page any more, if nothing else keeps its id.

        Without full attention the tree may let go of all that a page holds, and its id is another's then.
        """
        if self._tree.shape.full is not None:
            return
        end = min(self._rows.locks[row].begins, default=0)
        named = np.flatnonzero(self._requests.pages[row, :end])
        if len(named):
            self._requests.forget(np.array([row]), named[:1], np.array([end]))

    def free(self, units: Mapping[str, IntArray]) -> None:
        """What the tree has let go of returns to the chain."""
        for name, virtual in units.items():
            if name == self._tree.shape.state:
                self._chain.free_state_slots(virtual)
            else:
                self._chain.free_pages(name, virtual)

    def _may_hand_over(self, row: int, end: int) -> bool:
        """Whether a row may hand over up to page `end`: it has handed over nothing past it, and the scheduler has told the tokens."""
        return bool(self._rows.ends[row] <= end and end * self._page_tokens <= self._rows.known[row])

    def _carry_out(self, row: int, first: int, inserted: Inserted) -> None:
        for name, (sources, targets) in inserted.rehomed.items():
            self._chain.rehome_window(name, sources, targets)
            if self.observer is not None:
                self.observer.rehomed(name, sources, targets)
        self.free(inserted.freed)
        self._requests.replace(row, first, inserted.pages)
