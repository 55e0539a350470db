"""Making room: where every band stands so that a take is served in place, and the moves that bring it there (rows C2, C6)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.chain.band import Band
from kvtide.chain.chain_bands import ChainBands
from kvtide.chain.placement import BandCounts, plan_packed, relocation_order
from kvtide.device import Device
from kvtide.ledger import ForwardSteps
from kvtide.plan import Growth, PageSpan

Spans = Sequence[tuple[int, int]]
"""First and end page of each band, in chain order."""


def spans_in_place(bands: ChainBands, asked: Sequence[int]) -> Spans | None:
    """Spans in which every band has what it is asked for without a unit moving, or `None`.

    A band reuses its free units and grows at one side for the rest, into the gap there: an end at its open side, a float toward
    its larger gap. An empty float is put in the middle of its region, and until then its neighbours see through it.
    """
    spans: list[tuple[int, int]] = []
    left_edge = bands.layout.prefix_bytes
    for place, band in enumerate(bands):
        first_page, end_page = band.first_page, band.end_page
        grown = asked[place] - band.free_count
        if grown > 0:
            lowest = band.layout.lowest_page_from(left_edge)
            highest_end = band.layout.highest_end_to(bands.next_start_byte(place))
            if first_page == end_page and band.layout.growth is Growth.FLOAT:
                first_page = end_page = lowest + (highest_end - lowest - grown) // 2
            if band.layout.growth is Growth.DOWN or (
                band.layout.growth is Growth.FLOAT and first_page - lowest > highest_end - end_page
            ):
                first_page -= grown
            else:
                end_page += grown
            if first_page < lowest or end_page > highest_end:
                return None
        if first_page < end_page:
            left_edge = band.layout.start_byte(end_page)
        spans.append((first_page, end_page))
    return spans


def packed_spans(bands: ChainBands, asked: Sequence[int]) -> Sequence[PageSpan] | None:
    """Spans of exactly what each band holds and is asked for, any unit being free to move, or `None`."""
    return plan_packed(bands.layout, [_counts(band) for band in bands], asked)


def rearrange(bands: ChainBands, targets: Sequence[PageSpan], device: Device, steps: ForwardSteps) -> None:
    """Move units until every band can grow into its target; live units keep their contents.

    The schedule stream waits for the newest forward in flight, so no unit pends and no vacated one is read. Ends are compacted
    first, to their live units alone; then each float goes to its target, in an order in which none meets another.
    """
    newest = steps.newest_unretired
    if newest is not None:
        device.wait_event(device.schedule_stream, newest.event)
        steps.wait_queued(newest.event)
    for band in bands:
        band.settle_all()
        if band.layout.growth is Growth.UP:
            band.pack_into(band.layout.first_page, band.layout.first_page + band.live_count)
        elif band.layout.growth is Growth.DOWN:
            band.pack_into(band.layout.page_count - band.live_count, band.layout.page_count)
    floats = [
        place for place, band in enumerate(bands) if band.layout.growth is Growth.FLOAT and band.live_count
    ]
    in_order = list(bands)
    for place in relocation_order(bands.layout, [band.span for band in bands], targets, floats):
        in_order[place].pack_into(targets[place].first_page, targets[place].end_page)


def _counts(band: Band) -> BandCounts:
    return BandCounts(span=band.span, free_pages=band.free_count)
