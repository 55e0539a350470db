"""Where bands may stand: pure functions on byte grids and counts (decisions D3, D4).

Two answers, the cheaper first:

- *in place*: every band stays; it reuses its free pages and grows at one side into the gap there. An empty float is put in the
  middle of its region; a float that must grow does so toward its larger gap.
- *packed*: any page may move. Ends are compacted at their anchors, floats relocated between them. If any layout holds the
  counts, `kvtide.plan.pack` finds one, so a refusal here is final. Free bytes are then spread evenly between the bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtide.plan import ArenaLayout, Growth, PageSpan, pack


class BandCounts(NamedTuple):
    """One band as placement sees it: never which pages, only how many."""

    span: PageSpan
    """Pages from its lowest to its highest live or free one."""

    free_pages: int
    """Holes and pending pages inside the span."""

    @property
    def live_pages(self) -> int:
        """Pages in use."""
        return self.span.page_count - self.free_pages


def plan_packed(
    layout: ArenaLayout, counts: Sequence[BandCounts], asked: Sequence[int]
) -> tuple[PageSpan, ...] | None:
    """Spans of exactly the live and asked pages of each band, with the free bytes spread between them, or `None`."""
    page_counts = [held.live_pages + pages for held, pages in zip(counts, asked, strict=True)]
    lowest = pack(layout, page_counts)
    if lowest is None:
        return None
    return _spread(layout, page_counts, lowest)


def relocation_order(
    layout: ArenaLayout, spans: Sequence[PageSpan], targets: Sequence[PageSpan], places: Sequence[int]
) -> list[int]:
    """`places` in an order in which no band is copied onto bytes that another still holds.

    A band must wait for another when its target overlaps the other's present bytes. Spans and targets keep the chain's
    order, so a band that waits for a higher one waits only for higher ones in turn, and likewise downward: the waits form no
    cycle, and some band can always go.
    """

    def clashes(place: int, other: int) -> bool:
        band, held = layout.bands[place], layout.bands[other]
        return band.start_byte(targets[place].first_page) < held.start_byte(
            spans[other].end_page
        ) and held.start_byte(spans[other].first_page) < band.start_byte(targets[place].end_page)

    waiting = list(places)
    order: list[int] = []
    while waiting:
        ready = next(
            place
            for place in waiting
            if not any(clashes(place, other) for other in waiting if other != place)
        )
        waiting.remove(ready)
        order.append(ready)
    return order


def _spread(
    layout: ArenaLayout, page_counts: Sequence[int], lowest: Sequence[PageSpan]
) -> tuple[PageSpan, ...]:
    """Move the floats of a packed layout up, each by its share of the slack, so that every gap is about as wide."""
    floats = [
        place for place, band in enumerate(layout.bands) if band.growth is Growth.FLOAT and page_counts[place]
    ]
    last = len(layout.bands) - 1
    edge_byte = layout.bands[last].start_byte(lowest[last].first_page)
    highest_first: dict[int, int] = {}
    for place in reversed(floats):
        band = layout.bands[place]
        highest_first[place] = band.highest_end_to(edge_byte) - page_counts[place]
        edge_byte = band.start_byte(highest_first[place])
    spans = list(lowest)
    edge_byte = layout.bands[0].start_byte(lowest[0].end_page) if page_counts[0] else layout.prefix_bytes
    for ordinal, place in enumerate(floats, start=1):
        band = layout.bands[place]
        slack = highest_first[place] - lowest[place].first_page
        first_page = max(
            band.lowest_page_from(edge_byte), lowest[place].first_page + slack * ordinal // (len(floats) + 1)
        )
        spans[place] = PageSpan(first_page=first_page, end_page=first_page + page_counts[place])
        edge_byte = band.start_byte(spans[place].end_page)
    return tuple(spans)
