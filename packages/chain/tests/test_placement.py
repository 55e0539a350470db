"""Where bands may stand: pure answers on counts."""

from __future__ import annotations

from kvtide.chain.placement import BandCounts, plan_packed, relocation_order
from kvtide.plan import ArenaLayout, PageSpan

from .walk import layout_of


def counts(layout: ArenaLayout, **live: tuple[int, int]) -> list[BandCounts]:
    """Bands without free pages; those not named are empty at their anchors."""
    held = []
    for band in layout.bands:
        anchor = band.page_count if band.growth.name == "DOWN" else band.first_page
        first_page, end_page = live.get(band.name.replace("-", "_"), (anchor, anchor))
        held.append(BandCounts(span=PageSpan(first_page=first_page, end_page=end_page), free_pages=0))
    return held


def test_packed_floats_share_the_slack() -> None:
    """Free bytes lie between all neighbours, also when an end is empty and the arena's end is the edge."""
    layout = layout_of({"state": 112, "9": 80, "4": 96, "full": 48}, 8000)
    for full_pages in (0, 10):
        page_counts = [3, 4, 5, full_pages]
        held = counts(layout, state=(0, 3), window_9=(2, 6), window_4=(30, 35))
        spans = plan_packed(layout, held, [0, 0, 0, full_pages])
        assert spans is not None
        edges = [layout.prefix_bytes]
        gaps = []
        for band, span, pages in zip(layout.bands, spans, page_counts, strict=True):
            assert span.page_count == pages
            if pages:
                gaps.append(band.start_byte(span.first_page) - edges[-1])
                edges.append(band.start_byte(span.end_page))
        gaps = [*gaps[1:], *([] if full_pages else [layout.arena_bytes - edges[-1]])]
        assert max(gaps) - min(gaps) < 3 * 112, gaps


def test_a_float_waits_for_the_neighbour_whose_bytes_it_takes() -> None:
    """Copied in chain order, the first would overwrite the second."""
    layout = layout_of({"state": 16, "9": 16, "4": 16, "full": 16}, 1600)
    spans = [PageSpan(first_page=a, end_page=b) for a, b in [(0, 0), (10, 14), (14, 20), (99, 99)]]
    up = [PageSpan(first_page=a, end_page=b) for a, b in [(0, 0), (13, 17), (17, 23), (99, 99)]]
    down = [PageSpan(first_page=a, end_page=b) for a, b in [(0, 0), (7, 11), (11, 17), (99, 99)]]
    assert relocation_order(layout, spans, up, [1, 2]) == [2, 1]
    assert relocation_order(layout, spans, down, [1, 2]) == [1, 2]
