"""Claims on pages by owners, nested: a page stays claimed until its last owner lets go (row L4, fixed pages)."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray


class Claims:
    """How many owners claim each page of one band. It never waits, on host or stream; nobody waits for a claim either."""

    def __init__(self, page_count: int) -> None:
        """No claim on `[0, page_count)`."""
        self._counts: npt.NDArray[np.int32] = np.zeros(page_count, np.int32)
        self._owners: dict[Hashable, list[IntArray]] = {}

    def __bool__(self) -> bool:
        """Whether any page is claimed."""
        return bool(self._owners)

    def __contains__(self, owner: Hashable) -> bool:
        """Whether the owner claims anything."""
        return owner in self._owners

    def owners(self) -> list[Hashable]:
        """Who claims something, the longest first."""
        return list(self._owners)

    def add(self, owner: Hashable, pages: IntArray) -> None:
        """Claim `pages` once more; an owner may claim in several calls, and a page in each of them."""
        np.add.at(self._counts, pages, 1)
        self._owners.setdefault(owner, []).append(pages)

    def remove(self, owner: Hashable) -> IntArray:
        """Let go of all that the owner claims; its pages, as it claimed them."""
        claimed = self._owners.pop(owner)
        pages = np.concatenate(claimed)
        np.subtract.at(self._counts, pages, 1)
        return pages

    def claimed(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `pages` somebody claims; shape and order of `pages`."""
        return self._counts[pages] > 0

    def pages(self) -> IntArray:
        """Every claimed page, ascending."""
        arrays = [array for claimed in self._owners.values() for array in claimed]
        return np.unique(np.concatenate(arrays)) if arrays else np.empty(0, np.int64)
