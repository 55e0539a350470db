"""Both loops over a storage that overcommits: who is retracted gets the tokens that it would have got anyway (K5)."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import attrs
import pytest
from structlog.testing import capture_logs

from kvtide.arena import CPUDevice, HostMemory
from kvtide.engine.loop import ServeResult, serve
from kvtide.engine.requests import Request
from kvtide.engine.workload import OVERLAP, PLAIN
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


def computed_tokens(result: ServeResult) -> Counter[str]:
    """Tokens that forwards have computed, by request."""
    counts: Counter[str] = Counter()
    for forward in result.forwards:
        counts.update(dict(zip(forward.batch.request_ids, forward.batch.counts, strict=True)))
    return counts


@pytest.mark.requirement("K5", "K2", "H1", "H2", "X5")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("overlaps", [False, True])
def test_retracted_requests_get_their_tokens_and_nothing_is_computed_twice(overlaps: bool, seed: int) -> None:
    """Its row, and its pages, may be others' while its last forward runs and its memory is copied to the host; what that forward chooses
    is its token all the same. It comes back and goes on.
    """
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
    statistics = storage.statistics()
    assert 0 < statistics.admission.retracted_requests <= len(requests)
    assert 0 < statistics.backups.restored_requests <= statistics.backups.backed_up_requests
    computed = computed_tokens(result)
    for one in requests:
        if one.request_id in result.tokens:
            assert computed[one.request_id] == len(one.prompt) + one.output_tokens - 1


class ShortOfHostMemory(CPUDevice):
    """Its host has memory for every `each`-th backup only."""

    each = 1000
    asked = 0

    def allocate_host(self, byte_count: int) -> HostMemory:
        self.asked += 1
        if self.asked % self.each:
            raise RuntimeError("CUDA error: out of memory")
        return super().allocate_host(byte_count)


class NowAndThen(ShortOfHostMemory):
    each = 2


@pytest.mark.requirement("K5", "K2", "H1")
@pytest.mark.parametrize("device", [ShortOfHostMemory, NowAndThen])
@pytest.mark.parametrize("overlaps", [False, True])
def test_requests_for_which_the_host_has_no_memory_compute_what_they_had_again(
    overlaps: bool, device: type[ShortOfHostMemory]
) -> None:
    """A backup spares that; want of one must end neither the run nor the request."""
    requests = [request("r" * place, 3, 24) for place in range(1, 9)]
    storage = storage_of(
        3_400, policy=OVERLAP if overlaps else PLAIN, rows=6, overcommit=A_FIFTH, make_device=device
    )
    with capture_logs() as logs:
        result = run(storage, requests) if overlaps else run_plain(storage, requests)
    check(result, requests)
    storage.verify_idle()
    statistics = storage.statistics()
    without = [entry["request"] for entry in logs if entry["event"] == "engine.no_backup"]
    assert without
    assert statistics.admission.retracted_requests == statistics.backups.backed_up_requests + len(without)
    assert bool(statistics.backups.restored_requests) == (device is NowAndThen)
    computed = computed_tokens(result)
    again = {
        one.request_id
        for one in requests
        if computed[one.request_id] > len(one.prompt) + one.output_tokens - 1
    }
    assert again == set(without)


@pytest.mark.requirement("K5", "K2")
def test_a_request_that_ends_with_the_forward_under_which_it_was_retracted_needs_no_memory_again() -> None:
    """Its last token comes while it waits on the host: it is over, whoever waits in front of it."""
    ended = 0
    for seed in (*range(20, 26), *range(6)):
        numbers = random.Random(seed)
        requests = [request("r" * place, 3, 24) for place in range(1, 7)]
        requests = [
            attrs.evolve(one, stops=(tokens_of(one)[at : at + 1],))
            for one, at in zip(requests, (numbers.randint(2, 14) for _ in requests), strict=True)
        ]
        storage = storage_of(3_400, seed=seed, rows=6, overcommit=A_FIFTH)
        check(run(storage, requests), requests)
        storage.verify_idle()
        backups = storage.statistics().backups
        ended += backups.backed_up_requests - backups.restored_requests
    assert ended > 0


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
