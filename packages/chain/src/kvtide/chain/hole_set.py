"""Free pages inside one band's span: a bit a page and a count a block of 64.

Takes come out nearest the band's anchor first, which keeps live pages together and moves rare. Cost follows the pages touched and,
at a vectorised sixty-fourth, the band's pages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray

_BLOCK_PAGES = 64


class HoleSet:
    """A set of physical pages of one band."""

    def __init__(self, page_count: int) -> None:
        """Empty, for pages `[0, page_count)`."""
        block_count = -(-page_count // _BLOCK_PAGES)
        self._bits: npt.NDArray[np.bool_] = np.zeros(block_count * _BLOCK_PAGES, np.bool_)
        self._blocks = self._bits.reshape(block_count, _BLOCK_PAGES)
        self._block_counts: npt.NDArray[np.int32] = np.zeros(block_count, np.int32)
        self._page_count = 0

    def __len__(self) -> int:
        """Holes."""
        return self._page_count

    def add(self, pages: IntArray) -> None:
        """Add pages that are not in the set, each named once."""
        self._bits[pages] = True
        np.add.at(self._block_counts, pages // _BLOCK_PAGES, 1)
        self._page_count += len(pages)

    def remove(self, pages: IntArray) -> None:
        """Remove pages that are in the set, each named once."""
        self._bits[pages] = False
        np.subtract.at(self._block_counts, pages // _BLOCK_PAGES, 1)
        self._page_count -= len(pages)

    def clear(self) -> None:
        """Remove every hole."""
        blocks = np.flatnonzero(self._block_counts)
        self._blocks[blocks] = False
        self._block_counts[blocks] = 0
        self._page_count = 0

    def take(self, page_count: int, *, highest_first: bool) -> IntArray:
        """Remove and return the lowest (or highest) `page_count` holes, in the order of the choice."""
        blocks = np.flatnonzero(self._block_counts)
        if highest_first:
            blocks = blocks[::-1]
        needed = np.searchsorted(np.cumsum(self._block_counts[blocks]), page_count) + 1
        chosen = blocks[:needed]
        rows, columns = np.nonzero(self._blocks[chosen])
        pages = np.sort(chosen[rows] * _BLOCK_PAGES + columns)
        pages = pages[::-1][:page_count] if highest_first else pages[:page_count]
        self.remove(pages)
        return pages

    def run_above(self, page: int, end_page: int) -> int:
        """Consecutive holes upward from `page`, within `[page, end_page)`."""
        return self._run(self._bits[page:end_page])

    def run_below(self, page: int, first_page: int) -> int:
        """Consecutive holes downward from `page - 1`, within `[first_page, page)`."""
        return self._run(self._bits[first_page:page][::-1])

    @staticmethod
    def _run(bits: npt.NDArray[np.bool_]) -> int:
        """Leading true bits; looks at no more than four times as many, and 64."""
        looked_at = 0
        step = _BLOCK_PAGES
        while looked_at < len(bits):
            piece = bits[looked_at : looked_at + step]
            if not piece.all():
                return looked_at + int(np.argmin(piece))
            looked_at += len(piece)
            step *= 4
        return looked_at
