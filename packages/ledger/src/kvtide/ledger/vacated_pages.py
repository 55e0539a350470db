"""Pages that a move has copied away, and the forwards that may still read what it left there (row C7).

Two facts of one page, which end apart:

- it is *vacated*: it lies in the span, free and named by no virtual page. That ends when it comes back as a hole, or when the
  span retreats past it;
- a forward may *read* it: that ends when the forward retires, or is passed on to the fence of the bytes that leave the band.

Vacated pages stand in batches of one move each. Those behind a forward come back when it retires, those behind sends alone when
one is released. A page that has left is passed over when its batch is read, so that leaving costs O(1) whatever else is vacated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray

_NO_FORWARD = -1
_NO_BATCH = 0
_FEW = 64  # entries of pages that have left, beyond as many as are vacated, before the batches are tidied


class _Batch(NamedTuple):
    serial: int
    forward: int
    pages: IntArray


class VacatedPages:
    """Vacated pages of one band. It never waits, on host or stream, and neither does its user: pages come back in time."""

    def __init__(self, page_count: int) -> None:
        """None of `[0, page_count)`; zeroed memory, so untouched pages cost nothing."""
        self.newest_reader = _NO_FORWARD
        """The newest forward that was ever said to read a page; once it has retired, none reads any."""
        self._readers: IntArray = np.zeros(page_count, np.int64)  # by page: the newest reader + 1, 0 for none
        self._batch_of: IntArray = np.zeros(
            page_count, np.int64
        )  # by page: its batch, 0 while it is not vacated
        self._behind_forwards: deque[_Batch] = deque()
        self._behind_sends: deque[_Batch] = deque()
        self._batch_count = 0
        self._page_count = 0
        self._listed_count = 0

    def __len__(self) -> int:
        """Vacated pages."""
        return self._page_count

    def add(self, pages: IntArray, forward: int) -> None:
        """Keep `pages`, none of them vacated, until `forward` retires, or, for −1, until a send is released."""
        if not len(pages):
            return
        self._batch_count += 1
        batch = _Batch(self._batch_count, forward, pages)
        self._batch_of[pages] = batch.serial
        self._page_count += len(pages)
        self._listed_count += len(pages)
        if forward == _NO_FORWARD:
            self._behind_sends.append(batch)
        else:
            self._behind_forwards.append(batch)
            self._readers[pages] = forward + 1
            self.newest_reader = max(self.newest_reader, forward)

    def take_retired(self, retired_through: int, *, behind_sends: bool) -> IntArray:
        """Remove the pages that no unretired forward reads, with `behind_sends` also those kept for sends alone."""
        batches = []
        while self._behind_forwards and self._behind_forwards[0].forward <= retired_through:
            batches.append(self._behind_forwards.popleft())
        if behind_sends:
            batches += self._behind_sends
            self._behind_sends = deque()
        self._listed_count -= sum(len(batch.pages) for batch in batches)
        pages = self._still_in(batches)
        self._leave(pages)
        return pages

    def remove(self, pages: IntArray) -> None:
        """Remove some vacated pages, each named once, wherever they stand; whoever reads them goes on."""
        self._leave(pages)
        if self._listed_count > 2 * self._page_count + _FEW:
            self._behind_forwards = self._tidied(self._behind_forwards)
            self._behind_sends = self._tidied(self._behind_sends)
            self._listed_count = self._page_count

    def contains(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `pages` are vacated; shape and order of `pages`."""
        vacated: npt.NDArray[np.bool_] = self._batch_of[pages] != _NO_BATCH
        return vacated

    def unretired(self, pages: IntArray, retired_through: int) -> tuple[IntArray, int]:
        """Places in `pages` that an unretired forward may read, and the newest such forward, −1 for none."""
        readers = self._readers[pages]
        places = np.flatnonzero(readers > retired_through + 1)
        return places, int(readers[places].max()) - 1 if len(places) else _NO_FORWARD

    def readers(self, retired_through: int) -> list[tuple[int, int]]:
        """Each page that an unretired forward may read, ascending, and the newest such forward; looks at every page of the band."""
        if self.newest_reader <= retired_through:
            return []
        pages = np.flatnonzero(self._readers > retired_through + 1)
        return list(zip(pages.tolist(), (self._readers[pages] - 1).tolist(), strict=True))

    def pass_on_readers(self, pages: IntArray, retired_through: int) -> Iterator[tuple[int, IntArray]]:
        """Forget who reads `pages`, and say it: groups of them, each with the newest unretired forward that may."""
        read = pages[self._readers[pages] > retired_through + 1]
        readers = self._readers[read]
        self._readers[pages] = 0
        for reader in np.unique(readers).tolist():
            yield reader - 1, read[readers == reader]

    def pages(self) -> IntArray:
        """Every vacated page: those behind forwards in order, then those behind sends."""
        return self._still_in([*self._behind_forwards, *self._behind_sends])

    def _leave(self, pages: IntArray) -> None:
        self._batch_of[pages] = _NO_BATCH
        self._page_count -= len(pages)

    def _still_in(self, batches: list[_Batch]) -> IntArray:
        """Pages of the batches that have not left them."""
        if not batches:
            return np.empty(0, np.int64)
        pages = np.concatenate([batch.pages for batch in batches])
        serials = np.repeat([batch.serial for batch in batches], [len(batch.pages) for batch in batches])
        still: IntArray = pages[self._batch_of[pages] == serials]
        return still

    def _tidied(self, batches: Iterable[_Batch]) -> deque[_Batch]:
        kept = (
            batch._replace(pages=batch.pages[self._batch_of[batch.pages] == batch.serial])
            for batch in batches
        )
        return deque(batch for batch in kept if len(batch.pages))
