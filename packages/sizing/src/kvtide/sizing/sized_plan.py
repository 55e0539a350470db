"""What sizing yields: a plan with bytes, as values (rows S1, S3)."""

from __future__ import annotations

import attrs

from kvtide.plan import ArenaLayout, KVStoragePlan
from kvtide.sizing.demand import DemandPurpose, KVDemand, context_demand, request_demand
from kvtide.sizing.policy import ServingPolicy


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
    """Boot targets in chain order. They limit nothing later: any band may take any free byte (S3)."""

    max_running_requests: int
    """Rows of the request table."""

    max_context_tokens: int
    """Tokens of the longest request; rows are as long as its pages."""

    chunk_tokens: int
    """Tokens of the longest prefill chunk."""

    policy: ServingPolicy
    """How the engine serves."""

    concurrency: int
    """Most requests that can ever run at once: of the smallest, as many as the arena holds and there are rows for.

    Stages of a pipeline agree on the least (S4).
    """

    @property
    def pages_per_row(self) -> int:
        """Virtual pages of the longest request, drafted tokens that may be rejected among them."""
        longest = self.max_context_tokens + self.policy.drafted_tokens
        return -(-longest // self.plan.page_tokens)

    @property
    def used_bytes(self) -> int:
        """Arena and everything beside it; within 16 bytes and a table entry of the budget."""
        return self.layout.arena_bytes + sum(term.byte_count for term in self.fixed if not term.in_arena)

    def demand(
        self,
        *,
        prompt_tokens: int,
        output_tokens: int,
        purpose: DemandPurpose = DemandPurpose.CEILING,
        cached_tokens: int = 0,
    ) -> KVDemand:
        """`request_demand` under this plan's chunk and policy."""
        return request_demand(
            self.plan,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            chunk_tokens=self.chunk_tokens,
            purpose=purpose,
            cached_tokens=cached_tokens,
            policy=self.policy,
        )

    def context_demand(self, context_tokens: int) -> KVDemand:
        """`context_demand` under this plan's chunk and policy."""
        return context_demand(
            self.plan, context_tokens=context_tokens, chunk_tokens=self.chunk_tokens, policy=self.policy
        )
