"""What sizing yields: a plan with bytes, as values (rows S1, S3)."""

from __future__ import annotations

import attrs

from kvtide.plan import ArenaLayout, KVStoragePlan, pack
from kvtide.sizing.clip import longest_that_fits, prompt_period
from kvtide.sizing.demand import DemandPurpose, KVDemand, context_demand, request_demand
from kvtide.sizing.policy import ServingPolicy
from kvtide.sizing.resident import resident_demand


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
    def least_chunk_tokens(self) -> int:
        """Tokens of the shortest chunk limit that a request can be given: one interval of checkpoints, else one."""
        return self.policy.grid_tokens(self.plan) or 1

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
        chunk_tokens: int | None = None,
    ) -> KVDemand:
        """`request_demand` under this plan's policy, and its chunk unless it is given shorter ones."""
        return request_demand(
            self.plan,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            chunk_tokens=self.chunk_tokens if chunk_tokens is None else chunk_tokens,
            purpose=purpose,
            cached_tokens=cached_tokens,
            policy=self.policy,
        )

    def context_demand(self, context_tokens: int, *, chunk_tokens: int | None = None) -> KVDemand:
        """`context_demand` under this plan's policy, and its chunk unless it is given shorter ones."""
        return context_demand(
            self.plan,
            context_tokens=context_tokens,
            chunk_tokens=self.chunk_tokens if chunk_tokens is None else chunk_tokens,
            policy=self.policy,
        )

    def resident_demand(self, written_tokens: int) -> KVDemand:
        """`resident_demand` under this plan's policy."""
        return resident_demand(self.plan, written_tokens=written_tokens, policy=self.policy)

    def fits_alone(self, *, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether an arena that holds nothing else serves such a request to its end, if need be in the shortest chunks.

        Raises what `request_demand` raises.
        """
        demand = self.demand(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, chunk_tokens=self.least_chunk_tokens
        )
        return (
            prompt_tokens + output_tokens <= self.max_context_tokens
            and pack(self.layout, demand.units) is not None
        )

    def max_new_tokens_for_memory(self, prompt_tokens: int) -> int:
        """The *memory clip*: most output tokens with which a request of this prompt fits alone; 0 where not one does.

        Raises what `request_demand` raises.
        """
        if not self.fits_alone(prompt_tokens=prompt_tokens, output_tokens=1):
            return 0
        return longest_that_fits(
            lambda output: self.fits_alone(prompt_tokens=prompt_tokens, output_tokens=output),
            self.max_context_tokens - prompt_tokens,
        )

    def max_prompt_tokens_for_memory(self, output_tokens: int) -> int:
        """The longest prompt with which a request of this output fits alone; 0 where none does.

        Raises what `request_demand` raises. On a grid of checkpoints a shorter prompt may still need more than it: the last chunk of
        some prompts is the longest there is.
        """
        self.demand(prompt_tokens=1, output_tokens=output_tokens)
        return longest_that_fits(
            lambda prompt: self.fits_alone(prompt_tokens=prompt, output_tokens=output_tokens),
            self.max_context_tokens - output_tokens,
            prompt_period(self.plan, self.policy),
        )
