"""How a scenario's requests share prefixes: drawn from its first rank's seed, so that a scenario stays a value that knows of no tree."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs

from kvtide.simulation import Scenario
from kvtide.sizing import CheckpointStrategy, ChunkReads, ServingPolicy, SizedPlan
from kvtide.storage.errors import StorageError
from kvtide.storage.supported import check_supported
from kvtide.storage.tree import CostAware, EvictionPolicy, LeastRecentlyUsed

_MOST_INTERVAL_PAGES = 3


@attrs.frozen(kw_only=True)
class SharingSettings:
    """Of one run, the same on every rank."""

    sized: SizedPlan
    """Bands, policy, the longest chunk; rows are as long as the arena has pages."""

    make_policy: Callable[[], EvictionPolicy]
    """What the tree lets go of first."""

    writes_whole_pages: bool
    """Whether pages that a chunk fills are handed out as they are."""

    @property
    def grid(self) -> int | None:
        """Tokens between checkpoints; `None` where none lies on a grid."""
        return self.sized.policy.grid_tokens(self.sized.plan)


@functools.lru_cache(maxsize=8)
def settings_of(scenario: Scenario) -> SharingSettings | None:
    """The settings of a scenario; `None` for a plan that the storage does not run: windows of smaller pages, or no pages at all."""
    draw = _Digits(scenario.rank_seeds[0])
    pages = 1 + draw(_MOST_INTERVAL_PAGES)
    page_tokens = scenario.plan().page_tokens
    interval = pages * page_tokens
    plan = scenario.plan(interval)
    try:
        check_supported(plan)
    except StorageError:
        return None
    if not plan.token_sub_pools:
        return None
    overlaps = scenario.overlap > 1 and draw(4) > 0
    on_grid, else_ = CheckpointStrategy.EXTRA_BUFFER, CheckpointStrategy.NO_BUFFER
    if overlaps:
        else_ = CheckpointStrategy.EXTRA_BUFFER_LAZY
    is_stage = plan.state_sub_pool is None and draw(2)
    policy = ServingPolicy(
        strategy=(on_grid, else_)[draw(2)],
        overlap=overlaps,
        chunk_reads=ChunkReads.ACTIVATIONS if draw(4) == 0 else ChunkReads.PAGES,
        checkpoint_interval=interval if is_stage else None,
    )
    layout = scenario.layout()
    sized = SizedPlan(
        plan=plan,
        layout=layout,
        budget_bytes=layout.arena_bytes,
        fixed=(),
        targets=(),
        max_running_requests=scenario.row_count,
        max_context_tokens=layout.virtual_page_count * page_tokens,
        chunk_tokens=(policy.grid_tokens(plan) or page_tokens) * (1 + draw(3)),
        policy=policy,
        concurrency=scenario.row_count,
    )
    return SharingSettings(
        sized=sized,
        make_policy=(LeastRecentlyUsed, CostAware)[draw(2)],
        writes_whole_pages=bool(draw(2)),
    )


class _Digits:
    """A number, read digit by digit."""

    def __init__(self, number: int) -> None:
        self._rest = number

    def __call__(self, count: int) -> int:
        """The next digit, to the base `count`."""
        self._rest, digit = divmod(self._rest, count)
        return digit
