"""Request rows: which virtual pages a request holds, and how far it has come (row K2).

A row holds virtual ids only, so pages move without a row being rewritten. The truth is here, on the host; the device has a
mirror that the translation of page tables reads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.chain import SINK, IdSpace
from kvtide.device import IntArray, Mirror
from kvtide.ledger import InvariantError
from kvtide.storage.errors import StorageError

NO_CHECKPOINT = int(np.iinfo(np.int64).max)
"""Of a row without checkpoints on a grid: no retention floor."""


class RequestTable:
    """Rows of virtual pages with their lengths; a row is free or belongs to one request."""

    def __init__(self, row_count: int, pages_per_row: int, mirror: Mirror) -> None:
        """All rows free; `mirror` holds `[row_count × pages_per_row]` virtual pages, row after row."""
        self.pages_per_row = pages_per_row
        self.pages: npt.NDArray[np.int32] = np.zeros((row_count, pages_per_row), np.int32)
        """Virtual page of each row's k-th page; 0 beyond `page_counts`."""
        self.page_counts: IntArray = np.zeros(row_count, np.int64)
        """Virtual pages held."""
        self.lengths: IntArray = np.zeros(row_count, np.int64)
        """Tokens written and advanced over."""
        self.prepared: IntArray = np.zeros(row_count, np.int64)
        """`lengths`, and the tokens of steps not yet advanced over: an upper bound of what has been written."""
        self.recorded: IntArray = np.zeros(row_count, np.int64)
        """Tokens that recorded forwards have written, or will: between `lengths` and `prepared`."""
        self.open_steps: IntArray = np.zeros(row_count, np.int64)
        """Steps prepared and neither advanced over nor abandoned."""
        self.prompts: IntArray = np.zeros(row_count, np.int64)
        """Tokens that may be written several at a time."""
        self.limits: IntArray = np.zeros(row_count, np.int64)
        """Tokens the request was admitted for."""
        self.chunk_limits: IntArray = np.zeros(row_count, np.int64)
        """Most prompt tokens that one forward may write."""
        self.checkpoint_lengths: IntArray = np.zeros(row_count, np.int64)
        """Length of the latest checkpoint, 0 before the first: a hit there sets the windows' retention floor; or `NO_CHECKPOINT`."""
        self.cached_tokens: IntArray = np.zeros(row_count, np.int64)
        """Tokens that the request was given with a hit or a backup: what its row began with."""
        self.state_slots: IntArray = np.full(row_count, -1, np.int64)
        """Virtual state slot; −1 without a state band."""
        self.state_in_doubt: npt.NDArray[np.bool_] = np.zeros(row_count, np.bool_)
        """Whether a launch of the row was aborted since its last recorded forward: its state goes to nobody else meanwhile."""
        self.state_is_lost: npt.NDArray[np.bool_] = np.zeros(row_count, np.bool_)
        """Whether work of such a launch may have changed the state, or row state, that the next forward would start from: there is none."""
        self.generations: IntArray = np.zeros(row_count, np.int64)
        """Requests the row has served; tells a step's request from a later one."""
        self._live: npt.NDArray[np.bool_] = np.zeros(row_count, np.bool_)
        self._free = IdSpace(0, row_count)
        self._mirror = mirror

    @property
    def free_count(self) -> int:
        """Rows that can be opened."""
        return self._free.free_count

    def open(
        self,
        prompts: IntArray,
        limits: IntArray,
        state_slots: IntArray,
        *,
        chunk_limit: int,
        cached_tokens: IntArray,
        has_checkpoints: bool,
    ) -> IntArray:
        """Rows for new requests that begin behind `cached_tokens`; the caller has checked that there are as many."""
        rows = self._free.mint(len(limits))
        self._live[rows] = True
        self.prompts[rows] = prompts
        self.limits[rows] = limits
        self.chunk_limits[rows] = chunk_limit
        for column in (self.cached_tokens, self.lengths, self.recorded, self.prepared):
            column[rows] = cached_tokens
        self.checkpoint_lengths[rows] = cached_tokens if has_checkpoints else NO_CHECKPOINT
        self.state_slots[rows] = state_slots
        return rows

    def close(self, rows: IntArray) -> None:
        """Return rows; the caller has released what they hold, so their pages read as the sink."""
        self._live[rows] = False
        self.generations[rows] += 1
        for column in self._columns():
            column[rows] = 0
        self.state_slots[rows] = -1
        self.state_in_doubt[rows] = self.state_is_lost[rows] = False
        self._free.give_back(rows)

    def append(self, rows: IntArray, counts: IntArray, virtual_pages: IntArray) -> None:
        """Append `counts[i]` of `virtual_pages`, in order, to row `rows[i]`."""
        of_row, columns = spread(rows, self.page_counts[rows], counts)
        self.pages[of_row, columns] = virtual_pages
        self.page_counts[rows] += counts
        self._mirror.stage(of_row * self.pages_per_row + columns, virtual_pages)

    def replace(self, row: int, first: int, virtual_pages: IntArray) -> None:
        """Let `virtual_pages` stand in a row from its page `first` on; those that do already cost nothing."""
        columns = first + np.flatnonzero(self.pages[row, first : first + len(virtual_pages)] != virtual_pages)
        if len(columns):
            values = virtual_pages[columns - first]
            self.pages[row, columns] = values
            self._mirror.stage(row * self.pages_per_row + columns, values)

    def held(self, rows: IntArray, first: IntArray, end: IntArray) -> IntArray:
        """Virtual pages `[first[i], end[i])` of each row, row after row."""
        held: IntArray = self.pages[spread(rows, first, end - first)].astype(np.int64)
        return held

    def forget(self, rows: IntArray, first: IntArray, end: IntArray) -> None:
        """Let pages `[first[i], end[i])` of each row read as the sink: their ids are about to return."""
        of_row, columns = spread(rows, first, end - first)
        self.pages[of_row, columns] = SINK
        self._mirror.stage(of_row * self.pages_per_row + columns, np.full(len(columns), SINK))

    def truncate(self, rows: IntArray, page_counts: IntArray) -> None:
        """Let each row end behind its first `page_counts[i]` pages; the caller has forgotten the others."""
        self.page_counts[rows] = page_counts

    def is_same_request(self, rows: IntArray, generations: IntArray) -> npt.NDArray[np.bool_]:
        """Which rows still serve the request that they served at `generations`."""
        return np.equal(self.generations[rows], generations)

    def state_is_of(self, row: int, length: int) -> bool:
        """Whether a row's state, once what is queued has run, is that behind `length` tokens and no more."""
        return bool(self.recorded[row] == length and not self.state_in_doubt[row])

    def check_live(self, rows: IntArray, action: str) -> None:
        """Raise `StorageError` for a row out of range, not in use, or named twice."""
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self._live)):
            outside = rows[(rows < 0) | (rows >= len(self._live))]
            raise StorageError(
                f"cannot {action} rows {outside.tolist()}: rows run from 0 to {len(self._live) - 1}"
            )
        live = self._live[rows]
        if not live.all():
            idle = rows[~live]
            raise StorageError(
                f"cannot {action} rows {idle.tolist()}: not in use (released already, or never admitted)"
            )
        # Rows mostly come in order; only others are sorted.
        if not (rows[1:] > rows[:-1]).all() and len(np.unique(rows)) != len(rows):
            raise StorageError(f"cannot {action} rows {rows.tolist()}: a row is named twice")

    def live_rows(self) -> IntArray:
        """Rows in use, ascending."""
        return np.flatnonzero(self._live)

    def verify_idle(self) -> None:
        """Raise `InvariantError` unless rows in use have no step open and free rows hold nothing (K11)."""
        free = ~self._live
        held = np.any([column[free] != 0 for column in self._columns()], axis=0)
        behind = self._live & (
            (self.open_steps != 0) | (self.recorded != self.lengths) | (self.prepared != self.lengths)
        )
        beyond = np.arange(self.pages_per_row) >= self.page_counts[:, None]
        stale = np.flatnonzero((beyond & (self.pages != SINK)).any(axis=1))
        if held.any() or (self.state_slots[free] >= 0).any() or behind.any() or len(stale):
            raise InvariantError(
                "storage.row_state",
                f"free rows {np.flatnonzero(free)[held].tolist()} hold something, rows in use {np.flatnonzero(behind).tolist()} "
                f"have steps open, rows {stale.tolist()} name pages behind their last ones",
                "a step was neither advanced over nor abandoned, or a row was closed in part",
            )

    def _columns(self) -> tuple[IntArray, ...]:
        """What is zero of a free row."""
        return (
            self.page_counts,
            self.lengths,
            self.recorded,
            self.prepared,
            self.open_steps,
            self.prompts,
            self.limits,
            self.chunk_limits,
            self.checkpoint_lengths,
            self.cached_tokens,
        )


def spread(rows: IntArray, first: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Row and place of each of `counts[i]` items that row `rows[i]` has from place `first[i]` on, row after row."""
    if (counts == 1).all():
        return rows, first
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return rows.repeat(counts), np.arange(total) + (first - ends + counts).repeat(counts)
