"""Whether any layout holds some units where others may not move: the dumbest answer, every span of every band tried.

A band's span holds so many pages as it keeps and is asked for, and every page of it that stays; spans keep the chain's order;
none holds a byte that nobody may write. Ends stand at their anchors, floats anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtide.plan import ArenaLayout, BandLayout, Growth


class Need(NamedTuple):
    """What one band must hold."""

    pages: int
    """How many, those that stay among them."""

    stays: tuple[int, ...] = ()
    """Pages that may not move."""


def some_layout_holds(layout: ArenaLayout, needs: Sequence[Need], blocked: Sequence[tuple[int, int]]) -> bool:
    """Whether bands can stand so; `blocked` are half-open byte ranges that no span may hold a byte of.

    From the left, each band ends as low as it can: whatever holds the bands behind it holds them then.
    """
    edge = layout.prefix_bytes
    for band, need in zip(layout.bands, needs, strict=True):
        if not need.pages:
            continue
        # Spans rise, so the first that can be is the one that ends lowest.
        end = next((end for first, end in _extents(band, need, edge) if _is_clear(first, end, blocked)), None)
        if end is None:
            return False
        edge = end
    return True


def _extents(band: BandLayout, need: Need, edge: int) -> Iterator[tuple[int, int]]:
    """First and end byte of every least span that begins at `edge` or later, ascending."""
    lowest = band.lowest_page_from(edge)
    firsts: Sequence[int] = range(lowest, band.page_count)
    if band.growth is Growth.UP:
        firsts = [band.first_page]
    elif band.growth is Growth.DOWN:
        firsts = [min(band.page_count - need.pages, *need.stays, band.page_count)]
    least_end = max(need.stays, default=-1) + 1
    for first in firsts:
        end = max(first + need.pages, least_end)
        if lowest <= first <= min(need.stays, default=first) and end <= band.page_count:
            yield band.start_byte(first), band.start_byte(end)


def _is_clear(first: int, end: int, blocked: Sequence[tuple[int, int]]) -> bool:
    return not any(low < end and first < high for low, high in blocked)
