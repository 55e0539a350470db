"""Free pages inside one band's span, handed out nearest the band's anchor first.

    distance from the anchor →
    |■■■□■■■□□■■■■■■■■■■■■□■■■│■■■■□■■■■■■■■■■□■■■■■■■■■■■■■■■|      □ hole
     └── reserve: sorted ──────┘└── a bit a page, a flag a block ──┘
                             reserve end

Every hole has its bit. Those nearer than the *reserve end* also stand, sorted, in the *reserve*, from which takes come. A take
that outruns it scans on from the reserve end by block flags; an add below it merges. So an operation costs the pages it names and the
blocks it scans past, never the band, and live pages stay near the anchor, which keeps later moves rare.

Inside, pages are numbered by distance from the anchor; a grow-down end is the mirror image of a grow-up one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.chain.units import NO_UNITS, Units, bounds, run_of
from kvtide.device import IntArray
from kvtide.ledger import clone_of

_BLOCK_PAGES = 64
_FIRST_BLOCKS = 64  # looked at first where the reserve runs out
_RESERVE_PAGES = 512  # more than a block's; beyond twice as many, the far half goes back to the blocks


class HoleSet:
    """A set of physical pages of one band. Methods take and return pages as one-dimensional int64 arrays."""

    def __init__(self, page_count: int, *, from_high_end: bool = False) -> None:
        """Empty, for pages `[0, page_count)` of a band anchored at its low end, or at its high one."""
        self._last = page_count - 1
        self._from_high_end = from_high_end
        block_count = -(-page_count // _BLOCK_PAGES)
        self._bits: npt.NDArray[np.bool_] = np.zeros(block_count * _BLOCK_PAGES, np.bool_)
        self._blocks: npt.NDArray[np.bool_] = np.zeros(block_count, np.bool_)
        """Whether a block may have holes beyond the reserve; a scan that finds none clears it."""
        self._reserve: IntArray = NO_UNITS
        self._reserve_end = block_count * _BLOCK_PAGES
        self._page_count = 0

    def __len__(self) -> int:
        """Holes."""
        return self._page_count

    def add(self, pages: Units) -> None:
        """Add pages that are not in the set."""
        if not len(pages.ids):
            return
        distances, where = self._mirrored(pages)
        self._bits[where] = True
        self._page_count += len(distances)
        near = distances
        if len(near) > _RESERVE_PAGES:
            # A request's pages come in the order in which they were taken, mostly nearest first.
            rises = (near[1:] > near[:-1]).all()
            some = near if rises else np.partition(near, _RESERVE_PAGES)
            self._end_reserve_at(_block_start(some[_RESERVE_PAGES]))
            if rises:
                few = int(np.searchsorted(near, self._reserve_end))
                self._flag(near[few:])
                near = near[:few]
        if len(near) and near.item(near.argmax()) >= self._reserve_end:
            is_near = near < self._reserve_end
            self._flag(near[~is_near])
            near = near[is_near]
        if len(near):
            reserve = np.concatenate([self._reserve, near])
            reserve.sort(kind="stable")  # merges what is sorted already
            self._reserve = reserve
            if len(reserve) > 2 * _RESERVE_PAGES:
                self._end_reserve_at(_block_start(reserve[_RESERVE_PAGES]))

    def take(self, page_count: int) -> IntArray:
        """Remove and return the `page_count` holes nearest the anchor, nearest first; there are as many."""
        if page_count > len(self._reserve):
            self._extend_reserve(page_count)
        distances = self._reserve[:page_count]
        self._reserve = self._reserve[page_count:]
        self._bits[distances] = False
        self._page_count -= page_count
        return self._last - distances if self._from_high_end else distances

    def nearest(self, page_count: int) -> IntArray:
        """The `page_count` holes nearest the anchor, or all of them if there are fewer, nearest first."""
        if page_count > len(self._reserve):
            self._extend_reserve(page_count)
        distances = self._reserve[:page_count]
        return self._last - distances if self._from_high_end else distances

    def remove(self, pages: Units) -> None:
        """Remove pages that are in the set."""
        if not len(pages.ids):
            return
        self._bits[self._mirrored(pages).where] = False
        self._reserve = self._reserve[self._bits[self._reserve]]
        self._page_count -= len(pages.ids)

    def within(self, first_page: int, end_page: int) -> IntArray:
        """The holes of `[first_page, end_page)`, ascending; looks at each page of the range."""
        if first_page >= end_page:
            return NO_UNITS
        holes = self._bits[self._stretch(first_page, end_page)].nonzero()[0]
        return (
            self._last - (holes[::-1] + (self._last - end_page + 1))
            if self._from_high_end
            else holes + first_page
        )

    def clear(self, first_page: int, end_page: int) -> None:
        """Remove the holes of `[first_page, end_page)`; looks at each page of the range."""
        if first_page >= end_page:
            return
        stretch = self._stretch(first_page, end_page)
        self._page_count -= int(np.count_nonzero(self._bits[stretch]))
        self._bits[stretch] = False
        self._reserve = self._reserve[self._bits[self._reserve]]

    def run_above(self, page: int, end_page: int) -> int:
        """Consecutive holes upward from `page`, within `[page, end_page)`."""
        return self._run(page, 1, end_page - page)

    def run_below(self, page: int, first_page: int) -> int:
        """Consecutive holes downward from `page - 1`, within `[first_page, page)`."""
        return self._run(page - 1, -1, page - first_page)

    def clone(self) -> HoleSet:
        """The same holes, which go their own way (row C13)."""
        return clone_of(self)

    # ── helpers, in distances ──

    def _mirrored(self, pages: Units) -> Units:
        """Distances of pages."""
        if not self._from_high_end:
            return pages
        if isinstance(pages.where, slice):
            low, high = bounds(pages.where)
            return run_of(self._last - high, self._last - low + 1)
        distances = self._last - pages.ids
        return Units(distances, distances)

    def _stretch(self, first_page: int, end_page: int) -> slice:
        """Where the bits of a range lie."""
        if self._from_high_end:
            return slice(self._last - end_page + 1, self._last - first_page + 1)
        return slice(first_page, end_page)

    def _extend_reserve(self, page_count: int) -> None:
        """Let the reserve reach on until it has `page_count` pages, or all."""
        parts = [self._reserve]
        held = len(self._reserve)
        block = self._reserve_end // _BLOCK_PAGES
        step = _FIRST_BLOCKS
        while held < page_count and block < len(self._blocks):
            flagged = self._blocks[block : block + step].nonzero()[0] + block
            if len(flagged):
                parts.append(self._holes_in(flagged))
                held += len(parts[-1])
                self._blocks[flagged] = False
            block += step
            step *= 4
        self._reserve = np.concatenate(parts)
        self._reserve_end = min(block, len(self._blocks)) * _BLOCK_PAGES
        if held > page_count + 2 * _RESERVE_PAGES:
            self._end_reserve_at(_block_start(self._reserve[page_count + _RESERVE_PAGES]))

    def _holes_in(self, blocks: IntArray) -> IntArray:
        """Distances of the holes in some blocks, ascending."""
        first, end = blocks.item(0), blocks.item(-1) + 1
        if 2 * len(blocks) >= end - first:
            # Blocks between them hold none beyond the reserve, so that all of the stretch may be looked at.
            return self._bits[first * _BLOCK_PAGES : end * _BLOCK_PAGES].nonzero()[0] + first * _BLOCK_PAGES
        places = self._bits.reshape(-1, _BLOCK_PAGES)[blocks].reshape(-1).nonzero()[0]
        return blocks[places // _BLOCK_PAGES] * _BLOCK_PAGES + places % _BLOCK_PAGES

    def _end_reserve_at(self, distance: int) -> None:
        """Let the reserve end at `distance`, a block's start, unless it ends before."""
        if distance >= self._reserve_end:
            return
        kept = int(np.searchsorted(self._reserve, distance))
        self._flag(self._reserve[kept:])
        self._reserve = self._reserve[:kept]
        self._reserve_end = distance

    def _flag(self, distances: IntArray) -> None:
        self._blocks[distances // _BLOCK_PAGES] = True

    def _run(self, page: int, step: int, limit: int) -> int:
        """Holes in a row from `page` in steps of ±1, at most `limit`; looks at no more than four times as many, and 64."""
        if limit <= 0:
            return 0
        distance = self._last - page if self._from_high_end else page
        step = -step if self._from_high_end else step
        if not self._bits[distance]:
            return 0
        found, piece_pages = 0, _BLOCK_PAGES
        while found < limit:
            count = min(piece_pages, limit - found)
            start = distance + step * found
            piece = (
                self._bits[start : start + count]
                if step > 0
                else self._bits[start - count + 1 : start + 1][::-1]
            )
            if not piece.all():
                return found + int(np.argmin(piece))
            found += count
            piece_pages *= 4
        return found


def _block_start(distance: np.int64) -> int:
    return int(distance) // _BLOCK_PAGES * _BLOCK_PAGES
