"""Claims on pages by owners, nested: a page stays claimed until its last owner lets go (row L4, fixed pages)."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray
from kvtide.ledger.errors import InvariantError
from kvtide.ledger.page_lists import some


class Claims:
    """How many owners claim each page of one band. It never waits, on host or stream; nobody waits for a claim either."""

    def __init__(self, band_name: str, verb: str, page_count: int) -> None:
        """No claim on `[0, page_count)`; errors say that an owner `verb` no page of the band."""
        self._band_name, self._verb = band_name, verb
        self._counts: npt.NDArray[np.int32] = np.zeros(page_count, np.int32)
        self.owned: dict[Hashable, tuple[IntArray, ...]] = {}
        """What each owner claims; read by others."""

    def __bool__(self) -> bool:
        """Whether any page is claimed."""
        return bool(self.owned)

    def owners(self) -> list[Hashable]:
        """Who claims something, the longest first."""
        return list(self.owned)

    def add(self, owner: Hashable, pages: IntArray) -> None:
        """Claim `pages` once more; an owner may claim in several calls, and a page in each of them."""
        np.add.at(self._counts, pages, 1)
        self.owned[owner] = (*self.owned.get(owner, ()), pages)

    def remove(self, owner: Hashable) -> IntArray:
        """Let go of all that the owner claims; its pages, as it claimed them. Raises `InvariantError` if it claims nothing."""
        if owner not in self.owned:
            raise InvariantError(
                "usage.claim_released_once",
                f"{owner!r} {self._verb} no page of band {self._band_name!r}",
                "its claim was released before, or made in another band",
            )
        pages = np.concatenate(self.owned.pop(owner))
        np.subtract.at(self._counts, pages, 1)
        return pages

    def move(self, sources: IntArray, targets: IntArray | None) -> None:
        """Let every claim on a source be one on its target, all at once: a page may be both.

        Raises `InvariantError`, with nothing changed, if a claimed source has no target.
        """
        if not self.owned or not self.claimed(sources).any():
            return
        if targets is None or len(targets) != len(sources):
            raise InvariantError(
                "usage.hold_follows_move",
                f"pages {some(sources[self.claimed(sources)])} of band {self._band_name!r} move, held by {self.owners()}, "
                f"{len(sources)} sources to {'no' if targets is None else len(targets)} targets",
                "an urgent move did not say where a receive's pages went",
            )
        moved = self._counts[sources]
        self._counts[sources] = 0
        np.add.at(self._counts, targets, moved)
        order = np.argsort(sources)
        ascending, targets = sources[order], targets[order]
        for owner, claimed in self.owned.items():
            self.owned[owner] = tuple(_moved(pages, ascending, targets) for pages in claimed)

    def claimed(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `pages` somebody claims; shape and order of `pages`."""
        return self._counts[pages] > 0

    def pages(self) -> IntArray:
        """Every claimed page, ascending."""
        arrays = [array for claimed in self.owned.values() for array in claimed]
        return np.unique(np.concatenate(arrays)) if arrays else np.empty(0, np.int64)


def _moved(pages: IntArray, sources: IntArray, targets: IntArray) -> IntArray:
    """`pages`, each that is one of the ascending `sources` replaced by its target."""
    places = np.minimum(np.searchsorted(sources, pages), len(sources) - 1)
    return np.where(sources[places] == pages, targets[places], pages)
