"""Page sizes and what they waste: rounding to pages, and alignment, in what one request holds."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import attrs

from kvtide.engine.commands.plan_baselines import only
from kvtide.engine.commands.plan_report import PageSuggestion
from kvtide.plan import KVLayerDecl, KVStoragePlan, PlanError, page_multiple, plan_kv_storage
from kvtide.sizing import ServingPolicy, SizingError, context_demand

DEFAULT_PAGE_TOKENS = 16
"""Where compressed entries allow it."""

WASTE_LIMIT_PERCENT = 3
"""Above it, other pages are suggested."""

LARGEST_SUGGESTION = 1024
"""Tokens of the largest page that is suggested, where strides allow as little."""


def default_page_tokens(layers: Sequence[KVLayerDecl]) -> int:
    """16, or the least multiple of every stride above it."""
    multiple = page_multiple(layers)
    return -(-DEFAULT_PAGE_TOKENS // multiple) * multiple


def wasted_share(
    plan: KVStoragePlan, *, context_tokens: int, chunk_tokens: int, policy: ServingPolicy
) -> Fraction:
    """The part of what a request of about `context_tokens` holds that none of its tokens needs.

    Its last page is half full, as the last page of the average request is.
    """
    asked: dict[str, Any] = {
        "context_tokens": context_tokens + plan.page_tokens // 2,
        "chunk_tokens": chunk_tokens,
    }
    units = context_demand(plan, **asked, policy=policy).units
    # A band alone has no state of its own that says where checkpoints lie; what they retain is needed too.
    alone = attrs.evolve(policy, checkpoint_interval=policy.grid_tokens(plan))
    held, needed = 0, Fraction(0)
    for pool, count in zip(plan.sub_pools, units, strict=True):
        held += count * pool.unit.unit_bytes
        if pool.page_tokens is None:
            needed += count * pool.unit.payload_bytes
            continue
        (tokens,) = context_demand(only(pool, 1), **asked, policy=alone).units
        needed += tokens * Fraction(pool.unit.payload_bytes, pool.page_tokens)
    return 1 - needed / held


def percent(share: Fraction) -> float:
    """With one decimal, for documents and people."""
    return round(float(100 * share), 1)


def suggest_pages(
    layers: Sequence[KVLayerDecl], lengths: Sequence[int], *, chunk_tokens: int, policy: ServingPolicy
) -> PageSuggestion:
    """The largest pages that waste at most 3 % of a request of any of `lengths`, or those that waste least.

    Large pages first, because tables and moves are per page; windows get smaller ones only where that is what it takes.
    """
    multiple = page_multiple(layers)
    owners = [
        multiple * 2**power for power in range(11) if multiple * 2**power <= max(LARGEST_SUGGESTION, multiple)
    ]
    tried: list[tuple[Fraction, int, int]] = []
    for owner in reversed(owners):
        for window in [owner // 2**power for power in range(11) if owner % 2**power == 0]:
            try:
                plan = plan_kv_storage(layers, page_tokens=owner, window_page_tokens=window)
                wasted = max(
                    wasted_share(plan, context_tokens=length, chunk_tokens=chunk_tokens, policy=policy)
                    for length in lengths
                )
            except (PlanError, SizingError):
                continue
            tried.append((wasted, owner, window))
            if 100 * wasted <= WASTE_LIMIT_PERCENT:
                return PageSuggestion(
                    page_tokens=owner, window_page_tokens=window, wasted_percent=percent(wasted)
                )
            if len(plan.token_sub_pools) < 2:
                break
    wasted, owner, window = min(tried, key=lambda one: (one[0], -one[1], -one[2]))
    return PageSuggestion(page_tokens=owner, window_page_tokens=window, wasted_percent=percent(wasted))
