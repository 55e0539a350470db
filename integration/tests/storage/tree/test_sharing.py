"""Storages that share prefixes, under every strategy, with and without overlap: wrong bytes, broken promises, hits that are had."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtide.plan import ChunkLifetime, FullLifetime, KVStoragePlan, WindowLifetime
from kvtide.sizing import CheckpointStrategy
from kvtide.storage.tree import CostAware, LeastRecentlyUsed

from .served import plan_of
from .sharing import SharingWorld, shared_storage

STRATEGIES = [
    (CheckpointStrategy.NO_BUFFER, False),
    (CheckpointStrategy.EXTRA_BUFFER, False),
    (CheckpointStrategy.EXTRA_BUFFER, True),
    (CheckpointStrategy.EXTRA_BUFFER_LAZY, True),
]
PLANS: Mapping[str, KVStoragePlan] = {
    "full": plan_of(FullLifetime()),
    "full and a window": plan_of(FullLifetime(), WindowLifetime(5)),
    "full, two windows, state": plan_of(FullLifetime(), WindowLifetime(7), WindowLifetime(3), has_state=True),
    "full and state": plan_of(FullLifetime(), has_state=True),
    "full and chunks": plan_of(FullLifetime(), ChunkLifetime(8)),
    "windows alone": plan_of(WindowLifetime(7), WindowLifetime(3)),
    "a window and state": plan_of(WindowLifetime(5), has_state=True),
    "state alone": plan_of(has_state=True),
}


def arena_bytes(plan: KVStoragePlan, strategy: CheckpointStrategy, overlap: bool, requests: int = 2) -> int:
    """Room for about so many requests at their peaks."""
    large = shared_storage(plan, 1 << 20, strategy, overlap=overlap)
    demand = large.sized.demand(prompt_tokens=20, output_tokens=20)
    sizes = [pool.unit.unit_bytes for pool in plan.sub_pools]
    return large.layout.prefix_bytes + sum(
        requests * count * size + size for count, size in zip(demand.units, sizes, strict=True)
    )


@pytest.mark.requirement("K5", "K7", "K8", "K11")
@pytest.mark.parametrize(
    ("strategy", "overlap"), STRATEGIES, ids=lambda value: getattr(value, "value", value)
)
@pytest.mark.parametrize("plan_name", PLANS)
def test_prefixes_are_shared_under_pressure_without_a_wrong_byte_or_a_broken_promise(
    plan_name: str, strategy: CheckpointStrategy, overlap: bool
) -> None:
    """The arena holds two requests: what the tree keeps is evicted for every admission, under forwards, and hits are had all the same."""
    plan, hits, evicted = PLANS[plan_name], 0, 0
    for seed, policy in enumerate((LeastRecentlyUsed(), CostAware())):
        storage = shared_storage(
            plan,
            arena_bytes(plan, strategy, overlap),
            strategy,
            overlap=overlap,
            eviction_policy=policy,
        )
        world = SharingWorld(storage, seed)
        world.run(100)
        assert world.served > 10
        assert not world.refused_steps
        statistics = storage.statistics().sharing
        assert statistics is not None
        assert not any(statistics.stalled_checkpoints.values())
        assert statistics.hit_tokens == world.hit_tokens
        hits += statistics.hit_tokens
        evicted += sum(statistics.evicted_units.values())
    assert hits
    assert evicted > 20


@pytest.mark.requirement("K2", "K5", "K8", "K11", "H1", "H2")
@pytest.mark.parametrize("plan_name", PLANS)
def test_rows_that_share_are_backed_up_whole_and_restored_on_their_own(plan_name: str) -> None:
    """What the tree holds of a row may be evicted while it waits on the host; a row that comes back finds every byte all the same."""
    plan, restored, behind_hits = PLANS[plan_name], 0, 0
    for seed, (strategy, overlap) in enumerate(STRATEGIES):
        storage = shared_storage(plan, arena_bytes(plan, strategy, overlap), strategy, overlap=overlap)
        world = SharingWorld(storage, seed, retracts=True)
        world.run(100)
        assert not world.refused_steps
        restored += storage.statistics().backups.restored_requests
        behind_hits += world.restored_behind_hits
    assert restored > 20
    assert behind_hits


@pytest.mark.requirement("K5", "K8", "L4")
@pytest.mark.parametrize("plan_name", ["full and a window", "full, two windows, state", "a window and state"])
def test_what_is_sent_is_not_counted_on_while_it_is(plan_name: str) -> None:
    """A send goes on behind its request's end. What it reads would not come free, so it is neither offered nor evicted.

    `launch` looks at refused steps: nothing was evicted for them. Admission never fails, which it would if a promised slot were refused.
    """
    plan, pinned = PLANS[plan_name], 0
    for seed in range(6):
        strategy, overlap = STRATEGIES[seed % 4]
        storage = shared_storage(
            plan,
            arena_bytes(plan, strategy, overlap, requests=1),
            strategy,
            overlap=overlap,
            eviction_policy=CostAware() if seed % 2 else LeastRecentlyUsed(),
        )
        world = SharingWorld(storage, seed, sends=True)
        world.run(60)
        pinned += world.pinned
        statistics = storage.statistics().sharing
        assert statistics is not None
        assert statistics.evictable_units == statistics.held_units, "no use is left"
    assert pinned > 20
