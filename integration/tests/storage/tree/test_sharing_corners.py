"""Storages that share prefixes, where random lives seldom come: small budgets, tokens told in part, what a running row keeps for others."""

from __future__ import annotations

import pytest

from kvtide.plan import FullLifetime, WindowLifetime
from kvtide.sizing import CheckpointStrategy, ServingPolicy
from kvtide.storage import AdmissionRefusal

from .served import plan_of
from .sharing import shared_storage
from .test_checkpoints import GRID, STATEFUL, admitted, advanced, recorded


@pytest.mark.requirement("K7", "K8")
def test_a_budget_below_the_grid_has_no_chunk_but_a_prompts_last() -> None:
    """Alike for rows that share and others; what `chunk_tokens` answers, `prepare_step` takes."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    sharing, plain = admitted(storage, list(range(6)), 1), storage.admit([6], [1])
    assert not isinstance(plain, AdmissionRefusal), str(plain)
    for row in (sharing, int(plain[0])):
        assert [storage.next_chunk_tokens(row, most) for most in range(GRID + 1)] == [0] * GRID + [GRID]
        advanced(storage, recorded(storage, row, GRID))
        assert [storage.next_chunk_tokens(row, most) for most in (0, 1, 2)] == [0, 0, 2]
        advanced(storage, recorded(storage, row, 2), 50)
        storage.release([row])
    storage.verify_idle()


@pytest.mark.requirement("K8")
def test_a_token_that_was_not_told_is_taken_for_none_though_later_ones_are_told() -> None:
    """Pages are known as far as every token is; what lies behind a gap would be named as what it does not hold."""
    storage = shared_storage(plan_of(FullLifetime()), 1 << 12, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    row = admitted(storage, [1, 2], 6)
    for count, chosen in ((2, -1), (1, 7), (1, 8), (1, 9)):
        advanced(storage, recorded(storage, row, count), chosen)
    storage.release([row])
    # Whatever an untold token is kept as, it was none of these.
    for untold in (0, -1, 7):
        row = admitted(storage, [1, 2, untold, 7, 8, 9], 1)
        assert storage.requests.cached_tokens[row] == 2
        storage.release([row])
    storage.verify_idle()


@pytest.mark.requirement("K8", "S5")
def test_while_a_row_runs_its_latest_point_of_the_grid_can_be_hit_whatever_is_evicted() -> None:
    """That is what a sharing row pays its retention floor for: the window's tail there stays locked though no token of the row reads it."""
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER, checkpoint_interval=GRID)
    plan = plan_of(FullLifetime(), WindowLifetime(5))
    storage = shared_storage(plan, 1 << 14, policy.strategy, overlap=False, policy=policy)
    tokens, hits = list(range(20)), []
    row = admitted(storage, tokens[:8], 12)
    assert storage._sharing is not None
    for length in range(8, 19):
        advanced(storage, recorded(storage, row, 8 if length == 8 else 1), tokens[length])
        evictable = storage._sharing.evictable_units()
        storage._sharing.evict_until(
            lambda freed, asked=evictable: all(freed[name] >= count for name, count in asked.items())  # type: ignore[misc]
        )
        other = admitted(storage, [*tokens[:length], 99], 1)
        hits.append(int(storage.requests.cached_tokens[other]))
        storage.release([other])
    assert hits == [length // GRID * GRID for length in range(8, 19)]
    storage.release([row])
    storage.verify_idle()


@pytest.mark.requirement("K8")
def test_the_statistics_say_which_band_a_hit_was_lost_to() -> None:
    """Hit tokens by sub-pool: of six known tokens the pages are there; the window's tail, as the only checkpoint, lies at eight."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    first = admitted(storage, list(range(10)), 1)
    advanced(storage, recorded(storage, first, 8))
    second = admitted(storage, [*range(7), 99, 99], 1)
    third = admitted(storage, [*range(8), 99], 1)
    sharing = storage.statistics().sharing
    assert sharing is not None
    assert (sharing.matched_tokens, sharing.hit_tokens) == (6 + 8, 0 + 8)
    assert sharing.restorable_tokens == {"full": 6 + 8, "window-5": 0 + 8, "state": 0 + 8}
    storage.release([first, second, third])
    storage.verify_idle()
