"""Making room: where every band stands so that a take is served in place, and the moves that bring it there (rows C2, C6)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.chain.band import Band
from kvtide.chain.chain_bands import ChainBands
from kvtide.chain.placement import BandCounts, plan_in_place, plan_packed, relocation_order
from kvtide.device import Device
from kvtide.ledger import ForwardSteps
from kvtide.plan import Growth, PageSpan

Spans = Sequence[tuple[int, int]]
"""First and end page of each band, in chain order."""


def spans_in_place(bands: ChainBands, asked: Sequence[int]) -> Spans | None:
    """Spans in which every band has what it is asked for without a unit moving, or `None`."""
    if all(units <= band.free_count for band, units in zip(bands, asked, strict=True)):
        return [(band.first_page, band.end_page) for band in bands]
    spans = plan_in_place(bands.layout, [_counts(band) for band in bands], asked)
    return None if spans is None else [(span.first_page, span.end_page) for span in spans]


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
