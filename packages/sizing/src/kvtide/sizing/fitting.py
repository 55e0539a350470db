"""What fits in an arena (row S1)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.plan import ArenaLayout, KVStoragePlan, lay_out, pack
from kvtide.sizing.bisection import last_that
from kvtide.sizing.demand import KVDemand

ID_BYTES = 4
"""Ids on the device are int32 (D10)."""

ROW_STATE_BYTES = 3 * 8
"""Of each row, for values that are born on the device: tokens written, the last token, the sampler's cursor (K2)."""


def mirror_lengths(layout: ArenaLayout, *, max_running_requests: int, pages_per_row: int) -> dict[str, int]:
    """Entries of each int32 table that the device mirrors, by name: `rows`, and one `ids:BAND` a band.

    The storage allocates by this function and the planner counts by it, so the two cannot differ.
    """
    lengths = {"rows": max_running_requests * pages_per_row}
    for band in layout.bands:
        lengths[f"ids:{band.name}"] = layout.id_count(band)
    return lengths


def requests_that_fit(layout: ArenaLayout, demand: KVDemand, *, beside: KVDemand | None = None) -> int:
    """How many requests of `demand` the arena holds at once beside what others hold, such as a prefix that they share.

    With the demand of `request_demand` that is *admitted at peak*, with that of `resident_demand` *resident now*. 0 where not even
    `beside` fits.
    """
    held = (0,) * len(layout.bands) if beside is None else beside.units

    def fit(count: int) -> bool:
        return (
            pack(layout, [count * units + more for units, more in zip(demand.units, held, strict=True)])
            is not None
        )

    # A request that takes nothing, its whole prefix cached elsewhere, is bounded by its rows alone.
    largest = min(
        (
            band.capacity_pages // units
            for band, units in zip(layout.bands, demand.units, strict=True)
            if units
        ),
        default=0,
    )
    return last_that(fit, 0, largest)


def smallest_arena(plan: KVStoragePlan, units: Sequence[int]) -> int:
    """The fewest arena bytes in which `units` of each sub-pool pack: prefix, their bytes, and what grids lose between them."""
    prefix = prefix_bytes(plan)
    held = sum(pool.unit.unit_bytes * count for pool, count in zip(plan.sub_pools, units, strict=True))
    # Each band loses less than a unit to the grid before it.
    slack = sum(pool.unit.unit_bytes for pool in plan.sub_pools)

    def short(arena_bytes: int) -> bool:
        return pack(lay_out(plan, arena_bytes), units) is None

    least = prefix + held
    return last_that(short, least, least + slack) + 1 if short(least) else least


def prefix_bytes(plan: KVStoragePlan) -> int:
    """Bytes of the reserved prefix: a sink for each band that has one."""
    return sum(pool.unit.unit_bytes for pool in plan.sub_pools if pool.has_sink)
