"""A snapshot and a demand as plain integers: for each band the few bytes and pages that a layout turns on (row C4).

A band that *stays* keeps its span and grows at one side, so only its ends' bytes matter, and what bytes it would reach. One that
is *rearranged*, an end that is flushed or a float that is relocated, needs a block of `packed` units that holds its fixed pages;
so does an empty float that is first placed, for which nothing moves. Sides that are out of reach, for lack of pages or for blocked
bytes, are set to values that no edge passes: `NEVER` above, `NOWHERE` below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kvtide.chain.blocked_bytes import BlockedBytes, blocked_bytes, merged
from kvtide.chain.errors import ChainError
from kvtide.chain.snapshot import BandSnapshot, ChainSnapshot
from kvtide.plan import ArenaLayout

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


def terms_of(snapshot: ChainSnapshot, demand: Sequence[int], *, around_network: bool) -> Terms:
    """What pricing needs to know; with `around_network` what a transfer touches is fixed, or blocked, as if for good.

    Raises `ChainError` for a demand that is not one count of units a band.
    """
    layout, bands, network_bytes, quarantined_bytes = snapshot
    last = len(bands) - 1
    if len(demand) != last + 1 or min(demand) < 0:
        raise ChainError(
            f"cannot price {list(demand)}: it takes {last + 1} counts of 0 or more, one a band in chain order"
        )
    blocked = blocked_bytes(quarantined_bytes + network_bytes if around_network else quarantined_bytes)
    floats: list[FloatTerms] = []
    placed = 0
    for place in range(1, last):
        first_page, end_page, occupied, free, fixed, network, _ = bands[place]
        asked = demand[place]
        if first_page == end_page and not asked:
            continue
        fixed_first = fixed_end = fixed_count = 0
        if fixed or network:
            occupied, free, fixed_first, fixed_end, fixed_count = _fixed_terms(bands[place], around_network)
        grid = layout.bands[place]
        unit, origin, lowest, highest = grid.unit_bytes, grid.origin_bytes, grid.first_page, grid.page_count
        below, start, end, above = NOWHERE, NOWHERE, NEVER, NEVER
        if first_page == end_page:
            placed |= 1 << place
        else:
            below = start = origin + first_page * unit
            above = end = origin + end_page * unit
            if asked > free:
                grown = asked - free
                below -= grown * unit
                above += grown * unit
                if first_page - lowest < grown or (blocked and blocked.overlap(below, start)):
                    below = NOWHERE
                if highest - end_page < grown or (blocked and blocked.overlap(end, above)):
                    above = NEVER
        packed = occupied + asked
        if fixed_count:
            packed = max(packed, fixed_end - fixed_first)
            lowest = max(lowest, fixed_end - packed)
            highest = min(highest, fixed_first + packed)
        cost = ((occupied - fixed_count) * unit << COUNT_BITS) + 1
        floats.append((place, unit, origin, below, start, end, above, packed, lowest, highest - packed, cost))
    if last:
        up = _grow_up_terms(layout, bands[0], demand[0], blocked, around_network=around_network)
    else:
        up = EndTerms(layout.prefix_bytes, 0, layout.prefix_bytes, 0, 0)
    down = _grow_down_terms(layout, bands[last], demand[last], blocked, around_network=around_network)
    return Terms(up, floats, down, last, placed, blocked)


def _fixed_terms(band: BandSnapshot, around_network: bool) -> tuple[int, int, int, int, int]:
    """Occupied and free units, where the fixed pages begin and end, and how many they are, 0 for none.

    With `around_network` network pages are fixed ones, and those of them that are free serve no take.
    """
    _, _, occupied, free, extents, network, network_free = band
    if around_network and network:
        extents += network
        occupied += network_free
        free -= network_free
    if not extents:
        return occupied, free, 0, 0, 0
    firsts, ends = merged([(extent.first_page, extent.end_page) for extent in extents])
    return occupied, free, firsts[0], ends[-1], sum(ends) - sum(firsts)


def _grow_up_terms(
    layout: ArenaLayout, band: BandSnapshot, asked: int, blocked: BlockedBytes | None, *, around_network: bool
) -> EndTerms:
    grid = layout.bands[0]
    _, end_page, occupied, free, fixed, network, _ = band
    fixed_end = fixed_count = 0
    if fixed or network:
        occupied, free, _, fixed_end, fixed_count = _fixed_terms(band, around_network)
    unit, origin, anchor, reach_page = grid.unit_bytes, grid.origin_bytes, grid.first_page, grid.page_count
    kept_page = end_page + asked - free if asked > free else end_page
    packed_page = anchor + occupied + asked
    if fixed_count:
        packed_page = max(packed_page, fixed_end)
    if blocked is not None:
        reach_byte = blocked.first_from(origin + end_page * unit, NEVER)
        reach_page = min(reach_page, (reach_byte - origin) // unit)
    kept_byte = origin + kept_page * unit if kept_page <= reach_page else NEVER
    packed_byte = origin + packed_page * unit if packed_page <= reach_page else NEVER
    # An empty end holds no byte, and so it may stand at an anchor that no page of it could have.
    if kept_page == anchor:
        kept_byte = layout.prefix_bytes
    if packed_page == anchor:
        packed_byte = layout.prefix_bytes
    cost = (min(occupied - fixed_count, free) * unit << COUNT_BITS) + 1
    return EndTerms(kept_byte, kept_page, packed_byte, packed_page, cost)


def _grow_down_terms(
    layout: ArenaLayout, band: BandSnapshot, asked: int, blocked: BlockedBytes | None, *, around_network: bool
) -> EndTerms:
    grid = layout.bands[-1]
    first_page, _, occupied, free, fixed, network, _ = band
    fixed_first = fixed_count = 0
    if fixed or network:
        occupied, free, fixed_first, _, fixed_count = _fixed_terms(band, around_network)
    unit, origin, anchor, reach_page = grid.unit_bytes, grid.origin_bytes, grid.page_count, grid.first_page
    kept_page = first_page - asked + free if asked > free else first_page
    packed_page = anchor - occupied - asked
    if fixed_count:
        packed_page = min(packed_page, fixed_first)
    if blocked is not None:
        reach_byte = blocked.end_before(origin + first_page * unit, NOWHERE)
        reach_page = max(reach_page, -((origin - reach_byte) // unit))
    kept_byte = origin + kept_page * unit if kept_page >= reach_page else NOWHERE
    packed_byte = origin + packed_page * unit if packed_page >= reach_page else NOWHERE
    if kept_page == anchor:
        kept_byte = layout.arena_bytes
    if packed_page == anchor:
        packed_byte = layout.arena_bytes
    cost = (min(occupied - fixed_count, free) * unit << COUNT_BITS) + 1
    return EndTerms(kept_byte, kept_page, packed_byte, packed_page, cost)
