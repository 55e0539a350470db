"""Byte layout: where every plane of every page lies in the arena (rows P9, A2, A8; decision D10).

Sizing, pricing and views all read this one module. It is integer arithmetic, nothing else.

    0        prefix_bytes                                                              arena_bytes
    | sinks |  state slots → |   free   | ← window pages → |   free   | ← full pages |remainder|
              grow-up end                    float                      grow-down end

*Page k of a band is the bytes `[origin + k × unit, +unit)`*, wherever the band stands and for as long as the arena lives; a
band moves by moving pages, never by moving its origin. So a view made once at start is right for ever, and a captured graph
needs no change.

Rules:

- A plane starts at a multiple of 16 within its page; a unit and an origin are multiples of 16.
- Page 0 of a band with a *sink* lies in the reserved prefix, sinks side by side, the grow-up end's last. A band without a
  sink begins where the prefix ends.
- Pages `[first_page, page_count)` may be handed out: those behind the prefix and wholly inside the arena.
- Two neighbours meet on a byte: each keeps its own grid, so up to one unit less a grain is lost between them, and at the end.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from kvtide.plan.errors import PlanError
from kvtide.plan.storage_plan import KVStoragePlan, SubPool, SubPoolKind
from kvtide.plan.unit import Plane

MAX_PAGE_COUNT = 2**31 - 1
"""Ids are int32 (D10)."""


class Growth(enum.Enum):
    """Which way a band grows; its place in the chain decides."""

    UP = "grow-up end"
    FLOAT = "float"
    DOWN = "grow-down end"


@attrs.frozen(kw_only=True)
class PageSpan:
    """A half-open run of physical pages within one band."""

    first_page: int
    """Inclusive."""

    end_page: int
    """Exclusive; equal to `first_page` when the span is empty."""

    @property
    def page_count(self) -> int:
        """Pages in the span."""
        return self.end_page - self.first_page


@attrs.frozen(kw_only=True)
class BandLayout:
    """The grid of one band: fixed for the life of the arena."""

    name: str
    """Name of the sub-pool."""

    kind: SubPoolKind
    """Full, window, chunk or state."""

    growth: Growth
    """Place in the chain."""

    unit_bytes: int
    """Stride of a page; payload rounded up to 16."""

    origin_bytes: int
    """Arena offset of page 0."""

    first_page: int
    """Lowest page that may be handed out."""

    page_count: int
    """One past the highest page that may be handed out."""

    has_sink: bool
    """Whether page 0 is a sink in the reserved prefix."""

    page_tokens: int | None
    """Tokens a page; `None` for a state band."""

    planes: tuple[Plane, ...]
    """Planes of one unit, by offset."""

    @property
    def capacity_pages(self) -> int:
        """Pages that could be handed out if the band had the arena to itself."""
        return max(0, self.page_count - self.first_page)

    def start_byte(self, page: int) -> int:
        """Arena offset at which `page` starts (and the page before it ends)."""
        return self.origin_bytes + page * self.unit_bytes

    def lowest_page_from(self, byte: int) -> int:
        """The lowest page that may be handed out and starts at `byte` or later."""
        return max(self.first_page, -((self.origin_bytes - byte) // self.unit_bytes))

    def highest_end_to(self, byte: int) -> int:
        """The highest `end_page` of a span that ends at `byte` or earlier."""
        return min(self.page_count, (byte - self.origin_bytes) // self.unit_bytes)


@attrs.frozen(kw_only=True)
class ArenaLayout:
    """Every band's grid over one arena."""

    arena_bytes: int
    """Bytes of the arena."""

    prefix_bytes: int
    """Bytes of the reserved prefix: the sinks."""

    bands: tuple[BandLayout, ...]
    """In chain order."""

    owner: str | None
    """Band that holds a token longest and so decides how many virtual pages there are; `None` without attention."""

    @property
    def virtual_page_count(self) -> int:
        """Virtual page ids, page 0 included, which is never minted and reads as the sink (C1).

        As many as can ever be held at once, so that none is missing while there is a byte: full attention binds each of its own; where
        there is none, a page may be held by a single sub-page of the band with the smallest.
        """
        attention = [band for band in self.bands if band.kind is not SubPoolKind.STATE]
        if not attention:
            return 1
        if attention[-1].kind is SubPoolKind.FULL:
            return 1 + attention[-1].capacity_pages
        return 1 + (self.arena_bytes - self.prefix_bytes) // min(band.unit_bytes for band in attention)

    @property
    def page_tokens(self) -> int:
        """Tokens of a virtual page: the owner's page; 0 without attention."""
        return (self.band(self.owner).page_tokens or 0) if self.owner is not None else 0

    def sub_page_ratio(self, band: BandLayout) -> int:
        """Pages of `band` that make one virtual page; virtual page v has sub-pages `v × ratio + i` (P10). 0 for state."""
        return self.page_tokens // band.page_tokens if band.page_tokens is not None else 0

    def id_count(self, band: BandLayout) -> int:
        """Ids that map to pages of `band`: its virtual pages, sub-pages where they are smaller than the owner's; state slots."""
        ratio = self.sub_page_ratio(band)
        return self.virtual_page_count * ratio if ratio else band.capacity_pages

    def band(self, name: str) -> BandLayout:
        """The band called `name`; raises `KeyError` naming those there are."""
        for band in self.bands:
            if band.name == name:
                return band
        raise KeyError(f"no band {name!r}; the chain has {[band.name for band in self.bands]}")


def growths(band_count: int) -> tuple[Growth, ...]:
    """Roles by place: the first grows up, the last down, the rest float; a lone band grows down (P3)."""
    if band_count == 1:
        return (Growth.DOWN,)
    return (Growth.UP, *[Growth.FLOAT] * (band_count - 2), Growth.DOWN)


def pack(layout: ArenaLayout, page_counts: Sequence[int]) -> tuple[PageSpan, ...] | None:
    """The lowest spans that hold `page_counts` pages a band, or `None` where the arena cannot.

    Every page may move here; `page_counts` is in chain order. Placing left to right is complete: a band's lowest start is
    monotone in where the band before it ends, and each ends lowest when it starts lowest, so if any placement exists, this
    one does too. The grow-down end is anchored at its highest page. Empty bands take no room and are transparent.
    """
    spans: list[PageSpan] = []
    edge_byte = layout.prefix_bytes
    for band, page_count in zip(layout.bands, page_counts, strict=True):
        if band.growth is Growth.DOWN:
            first_page = band.page_count - page_count
            if page_count and first_page < band.lowest_page_from(edge_byte):
                return None
        else:
            first_page = band.first_page if not page_count else band.lowest_page_from(edge_byte)
            if page_count and first_page + page_count > band.page_count:
                return None
        if page_count:
            edge_byte = band.start_byte(first_page + page_count)
        spans.append(PageSpan(first_page=first_page, end_page=first_page + page_count))
    return tuple(spans)


def lay_out(plan: KVStoragePlan, arena_bytes: int) -> ArenaLayout:
    """Origins, reserved prefix and page ranges of every band of `plan` in an arena of `arena_bytes`.

    Raises `PlanError` when the arena cannot hold its own prefix and a byte behind it, or when a band would have more pages
    than an int32 id counts.
    """
    roles = growths(len(plan.sub_pools))
    grow_up_last = sorted(range(len(roles)), key=lambda place: roles[place] is Growth.UP)
    sink_origins: dict[str, int] = {}
    prefix_bytes = 0
    for place in grow_up_last:
        pool = plan.sub_pools[place]
        if pool.has_sink:
            sink_origins[pool.name] = prefix_bytes
            prefix_bytes += pool.unit.unit_bytes
    if arena_bytes <= prefix_bytes:
        sinks = ", ".join(f"{name!r}" for name in sink_origins) or "no band"
        raise PlanError(
            f"an arena of {arena_bytes} bytes cannot hold its reserved prefix of {prefix_bytes} bytes (a sink for {sinks}) "
            "and anything behind it"
        )
    return ArenaLayout(
        arena_bytes=arena_bytes,
        prefix_bytes=prefix_bytes,
        owner=plan.owner.name if plan.owner is not None else None,
        bands=tuple(
            _place(pool, role, sink_origins.get(pool.name, prefix_bytes), prefix_bytes, arena_bytes)
            for pool, role in zip(plan.sub_pools, roles, strict=True)
        ),
    )


def _place(
    pool: SubPool, growth: Growth, origin_bytes: int, prefix_bytes: int, arena_bytes: int
) -> BandLayout:
    unit_bytes = pool.unit.unit_bytes
    page_count = (arena_bytes - origin_bytes) // unit_bytes
    if page_count > MAX_PAGE_COUNT:
        raise PlanError(
            f"band {pool.name!r} would have {page_count} pages of {unit_bytes} bytes in an arena of {arena_bytes} bytes, "
            f"more than an int32 id counts ({MAX_PAGE_COUNT}); use larger pages"
        )
    return BandLayout(
        name=pool.name,
        kind=pool.kind,
        growth=growth,
        unit_bytes=unit_bytes,
        origin_bytes=origin_bytes,
        first_page=-((origin_bytes - prefix_bytes) // unit_bytes),
        page_count=page_count,
        has_sink=pool.has_sink,
        page_tokens=pool.page_tokens,
        planes=pool.unit.planes,
    )
