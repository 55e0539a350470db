"""Pages that a move has copied away and that some forward or send may still read (row C7).

They lie in the span, free and not writable, in batches of one move each: those behind a forward come back when it retires,
those behind sends alone when one is released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray

_NO_FORWARD = -1
_MARK = 2  # a page's mark is its forward + 2, so that zeroed memory means "not vacated"


class VacatedPages:
    """Vacated pages of one band. It never waits, on host or stream, and neither does its user: pages come back in time."""

    def __init__(self, page_count: int) -> None:
        """None of `[0, page_count)`."""
        self._marks: IntArray = np.zeros(page_count, np.int64)
        self._behind_forwards: deque[tuple[int, IntArray]] = deque()
        self._behind_sends: list[IntArray] = []
        self._page_count = 0

    def __len__(self) -> int:
        """Vacated pages."""
        return self._page_count

    def add(self, pages: IntArray, forward: int) -> None:
        """Keep `pages` until `forward` retires, or, for −1, until a send is released."""
        if not len(pages):
            return
        self._marks[pages] = forward + _MARK
        self._page_count += len(pages)
        if forward == _NO_FORWARD:
            self._behind_sends.append(pages)
        else:
            self._behind_forwards.append((forward, pages))

    def take_retired(self, retired_through: int, *, behind_sends: bool) -> IntArray:
        """Remove the pages that no unretired forward reads, with `behind_sends` also those kept for sends alone."""
        batches = []
        while self._behind_forwards and self._behind_forwards[0][0] <= retired_through:
            batches.append(self._behind_forwards.popleft()[1])
        if behind_sends:
            batches += self._behind_sends
            self._behind_sends = []
        if not batches:
            return np.empty(0, np.int64)
        pages = np.concatenate(batches)
        self._marks[pages] = 0
        self._page_count -= len(pages)
        return pages

    def remove(self, pages: IntArray) -> None:
        """Remove some vacated pages, wherever they stand."""
        if not len(pages):
            return
        self._marks[pages] = 0
        self._page_count -= len(pages)
        self._behind_forwards = deque(
            (forward, kept) for forward, batch in self._behind_forwards if len(kept := self._kept(batch))
        )
        self._behind_sends = [kept for batch in self._behind_sends if len(kept := self._kept(batch))]

    def contains(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `pages` are vacated; shape and order of `pages`."""
        vacated: npt.NDArray[np.bool_] = self._marks[pages] != 0
        return vacated

    def named_once(self, pages: IntArray) -> bool:
        """Whether no page is named twice, of `pages` none of which is vacated."""
        tags = -np.arange(1, len(pages) + 1)
        self._marks[pages] = tags
        once = np.array_equal(self._marks[pages], tags)
        self._marks[pages] = 0
        return once

    def unretired(self, pages: IntArray, retired_through: int) -> tuple[IntArray, int]:
        """Places in `pages` that an unretired forward may read, and the newest such forward, −1 for none."""
        marks = self._marks[pages]
        places = np.flatnonzero(marks > max(retired_through, _NO_FORWARD) + _MARK)
        return places, int(marks[places].max()) - _MARK if len(places) else _NO_FORWARD

    def by_forward(self, pages: IntArray) -> Iterator[tuple[int, IntArray]]:
        """Vacated `pages` in groups, each with the newest forward that may read it, −1 for none."""
        marks = self._marks[pages]
        for mark in np.unique(marks).tolist():
            yield mark - _MARK, pages[marks == mark]

    def pages(self) -> IntArray:
        """Every vacated page: those behind forwards in order, then those behind sends."""
        batches = [pages for _, pages in self._behind_forwards] + self._behind_sends
        return np.concatenate(batches) if batches else np.empty(0, np.int64)

    def _kept(self, batch: IntArray) -> IntArray:
        return batch[self.contains(batch)]
