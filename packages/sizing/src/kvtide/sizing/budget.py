"""One byte budget becomes an arena, its mirrors and boot targets, exactly (rows S1, S2).

In this order:

1. *Fixed allocations.* Beside the arena: mirrors of the request table and of the id tables, and whatever else the caller
   names (scratch, staging). In the arena: the reserved prefix. The id tables grow with the arena, so the arena is the
   largest for which arena + everything beside it stays within the budget; both sides are monotone, so bisection finds it.
2. *State slots*: an explicit count, else one for each running request, as far as each has a page of the owner beside it.
3. *Full attention*: the most pages for which the window targets also fit, a window's target being what every running
   request holds of it at most, and never more pages than full attention has. More pages never make a packing easier, so
   bisection finds the largest.

Targets are boot targets: at run time any band may take any free byte (S3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from kvtide.plan import ArenaLayout, KVStoragePlan, SubPoolKind, lay_out, pack
from kvtide.sizing.demand import KVDemand, request_demand
from kvtide.sizing.errors import SizingError

ID_BYTES = 4
"""Ids on the device are int32 (D10)."""


@attrs.frozen(kw_only=True)
class FixedAllocation:
    """Bytes of the budget that no band can take."""

    name: str
    """What they are for."""

    byte_count: int
    """How many."""

    in_arena: bool
    """Whether they lie in the arena or beside it."""


@attrs.frozen(kw_only=True)
class BandTarget:
    """What a band is expected to hold at full load."""

    name: str
    """Band."""

    unit_count: int
    """Pages or state slots."""

    token_count: int | None
    """Tokens in them; `None` for state."""


@attrs.frozen(kw_only=True)
class SizedPlan:
    """A plan with bytes: what `build_kv_storage` constructs."""

    plan: KVStoragePlan
    """Sub-pools."""

    layout: ArenaLayout
    """Their grids over the arena."""

    budget_bytes: int
    """What was given."""

    fixed: tuple[FixedAllocation, ...]
    """What no band can take."""

    targets: tuple[BandTarget, ...]
    """Boot targets in chain order."""

    max_running_requests: int
    """Rows of the request table."""

    max_context_tokens: int
    """Tokens of the longest request; rows are as long as its pages."""

    chunk_tokens: int
    """Tokens of the longest prefill chunk."""

    @property
    def pages_per_row(self) -> int:
        """Virtual pages of the longest request."""
        return -(-self.max_context_tokens // self.plan.page_tokens)

    @property
    def used_bytes(self) -> int:
        """Arena and everything beside it; within 16 bytes and a table entry of the budget."""
        return self.layout.arena_bytes + sum(term.byte_count for term in self.fixed if not term.in_arena)


def mirror_lengths(layout: ArenaLayout, *, max_running_requests: int, pages_per_row: int) -> dict[str, int]:
    """Entries of each int32 table that the device mirrors, by name: `rows`, and one `ids:BAND` a band.

    The storage allocates by this function and the planner counts by it, so the two cannot differ.
    """
    lengths = {"rows": max_running_requests * pages_per_row}
    for band in layout.bands:
        lengths[f"ids:{band.name}"] = layout.id_count(band)
    return lengths


def size_plan(
    plan: KVStoragePlan,
    *,
    budget_bytes: int,
    max_running_requests: int,
    max_context_tokens: int,
    chunk_tokens: int,
    state_slots: int | None = None,
    beside_arena: Mapping[str, int] | None = None,
) -> SizedPlan:
    """Divide `budget_bytes` of device memory as the module's docstring says.

    Args:
        plan: the model's sub-pools.
        budget_bytes: bytes for the arena and everything beside it.
        max_running_requests: rows of the request table.
        max_context_tokens: length of the longest request, output included.
        chunk_tokens: length of the longest prefill chunk.
        state_slots: slots of the state band's target; by default one for each running request.
        beside_arena: further bytes by name that must fit in the budget too.

    Raises:
        SizingError: an argument is no positive integer, the budget is below the floor of one request at batch size 1, or
            the state slots do not fit beside a page of each attention band; the text of the latter two lists every term
            and the missing bytes.
    """
    arguments = {
        "budget_bytes": budget_bytes,
        "max_running_requests": max_running_requests,
        "max_context_tokens": max_context_tokens,
        "chunk_tokens": chunk_tokens,
    }
    if state_slots is not None:
        arguments["state_slots"] = state_slots
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise SizingError(f"{name} must be a positive integer, found {value!r}")
    others = dict(beside_arena or {})
    for name, byte_count in others.items():
        if isinstance(byte_count, bool) or not isinstance(byte_count, int) or byte_count < 0:
            raise SizingError(f"beside_arena[{name!r}] must be an integer of 0 or more, found {byte_count!r}")
    pages_per_row = -(-max_context_tokens // plan.page_tokens)

    def beside(layout: ArenaLayout) -> dict[str, int]:
        lengths = mirror_lengths(
            layout, max_running_requests=max_running_requests, pages_per_row=pages_per_row
        )
        return {f"mirror of {name}": ID_BYTES * length for name, length in lengths.items()} | others

    def total_bytes(arena_bytes: int) -> int:
        return arena_bytes + sum(beside(lay_out(plan, arena_bytes)).values())

    prefix_bytes = sum(pool.unit.unit_bytes for pool in plan.sub_pools if pool.has_sink)
    floor_units = _floor_units(plan)
    smallest = _smallest_arena(plan, prefix_bytes, floor_units)
    if total_bytes(smallest) > budget_bytes:
        layout = lay_out(plan, smallest)
        what = "the floor of one request at batch size 1"
        raise _too_small(plan, layout, floor_units, beside(layout), budget_bytes=budget_bytes, what=what)
    layout = lay_out(
        plan, _last(lambda arena_bytes: total_bytes(arena_bytes) <= budget_bytes, smallest, budget_bytes)
    )
    longest = request_demand(
        plan,
        prompt_tokens=max_context_tokens,
        output_tokens=1,
        chunk_tokens=min(chunk_tokens, max_context_tokens),
    )
    peaks = [max_running_requests * units for units in longest.units]
    units = _target_units(plan, layout, peaks, max_running_requests, state_slots)
    if units is None:
        # The floor fits, so one slot does: these slots were asked for.
        slots = state_slots or 1
        least = tuple(slots if pool.kind is SubPoolKind.STATE else 1 for pool in plan.sub_pools)
        layout = lay_out(plan, _smallest_arena(plan, prefix_bytes, least))
        what = f"{slots} state slots and a page of each attention band"
        raise _too_small(plan, layout, least, beside(layout), budget_bytes=budget_bytes, what=what)
    fixed = [FixedAllocation(name="reserved prefix (sinks)", byte_count=prefix_bytes, in_arena=True)]
    fixed += [
        FixedAllocation(name=name, byte_count=count, in_arena=False) for name, count in beside(layout).items()
    ]
    return SizedPlan(
        plan=plan,
        layout=layout,
        budget_bytes=budget_bytes,
        fixed=tuple(fixed),
        targets=tuple(
            BandTarget(
                name=pool.name,
                unit_count=count,
                token_count=None if pool.page_tokens is None else count * pool.page_tokens,
            )
            for pool, count in zip(plan.sub_pools, units, strict=True)
        ),
        max_running_requests=max_running_requests,
        max_context_tokens=max_context_tokens,
        chunk_tokens=chunk_tokens,
    )


def requests_that_fit(layout: ArenaLayout, demand: KVDemand) -> int:
    """How many requests of `demand` the arena holds at once, each at its peak (*admitted at peak*)."""
    largest = max(
        band.capacity_pages // units for band, units in zip(layout.bands, demand.units, strict=True) if units
    )
    return _last(
        lambda count: pack(layout, [count * units for units in demand.units]) is not None, 0, largest
    )


def _floor_units(plan: KVStoragePlan) -> tuple[int, ...]:
    """One request at batch size 1: its window rows and state slot, and a page of full attention to write to."""
    units = []
    for pool in plan.sub_pools:
        if pool.window_tokens is None or pool.page_tokens is None:
            units.append(1)
        else:
            units.append(-(-(pool.window_tokens + pool.page_tokens - 1) // pool.page_tokens))
    return tuple(units)


def _smallest_arena(plan: KVStoragePlan, prefix_bytes: int, units: tuple[int, ...]) -> int:
    """The fewest arena bytes in which `units` pack: their bytes, and what the grids lose between them."""
    payload = sum(pool.unit.unit_bytes * count for pool, count in zip(plan.sub_pools, units, strict=True))
    slack = sum(pool.unit.unit_bytes for pool in plan.sub_pools)
    most = prefix_bytes + payload + slack

    def short(arena_bytes: int) -> bool:
        return pack(lay_out(plan, arena_bytes), units) is None

    least = prefix_bytes + payload
    return least if not short(least) else _last(short, least, most) + 1


def _target_units(
    plan: KVStoragePlan,
    layout: ArenaLayout,
    peaks: Sequence[int],
    max_running_requests: int,
    state_slots: int | None,
) -> list[int] | None:
    """The largest targets that pack: state slots, windows of up to `peaks` pages, and the most pages of the owner."""

    def units_at(slots: int, owner_pages: int) -> list[int]:
        units = []
        for pool, peak in zip(plan.sub_pools, peaks, strict=True):
            if pool.kind is SubPoolKind.STATE:
                units.append(slots)
            elif pool is plan.owner:
                units.append(owner_pages)
            else:
                units.append(min(owner_pages, peak))
        return units

    def packs(slots: int, owner_pages: int) -> bool:
        return pack(layout, units_at(slots, owner_pages)) is not None

    slots = state_slots or _last(lambda count: packs(count, count), 1, max_running_requests)
    if not packs(slots, 1):
        return None
    most_pages = layout.band(plan.owner.name).capacity_pages if plan.owner is not None else 1
    return units_at(slots, _last(lambda pages: packs(slots, pages), 1, most_pages))


def _last(holds: Callable[[int], bool], first: int, last: int) -> int:
    """The last integer of `[first, last]` at which `holds`, which holds at `first` and, once it fails, fails for ever."""
    while first < last:
        middle = (first + last + 1) // 2
        if holds(middle):
            first = middle
        else:
            last = middle - 1
    return first


def _units_text(plan: KVStoragePlan, units: tuple[int, ...]) -> str:
    return ", ".join(
        f"{count} × {pool.unit.unit_bytes} bytes of {pool.name!r}"
        for pool, count in zip(plan.sub_pools, units, strict=True)
    )


def _too_small(
    plan: KVStoragePlan,
    smallest: ArenaLayout,
    units: tuple[int, ...],
    beside: dict[str, int],
    *,
    budget_bytes: int,
    what: str,
) -> SizingError:
    """A refusal that lists every term of `what`, which needs the arena `smallest`."""
    needed_bytes = smallest.arena_bytes + sum(beside.values())
    payload = sum(pool.unit.unit_bytes * count for pool, count in zip(plan.sub_pools, units, strict=True))
    terms = [f"sinks {smallest.prefix_bytes}", _units_text(plan, units)]
    terms.append(f"alignment between bands {smallest.arena_bytes - smallest.prefix_bytes - payload}")
    terms += [f"{name} {count}" for name, count in beside.items()]
    return SizingError(
        f"a budget of {budget_bytes} bytes is below {what}, {needed_bytes} bytes: "
        f"{'; '.join(terms)}; missing {needed_bytes - budget_bytes} bytes"
    )
