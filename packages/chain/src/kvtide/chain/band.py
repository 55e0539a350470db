"""A band: one sub-pool's units inside the arena (row C2).

    grow-up end      [first_page ………… end_page) →            anchored at its lowest page
    grow-down end              ← [first_page ………… page_count)  anchored at its highest page
    float                ← [first_page ………… end_page) →        anchored nowhere, placed when first needed

Every page of the *span* is live, pending (free, but a forward may still touch it) or a hole. A free at the span's open
boundary gives the bytes back at once; anywhere else it leaves a hole, which the next take uses first.
"""

from __future__ import annotations

import numpy as np

from kvtide.chain.hole_set import HoleSet
from kvtide.chain.id_space import UnitIds
from kvtide.chain.placement import BandCounts
from kvtide.device import Device, IntArray, UnitGrid
from kvtide.ledger import ForwardSteps, PendingPages
from kvtide.plan import BandLayout, Growth, PageSpan


class Band:
    """Pages of one band: its span, its free pages, its map of ids. The chain allocator is the only one that mutates it."""

    def __init__(self, layout: BandLayout, ids: UnitIds, steps: ForwardSteps, device: Device) -> None:
        """An empty band."""
        self.layout = layout
        self.ids = ids
        self.pending = PendingPages()
        self.moved_pages = 0
        """Pages moved since the start."""
        self._steps = steps
        self._device = device
        self._holes = HoleSet(layout.page_count)
        self._grid = UnitGrid(layout.origin_bytes, layout.unit_bytes)
        self._span = _empty_span(layout)

    @property
    def counts(self) -> BandCounts:
        """What placement needs to know."""
        return BandCounts(span=self._span, free_pages=len(self._holes) + len(self.pending))

    @property
    def span(self) -> PageSpan:
        """Pages from the lowest to the highest that is live, pending or a hole."""
        return self._span

    @property
    def live_count(self) -> int:
        """Pages in use."""
        return self.counts.live_pages

    def live_pages(self) -> IntArray:
        """Physical pages in use, ascending."""
        return self.ids.bound_in(self._span.first_page, self._span.end_page)

    def zero_sink(self) -> None:
        """Zero page 0, which unbound pages and padded rows read."""
        self._device.zero_units(self._device.schedule_stream, self._grid, np.zeros(1, np.int64))

    def take(self, virtual: IntArray, span: PageSpan) -> IntArray:
        """Bind a page to each of `virtual`: holes first, then pending pages, then the growth from the present span to `span`.

        The pages come back zeroed. A planned take cannot fail.
        """
        short = len(virtual) - len(self._holes)
        if short > 0 and len(self.pending):
            self._holes.add(self._settled(short))
        pages = np.concatenate([self._take_holes(min(len(virtual), len(self._holes))), self._grow_to(span)])
        self.ids.bind(virtual, pages)
        self._device.zero_units(self._device.schedule_stream, self._grid, pages)
        self._give_back_boundary_holes()
        return pages

    def free(self, virtual: IntArray) -> None:
        """Unbind `virtual`, which the caller has checked, at once; the pages pend while a recorded forward may touch them."""
        pages = self.ids.unbind(virtual)
        newest = self._steps.newest_recorded
        if newest is not None:
            self.pending.add(pages, newest)
        else:
            self._add_holes(pages)

    def release_pending_through(self, forward: int) -> None:
        """Make holes of the pages that waited for `forward`, which has been processed, or for one before it."""
        self._add_holes(self.pending.release_through(forward))

    def settle_all(self) -> None:
        """Make holes of every pending page; the schedule stream waits their forwards, the host does not."""
        self._add_holes(self._settled(len(self.pending)))

    def compact(self) -> None:
        """Move live pages to the band's anchored end until no hole is left; no page may be pending."""
        live = self.live_pages()
        if self.layout.growth is Growth.UP:
            target = PageSpan(first_page=self.layout.first_page, end_page=self.layout.first_page + len(live))
        else:
            target = PageSpan(first_page=self.layout.page_count - len(live), end_page=self.layout.page_count)
        outside = (live < target.first_page) | (live >= target.end_page)
        inside = np.arange(target.first_page, target.end_page)
        self._move(live[outside], np.setdiff1d(inside, live, assume_unique=True))
        self._set_packed(target)

    def relocate(self, first_page: int) -> None:
        """Move every live page, in order, into a block from `first_page`; no page may be pending.

        Block and present pages may overlap. Pages that move up go highest first, those that move down lowest first; since
        both lists rise, the first never write what the second still read, so no page is overwritten before it is read.
        """
        live = self.live_pages()
        targets = np.arange(first_page, first_page + len(live))
        upward = np.flatnonzero(targets > live)[::-1]
        downward = np.flatnonzero(targets < live)
        order = np.concatenate([upward, downward])
        self._move(live[order], targets[order])
        self._set_packed(PageSpan(first_page=first_page, end_page=first_page + len(live)))

    def _move(self, sources: IntArray, targets: IntArray) -> None:
        if not len(sources):
            return
        self._device.copy_units(self._device.schedule_stream, self._grid, sources, targets)
        self.ids.move(sources, targets)
        self.moved_pages += len(sources)

    def _set_packed(self, span: PageSpan) -> None:
        self._holes.clear()
        self._span = span if span.page_count else _empty_span(self.layout)

    def _settled(self, page_count: int) -> IntArray:
        """Pages of the oldest pending batches that cover `page_count`; the schedule stream waits their forwards."""
        pages, event = self.pending.settle(page_count)
        if event is not None:
            self._device.wait_event(self._device.schedule_stream, event)
            self._steps.wait_queued(event)
        return pages

    def _take_holes(self, page_count: int) -> IntArray:
        if not page_count:
            return np.empty(0, np.int64)
        return self._holes.take(page_count, highest_first=self.layout.growth is Growth.DOWN)

    def _grow_to(self, span: PageSpan) -> IntArray:
        """Extend to `span` and return the new pages, nearest the anchor first."""
        old = (
            self._span
            if self._span.page_count
            else PageSpan(first_page=span.first_page, end_page=span.first_page)
        )
        below = np.arange(span.first_page, old.first_page)
        above = np.arange(old.end_page, span.end_page)
        self._span = span
        pages = np.concatenate([above, below[::-1]])
        return pages[::-1] if self.layout.growth is Growth.DOWN and not old.page_count else pages

    def _add_holes(self, pages: IntArray) -> None:
        if len(pages):
            self._holes.add(pages)
            self._give_back_boundary_holes()

    def _give_back_boundary_holes(self) -> None:
        """Shrink the span by the holes at its open sides: an end's frontier, both sides of a float."""
        first_page, end_page = self._span.first_page, self._span.end_page
        if self.layout.growth is not Growth.UP:
            first_page += self._holes.run_above(first_page, end_page)
        if self.layout.growth is not Growth.DOWN:
            end_page -= self._holes.run_below(end_page, first_page)
        given_back = np.concatenate(
            [np.arange(self._span.first_page, first_page), np.arange(end_page, self._span.end_page)]
        )
        if len(given_back):
            self._holes.remove(given_back)
            span = PageSpan(first_page=first_page, end_page=end_page)
            self._span = span if span.page_count else _empty_span(self.layout)


def _empty_span(layout: BandLayout) -> PageSpan:
    """Where a band without pages stands: at its anchor."""
    page = layout.page_count if layout.growth is Growth.DOWN else layout.first_page
    return PageSpan(first_page=page, end_page=page)
