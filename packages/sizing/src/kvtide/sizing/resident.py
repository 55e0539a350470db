"""What a request holds between its forwards: *resident now*, beside the peak that it is admitted at (row S6)."""

from __future__ import annotations

from kvtide.plan import KVStoragePlan, SubPool
from kvtide.sizing.demand import DEFAULT_POLICY, KVDemand, check_positive
from kvtide.sizing.held import HeldBand
from kvtide.sizing.policy import ServingPolicy


def resident_demand(
    plan: KVStoragePlan, *, written_tokens: int, policy: ServingPolicy = DEFAULT_POLICY
) -> KVDemand:
    """Units of each band that a request holds once `written_tokens` are processed and before its next forward takes any.

    Requests that fit like this may have no room for their next tokens: what may be admitted is `request_demand`'s to say.

    Raises:
        SizingError: `written_tokens` is no positive integer; the policy keeps checkpoints and the plan has none.
    """
    check_positive(written_tokens=written_tokens)
    grid = policy.grid_tokens(plan)

    def units(pool: SubPool) -> int:
        if pool.page_tokens is None:
            return policy.rule.slots
        band = HeldBand(
            page_tokens=pool.page_tokens,
            window_tokens=pool.window_tokens,
            chunk_tokens=pool.chunk_tokens,
            grid_tokens=grid or 1,
        )
        return band.pages(written_tokens, written_tokens, 0)

    return KVDemand(tuple(units(pool) for pool in plan.sub_pools))
