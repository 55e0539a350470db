"""Storages that share prefixes, where random lives seldom come: small budgets, tokens told in part, what a running row keeps for others."""

from __future__ import annotations

import pytest

from kvtide.plan import FullLifetime
from kvtide.sizing import CheckpointStrategy
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
        assert [storage.chunk_tokens(row, most) for most in range(GRID + 1)] == [0] * GRID + [GRID]
        advanced(storage, recorded(storage, row, GRID))
        assert [storage.chunk_tokens(row, most) for most in (0, 1, 2)] == [0, 0, 2]
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
