"""Page lists as callers hand them in: within the band, and no page twice. Anything else is refused before a change (row L8).

A negative id would answer for a page at the band's other end, and a page that is named twice would be counted twice.
"""

from __future__ import annotations

import numpy as np

from kvtide.device import IntArray
from kvtide.ledger.errors import InvariantError


class PageLists:
    """What a band accepts as a list of its pages. It never waits, on host or stream."""

    def __init__(self, band_name: str, page_count: int) -> None:
        """Pages `[0, page_count)` of the band."""
        self._band_name = band_name
        self._page_count = page_count
        self._places: IntArray = np.zeros(
            page_count, np.int64
        )  # scratch; what is read was written just before

    def check(self, pages: IntArray, who: str) -> None:
        """Raise `InvariantError` for a page outside the band."""
        # As unsigned numbers, negative ids lie beyond every band: one pass instead of two.
        if len(pages) and pages.view(np.uint64).max() >= self._page_count:
            raise InvariantError(
                "usage.page_in_band",
                f"{who!r} names pages from {pages.min()} to {pages.max()}, band {self._band_name!r} holds [0, {self._page_count})",
                "ids of another band, virtual ids, or a masked entry",
            )

    def check_once(self, pages: IntArray, who: str) -> None:
        """Raise `InvariantError` for a page outside the band, or named twice."""
        self.check(pages, who)
        places = np.arange(len(pages))
        self._places[pages] = places
        if not np.array_equal(self._places[pages], places):
            raise named_twice(self._band_name, pages, who)


def named_twice(band_name: str, pages: IntArray, who: str) -> InvariantError:
    """The error for a list that names a page twice."""
    entries, times = np.unique(pages, return_counts=True)
    return InvariantError(
        "usage.page_named_once",
        f"{who!r} names pages {some(entries[times > 1])} of band {band_name!r} twice",
        "page lists were joined that overlap",
    )


def some(pages: IntArray) -> str:
    """The first few pages, for an error's text."""
    shown = ", ".join(str(page) for page in pages[:8].tolist())
    return f"[{shown}]" if len(pages) <= 8 else f"[{shown}, … {len(pages)} in all]"
