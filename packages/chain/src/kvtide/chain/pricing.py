"""Which layout of the chain serves a demand, and at what price: pure functions on a snapshot (row C4, decision D4).

    NO_MOVE       |ends →  .    [float] →      .  ← [float]   .   ← ends|     free units first, then growth at one side
    FLUSH_ENDS    |ends| .  .   [float] →      .  ← [float]   .   . |ends|    ends compacted to their anchors, as far as needed
    RELAYOUT      |ends|    .    [float]    .    [float]    .      |ends|     floats relocated as blocks, as far as needed

A demand is units of each band, in chain order. A layout serves it when each band's span holds what the band keeps and what it
is asked for, spans keep their order and share no byte, none leaves its band's page range, none extends into blocked bytes, and
fixed pages stay inside. An empty float is transparent: placed where the demand wants it, else nowhere.

**Left to right is complete.** Write a band's possible spans as pairs of a first and an end byte; which pairs there are does not
depend on the other bands: page range, present span, fixed extents and blocked bytes settle it. The bands before matter through
one number, the *edge*: the byte at which they end, for a span is allowed if it begins at the edge or later. So among a band's
spans, let `next(edge)` be the least end byte of those that begin at `edge` or later, or none. A greater edge allows fewer spans,
hence `next` never falls as the edge rises. Given a layout, replace the spans from the left, one after another, by those that
`next` picks: each band then ends no later than it did, so the span that the following band had is still allowed. Hence if any
layout serves, the one in which every band ends as low as it can does, and one pass over the bands decides. The same holds from
the right for the *ceiling*, the greatest edge from which the bands from here on can still be served; so a pass from the right
says how far each band may reach, and whatever ends at its ceiling or lower leaves room for the rest.

So of each band only the least span needs a look. A float that stays has two, grown down or up. A block, of a float that is
relocated or first placed, goes to the lowest page at or behind the edge from which it holds the fixed extents, stays in range
and is clear of blocked bytes. Spans longer than needed never help: they contain one that begins no lower and ends no higher.

**Fewest bytes.** To stay costs nothing, to be rearranged a sum that does not depend on where the others stand. So of two ways to
place the bands so far, one that ends no later and costs no more is as good in every continuation, and only those that no other
beats, in edge and cost, go on to the next band. A float that stays ends at one of two bytes whatever the edge, so their number
grows by two a band at most. `feasible` is one pass and a plan in place two, O(bands + extents) once extents are in order; fewest
bytes is O(bands × ways kept), at most quadratic in the bands. Nothing here depends on how many pages the arena has.

Ties: of equal bytes the fewest bands rearranged; of those, band by band, the way that ends lower, then that of lower places. No
set, hash or clock is asked, so every rank answers alike (C10).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from kvtide.chain.blocked_bytes import BlockedBytes
from kvtide.chain.pricing_terms import (
    COUNT_BITS,
    NEVER,
    FloatTerms,
    Terms,
    terms_of,
)
from kvtide.chain.snapshot import BandSnapshot, ChainSnapshot, reclaimed_snapshot
from kvtide.plan import PageSpan

__all__ = [
    "BandSnapshot",
    "ChainSnapshot",
    "LayoutPlan",
    "Rearrangement",
    "feasible",
    "first_plan",
    "plan",
    "reclaimed_snapshot",
]


class Rearrangement(enum.Enum):
    """What may move so that a demand is served. Each step may do what those before it do, and does it where that is enough."""

    NO_MOVE = "no move"
    """Bands stay."""

    FLUSH_ENDS = "flush ends"
    """Ends may be compacted to their anchors."""

    RELAYOUT = "relayout"
    """Floats may be relocated, too."""


class LayoutPlan(NamedTuple):
    """A layout that serves a demand: flush the ends, relocate the floats in `move_order`, then take in chain order."""

    step: Rearrangement
    """The step it was planned under."""

    spans: tuple[PageSpan, ...]
    """Where each band stands once it has taken what it was asked for, in chain order."""

    flushed: tuple[int, ...]
    """Places of the ends that are compacted, ascending."""

    relocated: tuple[int, ...]
    """Places of the floats that leave their present span, ascending; one that keeps nothing leaves its bytes to its neighbours."""

    moved_bytes: int
    """Bytes that moves copy at most: what the relocated floats hold beside fixed pages, and of a flushed end no more units than
    it has free ones."""


def plan(
    snapshot: ChainSnapshot, demand: Sequence[int], step: Rearrangement, *, around_network: bool = False
) -> LayoutPlan | None:
    """The layout under `step` that moves the fewest bytes, or `None` where none serves the demand, units of each band.

    A float that grows does so toward its larger gap. Floats that are placed or relocated share the free bytes between those that
    stay evenly, as far as fixed pages and blocked bytes let them. With `around_network` what transfers touch stays in place.
    Raises `ChainError` for a demand that is not one count a band.
    """
    terms = terms_of(snapshot, demand, around_network=around_network)
    return _planned(snapshot, terms, step)


def feasible(snapshot: ChainSnapshot, demand: Sequence[int], *, around_network: bool = False) -> bool:
    """Whether any reachable layout serves the demand: only fixed pages and quarantined bytes are immovable.

    With `around_network` what transfers touch is, too. Raises `ChainError` for a demand that is not one count a band.
    """
    return _fits(terms_of(snapshot, demand, around_network=around_network))


def first_plan(snapshot: ChainSnapshot, demand: Sequence[int], *, around_network: bool) -> LayoutPlan | None:
    """The plan of the least step that serves the demand, or `None` where none does; arguments and errors as `plan`."""
    terms = terms_of(snapshot, demand, around_network=around_network)
    found = _planned(snapshot, terms, Rearrangement.NO_MOVE)
    if found is None and _fits(terms):
        # If flushing both ends is not enough, no choice of ends is.
        flushes_do = _reach(terms, 1 | 1 << terms.last) is not None
        found = _planned(snapshot, terms, Rearrangement.FLUSH_ENDS if flushes_do else Rearrangement.RELAYOUT)
    return found


def _planned(snapshot: ChainSnapshot, terms: Terms, step: Rearrangement) -> LayoutPlan | None:
    rearranged = 0
    if step is not Rearrangement.NO_MOVE:
        fewest = _fewest_bytes(terms, may_relocate=step is Rearrangement.RELAYOUT)
        if fewest is None:
            return None
        rearranged = fewest
    reach = _reach(terms, rearranged)
    if reach is None:
        return None
    spans = _spans(snapshot, terms, rearranged, reach)
    if not rearranged:
        return LayoutPlan(step, spans, (), (), 0)
    last = terms.last
    flushed = tuple([place for place in (0, last) if rearranged >> place & 1])
    relocated = tuple([place for place in range(1, last) if rearranged >> place & 1])
    cost = sum([row[10] for row in terms.floats if rearranged >> row[0] & 1])
    cost += terms.up.cost * (rearranged & 1) + terms.down.cost * (rearranged >> last & 1)
    return LayoutPlan(step, spans, flushed, relocated, cost >> COUNT_BITS)


def _fits(terms: Terms) -> bool:
    """Whether some layout serves if every end is flushed and every float relocated: each then ends as low as it can."""
    up, floats, down, _, _, blocked = terms
    edge = up.packed_byte
    for _, unit, origin, _, _, _, _, packed, lowest, highest, _ in floats:
        if not packed:
            continue
        page = -((origin - edge) // unit)
        page = max(page, lowest)
        if blocked is not None:
            page = blocked.clear_above(page, packed, unit, origin)
        if page > highest:
            return False
        edge = origin + (page + packed) * unit
    return edge <= down.packed_byte


def _fewest_bytes(terms: Terms, *, may_relocate: bool) -> int | None:
    """Which bands to rearrange, a bit a place, so that the layout fits and the fewest bytes move; `None` where none fits."""
    up, floats, down, last, placed, _ = terms
    # Ways to place the bands so far that no other beats, as (edge, cost, bands rearranged): edge rising, cost falling.
    ways = [(up.packed_byte, up.cost, 1)] if up.packed_byte < up.kept_byte else []
    if up.kept_byte < NEVER:
        ways.append((up.kept_byte, 0, 0))
    for row in floats:
        bit = 1 << row[0]
        found = _staying(ways, row)
        if placed & bit:
            found += _as_block(ways, row, terms, 0, 0)
        elif may_relocate:
            found += _as_block(ways, row, terms, row[10], bit)
        found.sort()
        least = NEVER
        ways = []
        for way in found:
            if way[1] < least:
                ways.append(way)
                least = way[1]
    best, least = None, NEVER
    for edge, cost, rearranged in ways:
        if edge <= down.kept_byte:
            best, least = rearranged, cost
        elif edge <= down.packed_byte and cost + down.cost < least:
            best, least = rearranged | 1 << last, cost + down.cost
    return best


def _staying(ways: list[tuple[int, int, int]], row: FloatTerms) -> list[tuple[int, int, int]]:
    """The ways that go on past a float that stays. It ends at one of two bytes, so of each the cheapest will do, the last."""
    _, _, _, below, start, end, above, _, _, _, _ = row
    found: list[tuple[int, int, int]] = []
    for edge, cost, rearranged in reversed(ways):
        if edge <= below:
            found.append((end, cost, rearranged))
            break
        if edge <= start and not found:
            found.append((above, cost, rearranged))
    return found


def _as_block(
    ways: list[tuple[int, int, int]], row: FloatTerms, terms: Terms, cost: int, bit: int
) -> list[tuple[int, int, int]]:
    """The ways that go on past a float placed as a block, as low as each way allows."""
    _, unit, origin, _, _, _, _, packed, lowest, highest, _ = row
    if not packed:
        return [(edge, spent + cost, rearranged | bit) for edge, spent, rearranged in ways]
    found = []
    for edge, spent, rearranged in ways:
        page = -((origin - edge) // unit)
        page = max(page, lowest)
        if terms.blocked is not None:
            page = terms.blocked.clear_above(page, packed, unit, origin)
        if page > highest:
            break
        found.append((origin + (page + packed) * unit, spent + cost, rearranged | bit))
    return found


def _reach(terms: Terms, rearranged: int) -> list[tuple[int, int]] | None:
    """How high each float may stand, from the last to the first, if the bands of `rearranged` are, or `None` if all do not fit.

    Of a block its highest first page, and how many blocks lie side by side from it upward; of a float that stays its ceiling.
    """
    up, floats, down, last, placed, blocked = terms
    blocks = rearranged | placed
    ceiling = down.packed_byte if rearranged >> last & 1 else down.kept_byte
    reach = []
    beside = 0
    for place, unit, origin, below, start, end, above, packed, lowest, highest, _ in reversed(floats):
        if blocks >> place & 1:
            page = (ceiling - origin) // unit - packed
            page = min(page, highest)
            if blocked is not None:
                page = blocked.clear_below(page, packed, unit, origin)
            if packed:
                if page < lowest:
                    return None
                ceiling = origin + page * unit
                beside += 1
            reach.append((page, beside))
        else:
            beside = 0
            reach.append((ceiling, 0))
            if above <= ceiling:
                ceiling = start
            elif end <= ceiling:
                ceiling = below
            else:
                return None
    edge = up.packed_byte if rearranged & 1 else up.kept_byte
    return reach if edge <= ceiling else None


def _spans(
    snapshot: ChainSnapshot, terms: Terms, rearranged: int, reach: list[tuple[int, int]]
) -> tuple[PageSpan, ...]:
    """Where each band goes, every float within its reach. Blocks side by side share the bytes between those that stay."""
    up, floats, down, last, placed, blocked = terms
    blocks = rearranged | placed
    pages = [(band.first_page, band.end_page) for band in snapshot.bands]
    if last:
        pages[0] = pages[0][0], up.packed_page if rearranged & 1 else up.kept_page
    pages[last] = down.packed_page if rearranged >> last & 1 else down.kept_page, pages[last][1]
    edge = low_edge = up.packed_byte if rearranged & 1 else up.kept_byte
    before = 0
    for row, (limit, beside) in zip(floats, reversed(reach), strict=True):
        place, unit, origin, below, _, end, above, packed, lowest, _, _ = row
        if not blocks >> place & 1:
            before = 0
            first_page, end_page = pages[place]
            if above == end:
                edge = end
            elif _grows_up(row, edge, limit, blocked):
                edge = above
                pages[place] = first_page, (above - origin) // unit
            else:
                edge = end
                pages[place] = (below - origin) // unit, end_page
            low_edge = edge
        elif packed:
            before += 1
            low_page = max(lowest, -((origin - low_edge) // unit))
            if blocked is not None:
                low_page = blocked.clear_above(low_page, packed, unit, origin)
            page = low_page + (limit - low_page) * before // (before + beside)
            page = max(page, -((origin - edge) // unit))
            if blocked is not None:
                page = blocked.clear_above(page, packed, unit, origin)
            low_edge = origin + (low_page + packed) * unit
            edge = origin + (page + packed) * unit
            pages[place] = page, page + packed
        else:
            pages[place] = lowest, lowest
    return tuple([PageSpan(first_page=first_page, end_page=end_page) for first_page, end_page in pages])


def _grows_up(row: FloatTerms, edge: int, ceiling: int, blocked: BlockedBytes | None) -> bool:
    """Whether a float that stays grows up: the gap above is the larger that it can have, or the one below will not do."""
    _, _, _, below, start, end, above, _, _, _, _ = row
    if above > ceiling:
        return False
    if edge > below:
        return True
    if blocked is not None:
        edge = max(edge, blocked.end_before(start, edge))
        ceiling = min(ceiling, blocked.first_from(end, ceiling))
    return ceiling - end >= start - edge
