"""Real models under real asynchrony: whatever the interleaving, their output is that of the models without kvtide (X5).

Forwards run late and in pieces on the modelled forward stream, while the schedule stream zeroes, moves and uploads for the next one
and fills free bytes with NaN. Each run is compared with the same batches over plain tensors, bit for bit, and with `generate()` for
each request alone. CI runs a slice of the seeds; `KVTIDE_OVERLAP_SEEDS` says how many, for nights.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from kvtide.engine.models import MODELS
from kvtide.engine.requests import Request
from kvtide.engine.runner import Hook, ModelRunner
from kvtide.storage import Overcommit

from .overlapped import SEEDS, check, serve_overlapped_on_tight_arena, with_early_ends

EVERY_WAY = [
    pytest.param(name, hook, seed, id=f"{name}-{hook.name.lower()}-{seed}")
    for place, (name, model) in enumerate(MODELS.items())
    for hook in model.hooks
    # One seed a model begins elsewhere in the next: page sizes, and read ends declared or not, are all in any slice.
    for seed in range(place % 6, place % 6 + SEEDS)
]

RunnerOf = Callable[[str, Hook], ModelRunner]
RequestsOf = Callable[[str], tuple[Request, ...]]
TokensAlone = Callable[[str, Request], tuple[int, ...]]


@pytest.mark.requirement("X5", "K1", "K2", "K4", "K13")
@pytest.mark.parametrize(("name", "hook", "seed"), EVERY_WAY)
def test_overlapped_output_equals_plain_tensors_and_generate(
    *,
    runner_of: RunnerOf,
    requests_of: RequestsOf,
    tokens_alone: TokensAlone,
    name: str,
    hook: Hook,
    seed: int,
) -> None:
    """Under pressure, with stops, cancelled requests, aborted launches and NaN in every free byte.

    The backend declares its read end with even seeds of page attention and odd ones of the other hook; page sizes take turns.
    """
    alone = {request.request_id: tokens_alone(name, request) for request in requests_of(name)}
    requests = with_early_ends(requests_of(name), alone, seed)
    run = serve_overlapped_on_tight_arena(
        runner_of(name, hook),
        requests,
        page_tokens=(16, 1, 4)[seed % 3],
        seed=seed,
        declares_read_end=(seed % 2 == 0) == (hook is Hook.PAGES),
        aborted_share=0.1,
    )
    check(run, alone)
    assert len(run.result.tokens) + len(run.result.cancelled) == len(requests)
    statistics = run.storage.statistics()
    assert statistics.aborted_launches > 0
    # A chain of one band takes bytes from nobody: all the others had to move pages.
    assert (statistics.chain.moved_units > 0) or len(statistics.chain.bands) == 1
    assert any(
        stop == run.result.tokens.get(request.request_id, ())[-2:]
        for request in requests
        for stop in request.stops
    )


RESTORED = [
    pytest.param(name, hook, seed, id=f"{name}-{hook.name.lower()}-{seed}")
    for place, (name, hook) in enumerate(
        (
            ("gemma3", Hook.CACHE),
            ("llama", Hook.PAGES),
            ("falcon_h1", Hook.CACHE),
            ("qwen3_next", Hook.PAGES),
            ("llama4", Hook.PAGES),
        )
    )
    for seed in range(place, place + SEEDS)
]
"""One of each kind of chain: with windows, full attention alone, a state in every layer, a state in most, attention chunks."""


@pytest.mark.requirement("X5", "K2", "K5", "H1", "H2")
@pytest.mark.parametrize(("name", "hook", "seed"), RESTORED)
def test_what_is_retracted_and_restored_equals_plain_tensors_and_generate(
    *,
    runner_of: RunnerOf,
    requests_of: RequestsOf,
    tokens_alone: TokensAlone,
    name: str,
    hook: Hook,
    seed: int,
) -> None:
    """Under overcommit, with NaN in every free byte: the replay, which knows of no retraction, goes on in the same tensors."""
    alone = {request.request_id: tokens_alone(name, request) for request in requests_of(name)}
    requests = tuple(attrs.evolve(request, arrival_step=0) for request in requests_of(name))
    run = serve_overlapped_on_tight_arena(
        runner_of(name, hook),
        requests,
        page_tokens=(1, 4, 16)[seed % 3],
        seed=seed,
        declares_read_end=seed % 2 == 0,
        overcommit=Overcommit(0.05),
    )
    check(run, alone)
    backups = run.storage.statistics().backups
    assert 0 < backups.restored_requests <= backups.backed_up_requests
    computed = sum(sum(forward.batch.counts) for forward in run.result.forwards)
    needed = sum(
        len(request.prompt) + len({**run.result.tokens, **run.result.cancelled}[request.request_id])
        for request in requests
    )
    assert computed <= needed + len(requests), "something was computed twice"
