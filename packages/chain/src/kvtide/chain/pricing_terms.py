"""A snapshot and a demand as plain integers: for each band the few bytes and pages that a layout turns on (row C4).

A band that *stays* keeps its span and grows at one side, so only its ends' bytes matter, and what bytes it would reach. One that
is *rearranged*, an end that is flushed or a float that is relocated, needs a block of `packed` units that holds its fixed pages;
so does an empty float that is first placed, for which nothing moves. Sides that are out of reach, for lack of pages or for blocked
bytes, are set to values that no edge passes: `NEVER` above, `NOWHERE` below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kvtide.chain.blocked_bytes import BlockedBytes, blocked_bytes
from kvtide.chain.errors import ChainError
from kvtide.chain.snapshot import ChainSnapshot

NEVER = 1 << 62
"""Above every byte of every arena."""

NOWHERE = -1
"""Below every byte."""

COUNT_BITS = 10
"""A cost is bytes moved, and in its lowest bits how many bands are rearranged: of equal bytes, the fewest bands."""

FloatTerms: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int]
"""Of a float that holds pages or is asked for some; a tuple, since it is unpacked on every pass:

0. `place` in the chain
1. `unit` bytes
2. `origin` byte
3. `below`: its first byte if it stays and grows down
4. `start`: its first byte
5. `end`: its end byte
6. `above`: its end byte if it stays and grows up
7. `packed`: units it needs as a block
8. `lowest`: the block's least first page, for the page range and the fixed pages
9. `highest`: its greatest
10. `cost` of relocating it

One that stays without growing has `below == start` and `above == end`; one that is yet to be placed cannot stay.
"""


class EndTerms(NamedTuple):
    """Of an end: where its open side lies, in bytes and as a page, if it stays and if it is flushed."""

    kept_byte: int
    kept_page: int
    packed_byte: int
    packed_page: int
    cost: int


class Terms(NamedTuple):
    """Of a chain. `up` is a nobody at the prefix's end where a lone band grows down."""

    up: EndTerms
    floats: list[FloatTerms]
    down: EndTerms
    last: int
    """Place of the grow-down end."""
    placed: int
    """Bits, by place, of empty floats that are asked for units."""
    blocked: BlockedBytes | None
    """Bytes that no band may come to hold."""


def terms_of(snapshot: ChainSnapshot, demand: Sequence[int]) -> Terms:
    """What pricing needs to know. Raises `ChainError` for a demand that is not one count of units a band."""
    layout, bands, _, quarantined = snapshot
    last = len(bands) - 1
    if len(demand) != last + 1 or min(demand) < 0:
        raise ChainError(
            f"cannot price {list(demand)}: it takes {last + 1} counts of 0 or more, one a band in chain order"
        )
    blocked = blocked_bytes(quarantined)
    grids = layout.bands
    floats: list[FloatTerms] = []
    placed = 0
    for place in range(1, last):
        first_page, end_page, occupied, free, fixed, _, _ = bands[place]
        asked = demand[place]
        if first_page == end_page and not asked:
            continue
        grid = grids[place]
        unit, origin, lowest, highest_end = (
            grid.unit_bytes,
            grid.origin_bytes,
            grid.first_page,
            grid.page_count,
        )
        packed = occupied + asked
        movable = occupied
        highest = highest_end - packed
        if fixed:
            fixed_first, fixed_end = fixed[0].first_page, fixed[-1].end_page
            packed = max(packed, fixed_end - fixed_first)
            lowest = max(lowest, fixed_end - packed)
            highest = min(highest_end - packed, fixed_first)
            movable -= sum([extent.end_page - extent.first_page for extent in fixed])
        if first_page == end_page:
            placed |= 1 << place
            below, start, end, above, cost = NOWHERE, NOWHERE, NEVER, NEVER, 0
        else:
            below = start = origin + first_page * unit
            above = end = origin + end_page * unit
            cost = (movable * unit << COUNT_BITS) + 1
            if asked > free:
                grown = (asked - free) * unit
                below = start - grown
                above = end + grown
                if first_page - grid.first_page < asked - free or (blocked and blocked.overlap(below, start)):
                    below = NOWHERE
                if highest_end - end_page < asked - free or (blocked and blocked.overlap(end, above)):
                    above = NEVER
        floats.append((place, unit, origin, below, start, end, above, packed, lowest, highest, cost))
    prefix = layout.prefix_bytes
    up = _grow_up_terms(snapshot, demand[0], blocked) if last else EndTerms(prefix, 0, prefix, 0, 0)
    return Terms(up, floats, _grow_down_terms(snapshot, demand[last], blocked), last, placed, blocked)


def _grow_up_terms(snapshot: ChainSnapshot, asked: int, blocked: BlockedBytes | None) -> EndTerms:
    grid = snapshot.layout.bands[0]
    _, end_page, occupied, free, fixed, _, _ = snapshot.bands[0]
    unit, origin, anchor, reach_page = grid.unit_bytes, grid.origin_bytes, grid.first_page, grid.page_count
    kept_page = end_page + asked - free if asked > free else end_page
    packed_page = anchor + occupied + asked
    movable = occupied
    if fixed:
        packed_page = max(packed_page, fixed[-1].end_page)
        movable -= sum([extent.end_page - extent.first_page for extent in fixed])
    if blocked is not None:
        reach_byte = blocked.first_from(origin + end_page * unit, NEVER)
        reach_page = min(reach_page, max(end_page, (reach_byte - origin) // unit))
    kept_byte = origin + kept_page * unit if kept_page <= reach_page else NEVER
    packed_byte = origin + packed_page * unit if packed_page <= reach_page else NEVER
    # An empty end holds no byte, and so it may stand at an anchor that no page of it could have.
    if kept_page == anchor:
        kept_byte = snapshot.layout.prefix_bytes
    if packed_page == anchor:
        packed_byte = snapshot.layout.prefix_bytes
    cost = (min(movable, free) * unit << COUNT_BITS) + 1
    return EndTerms(kept_byte, kept_page, packed_byte, packed_page, cost)


def _grow_down_terms(snapshot: ChainSnapshot, asked: int, blocked: BlockedBytes | None) -> EndTerms:
    grid = snapshot.layout.bands[-1]
    first_page, _, occupied, free, fixed, _, _ = snapshot.bands[-1]
    unit, origin, anchor, reach_page = grid.unit_bytes, grid.origin_bytes, grid.page_count, grid.first_page
    kept_page = first_page - asked + free if asked > free else first_page
    packed_page = anchor - occupied - asked
    movable = occupied
    if fixed:
        packed_page = min(packed_page, fixed[0].first_page)
        movable -= sum([extent.end_page - extent.first_page for extent in fixed])
    if blocked is not None:
        reach_byte = blocked.end_before(origin + first_page * unit, NOWHERE)
        reach_page = max(reach_page, min(first_page, -((origin - reach_byte) // unit)))
    kept_byte = origin + kept_page * unit if kept_page >= reach_page else NOWHERE
    packed_byte = origin + packed_page * unit if packed_page >= reach_page else NOWHERE
    # An empty end holds no byte, and so it may stand at an anchor that no page of it could have.
    if kept_page == anchor:
        kept_byte = snapshot.layout.arena_bytes
    if packed_page == anchor:
        packed_byte = snapshot.layout.arena_bytes
    cost = (min(movable, free) * unit << COUNT_BITS) + 1
    return EndTerms(kept_byte, kept_page, packed_byte, packed_page, cost)
