"""One byte budget becomes an arena, its mirrors and boot targets, exactly (rows S1, S2, S4).

In this order, each step the largest that leaves room for what was chosen before it:

1. *Fixed allocations.* Beside the arena: mirrors of the request table and of the id tables, reserved bytes, and whatever else
   the caller names (scratch, staging). In the arena: the reserved prefix. *The arena is the largest for which it and everything
   beside it stay within the budget.* The id tables never shrink as the arena grows, so the sum grows with every byte of it:
   the largest is where the sum last stays within, and bisection finds it.
2. *State slots*: an explicit count, or a share of the chain's bytes, but no more than the running requests hold and no fewer
   than one does. Half by default: whatever the mix of requests, the target then holds at least half as many as the best
   split for that mix would, since no kind has less than half of what it would have there.
3. *Full attention*: *the most owner pages for which the window targets also fit*, a window's target being what the requests
   that can run hold of it at most, and never more tokens than the owner has. With an owner page more, no target shrinks, and
   what packs packs with fewer pages too; so the largest is where packing last succeeds, and bisection finds it.

Targets are boot targets: at run time any band may take any free byte (S3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import attrs

from kvtide.plan import ArenaLayout, KVStoragePlan, lay_out, pack
from kvtide.sizing.bisection import last_that
from kvtide.sizing.demand import DEFAULT_POLICY, context_demand, request_demand
from kvtide.sizing.errors import SizingError
from kvtide.sizing.fitting import (
    ID_BYTES,
    ROW_STATE_BYTES,
    mirror_lengths,
    prefix_bytes,
    requests_that_fit,
    smallest_arena,
)
from kvtide.sizing.policy import ServingPolicy
from kvtide.sizing.sized_plan import BandTarget, FixedAllocation, SizedPlan

DEFAULT_STATE_SHARE = Fraction(1, 2)
"""Of the chain's bytes, for state slots."""


def size_plan(
    plan: KVStoragePlan,
    *,
    budget_bytes: int,
    max_running_requests: int,
    max_context_tokens: int,
    chunk_tokens: int,
    state_slots: int | None = None,
    state_share: Fraction | float | None = None,
    reserved_bytes: int = 0,
    beside_arena: Mapping[str, int] | None = None,
    policy: ServingPolicy = DEFAULT_POLICY,
) -> SizedPlan:
    """Divide `budget_bytes` of device memory as the module's docstring says.

    Args:
        plan: the model's sub-pools.
        budget_bytes: bytes for the arena and everything beside it.
        max_running_requests: rows of the request table.
        max_context_tokens: length of the longest request, output included.
        chunk_tokens: length of the longest prefill chunk.
        state_slots: slots of the state band's target; excludes `state_share`.
        state_share: part of the chain's bytes for state slots, in (0, 1]; by default a half. A chain of state alone is whole.
        reserved_bytes: bytes of the budget to leave alone.
        beside_arena: further bytes by name that must fit in the budget too.
        policy: how the engine serves; it decides how many state slots and window pages a request holds.

    Raises:
        SizingError: an argument makes no sense, the budget is below the floor of one request at batch size 1, or the state
            slots do not fit beside a page of each attention band; the text of the latter two lists every term and the
            missing bytes.
    """
    _check_counts(budget_bytes, max_running_requests, max_context_tokens, chunk_tokens, state_slots)
    others = {"reserved": reserved_bytes} if reserved_bytes else {}
    others |= beside_arena or {}
    _check_bytes(reserved_bytes, others)
    share = _share(state_share, state_slots)
    floor, one_request = _floor_and_peaks(plan, max_context_tokens, chunk_tokens, policy)
    longest_row = max_context_tokens + policy.drafted_tokens
    budget = _Budget(
        plan=plan,
        budget_bytes=budget_bytes,
        rows=max_running_requests,
        pages_per_row=-(-longest_row // plan.page_tokens),
        others=others,
    )
    layout = budget.largest_layout(smallest_arena(plan, floor))
    if layout is None:
        raise budget.too_small(floor, "the floor of one request at batch size 1")
    chain = _Chain(plan=plan, layout=layout, one_request=one_request, rows=max_running_requests)
    if state_slots is None:
        slots = chain.slots_of_share(share)
    elif chain.packs(state_slots, 1):
        slots = state_slots
    else:
        what = f"{state_slots} state slots and a page of each attention band"
        raise budget.too_small(chain.units(state_slots, 1), what)
    units = chain.units(slots, chain.most_owner_pages(slots))
    smallest = request_demand(
        plan, prompt_tokens=1, output_tokens=1, chunk_tokens=chunk_tokens, policy=policy
    )
    fixed = [FixedAllocation(name="reserved prefix (sinks)", byte_count=prefix_bytes(plan), in_arena=True)]
    fixed += [
        FixedAllocation(name=name, byte_count=count, in_arena=False)
        for name, count in budget.beside(layout).items()
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
        policy=policy,
        concurrency=min(max_running_requests, requests_that_fit(layout, smallest)),
    )


def size_stages(
    plans: Sequence[KVStoragePlan],
    *,
    budget_bytes: int,
    max_running_requests: int,
    max_context_tokens: int,
    chunk_tokens: int,
    state_slots: int | None = None,
    state_share: Fraction | float | None = None,
    reserved_bytes: int = 0,
    policy: ServingPolicy = DEFAULT_POLICY,
    beside_arena: Mapping[str, int] | None = None,
) -> tuple[SizedPlan, ...]:
    """`size_plan` for each stage of a pipeline, each with a budget of its own, at the least concurrency among them (S4).

    Every stage runs the same requests, so rows for more than the smallest stage can ever hold would never be used. Their windows
    are retained for the same checkpoints too: a stage without state gets the interval of those with state in its policy.
    Raises what `size_plan` raises, for the first stage it concerns.
    """
    policy = _pipeline_policy(plans, policy)

    def sizes(running: int) -> tuple[SizedPlan, ...]:
        return tuple(
            size_plan(
                plan,
                budget_bytes=budget_bytes,
                max_running_requests=running,
                max_context_tokens=max_context_tokens,
                chunk_tokens=chunk_tokens,
                state_slots=state_slots,
                state_share=state_share,
                reserved_bytes=reserved_bytes,
                policy=policy,
                beside_arena=beside_arena,
            )
            for plan in plans
        )

    return sizes(min(sized.concurrency for sized in sizes(max_running_requests)))


def _pipeline_policy(plans: Sequence[KVStoragePlan], policy: ServingPolicy) -> ServingPolicy:
    """The policy with the interval at which any stage keeps states."""
    intervals = [plan.checkpoint_interval for plan in plans if plan.checkpoint_interval is not None]
    if not intervals or policy.checkpoint_interval is not None:
        return policy
    return attrs.evolve(policy, checkpoint_interval=intervals[0])


@attrs.frozen(kw_only=True)
class _Budget:
    """The bytes given, and what lies beside an arena of a layout."""

    plan: KVStoragePlan
    budget_bytes: int
    rows: int
    pages_per_row: int
    others: Mapping[str, int]

    def beside(self, layout: ArenaLayout) -> dict[str, int]:
        """Bytes beside the arena, by name."""
        lengths = mirror_lengths(layout, max_running_requests=self.rows, pages_per_row=self.pages_per_row)
        return {
            **{f"mirror of {name}": ID_BYTES * length for name, length in lengths.items()},
            "row state": ROW_STATE_BYTES * self.rows,
            **self.others,
        }

    def total_bytes(self, arena_bytes: int) -> int:
        """Arena and everything beside it; grows with every byte of the arena."""
        return arena_bytes + sum(self.beside(lay_out(self.plan, arena_bytes)).values())

    def largest_layout(self, smallest: int) -> ArenaLayout | None:
        """The largest arena within the budget, or `None` where one of `smallest` bytes is not."""
        if self.total_bytes(smallest) > self.budget_bytes:
            return None
        return lay_out(
            self.plan,
            last_that(lambda size: self.total_bytes(size) <= self.budget_bytes, smallest, self.budget_bytes),
        )

    def too_small(self, units: Sequence[int], what: str) -> SizingError:
        """A refusal that lists every term of `what`, which is `units`."""
        layout = lay_out(self.plan, smallest_arena(self.plan, units))
        beside = self.beside(layout)
        needed_bytes = layout.arena_bytes + sum(beside.values())
        pools = list(zip(self.plan.sub_pools, units, strict=True))
        held = sum(pool.unit.unit_bytes * count for pool, count in pools)
        terms = [f"sinks {layout.prefix_bytes}"]
        terms.append(
            ", ".join(f"{count} × {pool.unit.unit_bytes} bytes of {pool.name!r}" for pool, count in pools)
        )
        terms.append(f"alignment between bands {layout.arena_bytes - layout.prefix_bytes - held}")
        terms += [f"{name} {count}" for name, count in beside.items()]
        return SizingError(
            f"a budget of {self.budget_bytes} bytes is below {what}, {needed_bytes} bytes: "
            f"{'; '.join(terms)}; missing {needed_bytes - self.budget_bytes} bytes"
        )


def _check_counts(
    budget_bytes: int,
    max_running_requests: int,
    max_context_tokens: int,
    chunk_tokens: int,
    state_slots: int | None,
) -> None:
    counts = {
        "budget_bytes": budget_bytes,
        "max_running_requests": max_running_requests,
        "max_context_tokens": max_context_tokens,
        "chunk_tokens": chunk_tokens,
    }
    if state_slots is not None:
        counts["state_slots"] = state_slots
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise SizingError(f"{name} must be a positive integer, found {value!r}")


def _check_bytes(reserved_bytes: int, others: Mapping[str, int]) -> None:
    named = {"reserved_bytes": reserved_bytes}
    named |= {f"beside_arena[{name!r}]": count for name, count in others.items()}
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SizingError(f"{name} must be an integer of 0 or more, found {value!r}")


def _share(state_share: Fraction | float | None, state_slots: int | None) -> Fraction:
    if state_share is None:
        return DEFAULT_STATE_SHARE
    if state_slots is not None:
        raise SizingError(
            f"state_slots = {state_slots} and state_share = {state_share} exclude one another: give one of them"
        )
    if (
        isinstance(state_share, bool)
        or not isinstance(state_share, int | float | Fraction)
        or not 0 < state_share <= 1
    ):
        raise SizingError(f"state_share must lie in (0, 1], found {state_share!r}")
    return Fraction(state_share)


def _floor_and_peaks(
    plan: KVStoragePlan, max_context_tokens: int, chunk_tokens: int, policy: ServingPolicy
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What one request at batch size 1 cannot do without, and what one of the longest length holds at most.

    The floor is its window rows as it decodes, its state slots, and a page of full attention to write to.
    """
    decoding = request_demand(
        plan, prompt_tokens=1, output_tokens=max_context_tokens, chunk_tokens=chunk_tokens, policy=policy
    ).units
    peaks = context_demand(
        plan, context_tokens=max_context_tokens, chunk_tokens=chunk_tokens, policy=policy
    ).units
    floor = [
        peak if pool.page_tokens is None else 1 if pool.retained_tokens is None else units
        for pool, peak, units in zip(plan.sub_pools, peaks, decoding, strict=True)
    ]
    return tuple(floor), peaks


@attrs.frozen(kw_only=True)
class _Chain:
    """The targets that an arena could have."""

    plan: KVStoragePlan
    layout: ArenaLayout
    one_request: tuple[int, ...]
    """What a request of the longest length holds at most of each band."""

    rows: int

    @property
    def slots_each(self) -> int | None:
        """State slots of one request; `None` without state."""
        pools = zip(self.plan.sub_pools, self.one_request, strict=True)
        return next((units for pool, units in pools if pool.page_tokens is None), None)

    def running(self, slots: int) -> int:
        """Requests that have a row and their state slots."""
        return self.rows if self.slots_each is None else min(self.rows, slots // self.slots_each)

    def units(self, slots: int, owner_pages: int) -> list[int]:
        """Targets in chain order for so many state slots and owner pages."""
        units = []
        for pool, peak in zip(self.plan.sub_pools, self.one_request, strict=True):
            if pool.page_tokens is None:
                units.append(slots)
            elif pool is self.plan.owner:
                units.append(owner_pages)
            else:
                # Slots for less than a request are one request's worth of window.
                peaks = max(1, self.running(slots)) * peak
                units.append(min(owner_pages * self.plan.sub_page_ratio(pool.name), peaks))
        return units

    def packs(self, slots: int, owner_pages: int) -> bool:
        """Whether those targets fit."""
        return pack(self.layout, self.units(slots, owner_pages)) is not None

    def slots_of_share(self, share: Fraction) -> int:
        """State slots in `share` of the chain: at least one request's, at most all requests', beside an owner page."""
        state, least = self.plan.state_sub_pool, self.slots_each
        if state is None or least is None:
            return 0
        if self.plan.owner is None:
            share = Fraction(1)
        chain_bytes = self.layout.arena_bytes - self.layout.prefix_bytes
        shared = int(chain_bytes * share) // state.unit.unit_bytes
        most = max(least, min(shared, self.rows * least))
        return last_that(lambda slots: self.packs(slots, 1), least, most)

    def most_owner_pages(self, slots: int) -> int:
        """The most owner pages that pack beside `slots` state slots and the windows."""
        owner = self.plan.owner
        most = self.layout.band(owner.name).capacity_pages if owner is not None else 0
        return last_that(lambda pages: self.packs(slots, pages), 0, most)
