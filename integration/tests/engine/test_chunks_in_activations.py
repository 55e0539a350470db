"""Real models whose chunks are read in activations: windows hold tails only, and the output is what it is with pages.

The workload is that of the neighbours, in chunks of three windows: most of a chunk is in no window page, and its writes go to the sink,
which is filled with NaN after each step as every free byte is. The oracles are theirs too: the same batches over plain tensors, which
know of no rule and read everything back, bit for bit, and `generate()` alone. The last tests read pages all the same, and must go wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
from transformers import MistralConfig

from kvtide.arena import SCRATCH_BYTES, CPUDevice, KVArena, TensorDevice
from kvtide.engine.check import (
    expected_tokens,
    first_token_difference,
    generate_alone,
    replay_on_plain_tensors,
)
from kvtide.engine.errors import EngineError
from kvtide.engine.forwards import ModelledForwards
from kvtide.engine.loop import ServeResult, StepObserver, StepReport, serve
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.engine.models import RANDOM_VOCABULARY, random_model
from kvtide.engine.overlap import serve_overlapped
from kvtide.engine.requests import Request
from kvtide.engine.runner import Hook, ModelRunner
from kvtide.engine.stores import ArenaForward, ArenaStore
from kvtide.engine.workload import CONTEXT_TOKENS, OVERLAP, PLAIN
from kvtide.plan import plan_kv_storage
from kvtide.sizing import ChunkReads, ServingPolicy
from kvtide.storage import KVStorage, Overcommit, build_kv_storage

from .overlapped import SEEDS, check, serve_overlapped_on_tight_arena, with_early_ends

CHUNK_TOKENS = 48
"""Three windows; of Llama 4 one attention chunk and a half."""

WINDOWED: Mapping[str, str] = {"gemma3": "window-16", "gpt_oss": "window-16", "llama4": "chunk-32"}
"""The models whose tails are less than their chunks, and the band that holds them."""

EVERY_WAY = [
    pytest.param(name, seed, id=f"{name}-{seed}")
    for place, name in enumerate(WINDOWED)
    for seed in range(place, place + SEEDS)
]

RunnerOf = Callable[[str, Hook], ModelRunner]
RequestsOf = Callable[[str], tuple[Request, ...]]
TokensAlone = Callable[[str, Request], tuple[int, ...]]


def in_activations(policy: ServingPolicy) -> ServingPolicy:
    return attrs.evolve(policy, chunk_reads=ChunkReads.ACTIVATIONS)


@pytest.mark.requirement("X5", "K7", "S5")
@pytest.mark.parametrize(("name", "seed"), EVERY_WAY)
def test_overlapped_output_equals_plain_tensors_and_generate(
    *, runner_of: RunnerOf, requests_of: RequestsOf, tokens_alone: TokensAlone, name: str, seed: int
) -> None:
    """A chunk's tail is bound while the chunk before it is in flight, and what it does not bind is read by nobody.

    Three long prompts and six short ones, with stops, cancelled requests, aborted launches and NaN in every free byte.
    """
    chosen = requests_of(name)[:9]
    alone = {request.request_id: tokens_alone(name, request) for request in chosen}
    run = serve_overlapped_on_tight_arena(
        runner_of(name, Hook.CACHE),
        with_early_ends(chosen, alone, seed),
        page_tokens=(1, 4, 16)[seed % 3],
        seed=seed,
        declares_read_end=seed % 2 == 0,
        aborted_share=0.1,
        policy=in_activations(OVERLAP),
        chunk_tokens=CHUNK_TOKENS,
    )
    check(run, alone)
    assert any(sum(ran.batch.counts) == CHUNK_TOKENS for ran in run.result.forwards)
    statistics = run.storage.statistics()
    assert statistics.aborted_launches > 0
    assert statistics.chain.moved_units > 0


@pytest.mark.requirement("X5", "K7")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_model_of_windows_alone_has_no_page_for_what_no_window_keeps(
    requests_of: RequestsOf, seed: int
) -> None:
    """No band binds the rest of a chunk, so it is not even minted: rows have the sink's id there, and share it."""
    model = random_model(
        MistralConfig(
            vocab_size=RANDOM_VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=16,
        )
    )
    requests = requests_of("llama4")[:5]
    run = serve_overlapped_on_tight_arena(
        ModelRunner(model),
        requests,
        page_tokens=(1, 4, 16)[seed % 3],
        seed=seed,
        policy=in_activations(OVERLAP),
        chunk_tokens=CHUNK_TOKENS,
    )
    assert [band.name for band in run.storage.layout.bands] == ["window-16"]
    check(run, {request.request_id: generate_alone(model, request) for request in requests})


@pytest.mark.requirement("X5", "K7", "H1", "H2")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_retracted_and_restored_equals_plain_tensors_and_generate(
    runner_of: RunnerOf, requests_of: RequestsOf, tokens_alone: TokensAlone, seed: int
) -> None:
    """A backup has the tails; the rest of a prompt that was written in part is bound to nothing when it comes back."""
    requests = tuple(attrs.evolve(request, arrival_step=0) for request in requests_of("llama4")[:7])
    run = serve_overlapped_on_tight_arena(
        runner_of("llama4", Hook.CACHE),
        requests,
        page_tokens=(4, 1, 16)[seed % 3],
        seed=seed,
        overcommit=Overcommit(0.05),
        policy=in_activations(OVERLAP),
        chunk_tokens=CHUNK_TOKENS,
    )
    check(run, {request.request_id: tokens_alone("llama4", request) for request in requests})
    assert run.storage.statistics().backups.restored_requests > 0


@pytest.mark.requirement("X5", "K7")
@pytest.mark.parametrize(
    ("name", "page_tokens"),
    [("gemma3", 16), ("gpt_oss", 4), ("llama4", 1), ("deepseek_v3", 16), ("falcon_h1", 1)],
)
def test_output_of_the_plain_loop_equals_plain_tensors_and_generate(
    serve_on_tight_arena: Callable[..., Any],
    requests_of: RequestsOf,
    tokens_alone: TokensAlone,
    name: str,
    page_tokens: int,
) -> None:
    """Those with windows, and two without: a latent's activations are its two parts, and a state is read and written as ever."""
    served = serve_on_tight_arena(
        name,
        page_tokens,
        Hook.CACHE,
        requests=requests_of(name)[2:5],
        policy=in_activations(PLAIN),
        chunk_tokens=CHUNK_TOKENS,
    )
    assert replay_on_plain_tensors(served.runner, served.result.forwards, page_tokens=page_tokens) is None
    assert differing(served.requests, served.result, name, tokens_alone) == set()
    served.storage.verify_idle()


# --- it is another rule -------------------------------------------------------------------------------------------


@pytest.mark.requirement("K7", "S5")
@pytest.mark.parametrize(
    ("name", "overlap", "in_pages", "tails"),
    [
        # 15 tokens are kept of a window of 16. With overlap a chunk and what was kept before it are held, or its tail.
        ("gemma3", True, 15 + 48, 15 + 15),
        ("gpt_oss", True, 15 + 48, 15 + 15),
        # Behind 48 tokens the 16 of the attention chunk that began at 32 are kept, behind 96 none.
        ("llama4", True, 16 + 48, 16),
        # Between the steps of the plain loop no chunk is in flight.
        ("gemma3", False, 15, 15),
    ],
)
def test_windows_hold_no_more_of_a_long_prompt_than_tails(  # noqa: PLR0917  (parametrized)
    runner_of: RunnerOf, requests_of: RequestsOf, name: str, overlap: bool, in_pages: int, tails: int
) -> None:
    """By hand, at the most that is seen after any step of a prompt's prefill, in pages of one token."""
    (request,) = requests_of(name)[:1]
    prompt_tokens = len(request.prompt) // CHUNK_TOKENS * CHUNK_TOKENS
    request = attrs.evolve(request, prompt=request.prompt[:prompt_tokens], output_tokens=1)
    most = {}
    for policy in (attrs.evolve(OVERLAP if overlap else PLAIN, chunk_reads=reads) for reads in ChunkReads):
        storage = storage_of(runner_of(name, Hook.CACHE), policy, page_tokens=1)
        seen: list[int] = []

        def observe(_: StepReport, storage: KVStorage = storage, seen: list[int] = seen) -> None:
            seen.append(storage.resident_now()[WINDOWED[name]])

        serve_on(runner_of(name, Hook.CACHE), storage, (request,), observe)
        assert len(seen) >= prompt_tokens // CHUNK_TOKENS > 3
        most[policy.chunk_reads] = max(seen)
    assert most == {ChunkReads.PAGES: in_pages, ChunkReads.ACTIVATIONS: tails}


@pytest.mark.requirement("K7")
@pytest.mark.parametrize("policy", [PLAIN, OVERLAP], ids=["plain", "overlap"])
def test_page_attention_is_refused_a_storage_that_binds_tails_only(
    runner_of: RunnerOf, requests_of: RequestsOf, policy: ServingPolicy
) -> None:
    runner = runner_of("gemma3", Hook.PAGES)
    with pytest.raises(
        EngineError,
        match=r"page attention reads a chunk's own tokens in pages, and the storage's policy says activations: windows would not",
    ):
        serve_on(runner, storage_of(runner, in_activations(policy)), requests_of("gemma3")[:1])


@pytest.mark.requirement("X5", "K7")
@pytest.mark.parametrize("hook", list(Hook))
@pytest.mark.parametrize("name", list(WINDOWED))
def test_who_reads_a_chunk_in_pages_where_tails_are_bound_gives_another_text(
    *,
    runner_of: RunnerOf,
    requests_of: RequestsOf,
    tokens_alone: TokensAlone,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    hook: Hook,
) -> None:
    """With nothing poisoned: what reads as zeros is missed. So the refusal is needed, and the comparison above can fail."""
    forward = ArenaStore.forward

    def reads_back(store: ArenaStore, ids: Any) -> ArenaForward:
        return attrs.evolve(forward(store, ids), chunk_reads=ChunkReads.PAGES)

    monkeypatch.setattr(Hook, "chunk_reads", frozenset(ChunkReads))
    monkeypatch.setattr(ArenaStore, "forward", reads_back)
    runner, requests = runner_of(name, hook), requests_of(name)[1:3]
    result = serve_on(runner, storage_of(runner, in_activations(PLAIN), page_tokens=4), requests)
    difference = replay_on_plain_tensors(runner, result.forwards, page_tokens=4)
    assert difference is not None
    assert difference.forward == 0
    assert differing(requests, result, name, tokens_alone)


def storage_of(runner: ModelRunner, policy: ServingPolicy, *, page_tokens: int = 16) -> KVStorage:
    """With room for three requests and more."""

    def make_device(arena: KVArena) -> TensorDevice:
        return ModelledTensorDevice(arena, seed=1) if policy.overlap else CPUDevice(arena)

    return build_kv_storage(
        plan_kv_storage(runner.layers, page_tokens=page_tokens),
        budget_bytes=SCRATCH_BYTES + (3 << 20),
        max_running_requests=3,
        max_context_tokens=CONTEXT_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        make_device=make_device,
        policy=policy,
    )


def serve_on(
    runner: ModelRunner,
    storage: KVStorage,
    requests: tuple[Request, ...],
    observe: StepObserver | None = None,
) -> ServeResult:
    """In the loop that the storage is for."""
    if not storage.sized.policy.overlap:
        return serve(runner, storage, requests, chunk_tokens=CHUNK_TOKENS, observe=observe)
    forwards = ModelledForwards(storage)
    return serve_overlapped(runner, storage, forwards, requests, chunk_tokens=CHUNK_TOKENS, observe=observe)


def differing(
    requests: tuple[Request, ...], result: ServeResult, name: str, tokens_alone: TokensAlone
) -> set[str]:
    """Requests whose tokens are not what `generate()` gives."""
    return {
        request.request_id
        for request in requests
        if first_token_difference(
            request.request_id,
            result.tokens[request.request_id],
            expected_tokens(request, tokens_alone(name, request)),
        )
    }
