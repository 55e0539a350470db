"""Both loops over a storage that overcommits: who is retracted gets the tokens that it would have got anyway (K5)."""

from __future__ import annotations

import itertools
import random

import attrs
import pytest

from kvtide.engine.loop import Request, ServeResult, serve
from kvtide.engine.workload import PLAIN
from kvtide.storage import KVStorage, Overcommit

from .test_overlap import WithHostInputs, request, run, storage_of, tokens_of

A_FIFTH = Overcommit(0.2)


def run_plain(storage: KVStorage, requests: list[Request]) -> ServeResult:
    return serve(WithHostInputs(), storage, requests, chunk_tokens=8)  # type: ignore[arg-type]  # a stand-in


def check(result: ServeResult, requests: list[Request]) -> None:
    """Every request has its tokens; of one whose client went away those that were there."""
    for one in requests:
        name, expected = one.request_id, tokens_of(one)
        if name in result.cancelled:
            assert result.cancelled[name] == expected[: len(result.cancelled[name])]
        else:
            assert result.tokens[name] == expected, name
    assert len(result.tokens) + len(result.cancelled) == len(requests)


@pytest.mark.requirement("K5", "K2")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("overlaps", [False, True])
def test_retracted_requests_get_their_tokens(overlaps: bool, seed: int) -> None:
    """Its memory is gone, its row may be another's while its last forward runs; what it had is recomputed, and goes on from there."""
    numbers = random.Random(seed)
    requests = [
        request(
            "r" * place, numbers.randint(1, 10), numbers.randint(15, 40), arrival_step=numbers.randint(0, 9)
        )
        for place in range(1, 11)
    ]
    requests[4] = attrs.evolve(requests[4], cancelled_step=numbers.randint(20, 40))
    storage = (
        storage_of(3_400, seed=seed, rows=6, overcommit=A_FIFTH)
        if overlaps
        else storage_of(3_400, policy=PLAIN, rows=6, overcommit=A_FIFTH)
    )
    result = run(storage, requests) if overlaps else run_plain(storage, requests)
    check(result, requests)
    storage.verify_idle()
    assert 0 < storage.statistics().admission.retracted_requests <= len(requests)


@pytest.mark.requirement("K5")
def test_a_client_that_leaves_while_its_request_is_retracted_gets_what_was_there() -> None:
    """Cancelled in the queue, it has no row; its tokens are still its own."""
    requests = [request("a", 2, 30), request("bb", 2, 30), request("ccc", 2, 30)]
    gone_at = {}
    for step in range(4, 60):
        storage = storage_of(2_400, policy=PLAIN, overcommit=A_FIFTH)
        last = attrs.evolve(requests[2], cancelled_step=step)
        result = run_plain(storage, [*requests[:2], last])
        check(result, [*requests[:2], last])
        storage.verify_idle()
        if "ccc" in result.cancelled:
            gone_at[step] = len(result.cancelled["ccc"])
    assert storage.statistics().admission.retracted_requests
    counts = list(gone_at.values())
    assert any(before == after > 0 for before, after in itertools.pairwise(counts)), "it waited"


@pytest.mark.requirement("K5")
def test_more_run_at_once_than_a_guarantee_would_admit() -> None:
    """What overcommit is for: short answers under long limits."""
    requests = [
        attrs.evolve(one, stops=(tokens_of(one)[2:3],))
        for one in (request("r" * place, 4, 40) for place in range(1, 9))
    ]
    steps = {}
    for overcommit in (None, A_FIFTH):
        storage = storage_of(3_400, policy=PLAIN, rows=8, overcommit=overcommit)
        result = run_plain(storage, requests)
        check(result, requests)
        steps[overcommit] = result.step_count
    assert steps[A_FIFTH] < steps[None]
