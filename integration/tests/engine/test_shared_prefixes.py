"""Real models that share prefixes: output equal to that of the same models without any arena, bit for bit, under every strategy.

The arena holds about three requests, so prefixes are evicted, under running forwards, for others to be admitted. With overlap forwards run
in pieces on the modelled device, and what nothing orders is reported.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import pytest

from kvtide.arena import CPUDevice, KVArena, TensorDevice
from kvtide.chain import ChainAllocator
from kvtide.engine.check import expected_tokens, first_token_difference, replay_on_plain_tensors
from kvtide.engine.declare import with_checkpoints
from kvtide.engine.forwards import ModelledForwards
from kvtide.engine.loop import ServeResult, serve
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.engine.models import RANDOM_VOCABULARY
from kvtide.engine.overlap import serve_overlapped
from kvtide.engine.requests import Request
from kvtide.engine.runner import Hook, ModelRunner
from kvtide.engine.workload import CHUNK_TOKENS, CONTEXT_TOKENS, RUNNING_REQUESTS, tight_budget_bytes
from kvtide.ledger import CheckLevel
from kvtide.plan import plan_kv_storage
from kvtide.sizing import CheckpointStrategy, ChunkReads, ServingPolicy
from kvtide.storage import CostAware, KVStorage, LeastRecentlyUsed, Overcommit, build_kv_storage

Alone = Callable[..., tuple[int, ...]]
RunnerOf = Callable[[str, Hook], ModelRunner]

STRATEGIES = {
    "no_buffer": ServingPolicy(strategy=CheckpointStrategy.NO_BUFFER),
    "extra_buffer": ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER),
    "extra_buffer, overlap": ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER, overlap=True),
    "extra_buffer_lazy, overlap": ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER_LAZY, overlap=True),
    "no_buffer, activations": ServingPolicy(
        strategy=CheckpointStrategy.NO_BUFFER, chunk_reads=ChunkReads.ACTIVATIONS
    ),
    "extra_buffer_lazy, overlap, activations": ServingPolicy(
        strategy=CheckpointStrategy.EXTRA_BUFFER_LAZY, overlap=True, chunk_reads=ChunkReads.ACTIVATIONS
    ),
}
IN_PAGES = tuple(name for name, policy in STRATEGIES.items() if policy.chunk_reads is ChunkReads.PAGES)
LONG_CHUNK_TOKENS = 3 * CHUNK_TOKENS
"""More than a window, so that the tail of a chunk that is read in activations is less than the chunk."""


def conversations() -> tuple[Request, ...]:
    """Turns that begin as others do: in the same words, in those of another salt, in those of another's output."""
    numbers = np.random.default_rng(5)
    system = numbers.integers(3, RANDOM_VOCABULARY, 50).tolist()
    requests = []
    for place in range(12):
        shared = (50, 40, 50, 17, 50, 32, 0)[place % 7]
        own = numbers.integers(3, RANDOM_VOCABULARY, (11, 30, 3, 25)[place % 4]).tolist()
        requests.append(
            Request(
                request_id=f"turn {place}",
                prompt=tuple(system[:shared] + own),
                output_tokens=(9, 24, 14)[place % 3],
                arrival_step=4 * place,
                extra_key="another tenant" if place in (4, 9) else None,
            )
        )
    return tuple(requests)


def run(
    runner: ModelRunner,
    page_tokens: int,
    policy: ServingPolicy,
    requests: tuple[Request, ...],
    *,
    eviction: type[CostAware | LeastRecentlyUsed] = LeastRecentlyUsed,
    overcommit: Overcommit | None = None,
) -> tuple[KVStorage, ServeResult]:
    plan = plan_kv_storage(with_checkpoints(runner.layers, CHUNK_TOKENS), page_tokens=page_tokens)
    chunk_tokens = LONG_CHUNK_TOKENS if policy.chunk_reads is ChunkReads.ACTIVATIONS else CHUNK_TOKENS

    def make_device(arena: KVArena) -> TensorDevice:
        return ModelledTensorDevice(arena, seed=3) if policy.overlap else CPUDevice(arena)

    storage = build_kv_storage(
        plan,
        budget_bytes=tight_budget_bytes(plan, requests, policy, chunk_tokens=chunk_tokens),
        max_running_requests=RUNNING_REQUESTS,
        max_context_tokens=CONTEXT_TOKENS,
        chunk_tokens=chunk_tokens,
        make_device=make_device,
        writes_whole_pages=True,
        policy=policy,
        check_level=CheckLevel.STRICT,
        eviction_policy=eviction(),
        overcommit=overcommit,
    )
    if not policy.overlap:
        return storage, serve(runner, storage, requests, chunk_tokens=chunk_tokens)
    forwards = ModelledForwards(storage)
    result = serve_overlapped(runner, storage, forwards, requests, chunk_tokens=chunk_tokens)
    return storage, result


@pytest.mark.requirement("X5", "K8")
@pytest.mark.parametrize(
    ("name", "page_tokens", "hook", "strategy", "eviction"),
    [
        pytest.param(
            name,
            page_tokens,
            hook,
            strategy,
            eviction,
            id=f"{name}-{page_tokens}-{hook.name.lower()}-{strategy}-{eviction.__name__}",
        )
        for name, page_tokens, hook, eviction, strategies in (
            ("llama", 16, Hook.CACHE, LeastRecentlyUsed, ("extra_buffer, overlap",)),
            ("gpt_oss", 1, Hook.CACHE, CostAware, ("no_buffer", "extra_buffer, overlap")),
            ("gpt_oss", 16, Hook.PAGES, LeastRecentlyUsed, ("extra_buffer", "extra_buffer_lazy, overlap")),
            ("falcon_h1", 16, Hook.CACHE, LeastRecentlyUsed, IN_PAGES),
            ("falcon_h1", 16, Hook.CACHE, CostAware, ("extra_buffer_lazy, overlap",)),
            ("granitemoehybrid", 1, Hook.CACHE, CostAware, ("no_buffer", "extra_buffer_lazy, overlap")),
            ("deepseek_v3", 16, Hook.CACHE, LeastRecentlyUsed, ("no_buffer",)),
            ("gpt_oss", 1, Hook.CACHE, LeastRecentlyUsed, ("extra_buffer_lazy, overlap, activations",)),
            ("llama4", 4, Hook.CACHE, LeastRecentlyUsed, ("no_buffer, activations",)),
        )
        for strategy in strategies
    ],
)
def test_what_is_served_from_shared_prefixes_equals_plain_tensors_and_generate(  # noqa: PLR0917  (parametrized)
    runner_of: RunnerOf,
    tokens_alone: Alone,
    name: str,
    page_tokens: int,
    hook: Hook,
    strategy: str,
    eviction: type[CostAware | LeastRecentlyUsed],
) -> None:
    """A hit that restores one wrong byte changes a logit; one of another prompt, salt or length changes tokens."""
    requests, policy = conversations(), STRATEGIES[strategy]
    runner = runner_of(name, hook)
    storage, result = run(runner, page_tokens, policy, requests, eviction=eviction)
    assert len(result.tokens) == len(requests)
    sharing = storage.statistics().sharing
    assert sharing is not None
    assert replay_on_plain_tensors(runner, result.forwards, page_tokens=page_tokens) is None
    for request in requests:
        alone = expected_tokens(request, tokens_alone(name, request))
        assert first_token_difference(request.request_id, result.tokens[request.request_id], alone) is None
    storage.verify_idle()
    assert sharing.hit_tokens > 0
    assert sum(sharing.evicted_units.values()) > 0
    assert not any(sharing.stalled_checkpoints.values())


@pytest.mark.requirement("X5", "K2", "K5", "K8", "H1", "H2")
@pytest.mark.parametrize(
    ("name", "page_tokens", "hook", "strategy"),
    [
        ("gpt_oss", 16, Hook.PAGES, "extra_buffer_lazy, overlap"),
        ("gpt_oss", 1, Hook.CACHE, "no_buffer"),
        ("falcon_h1", 16, Hook.CACHE, "extra_buffer, overlap"),
        ("granitemoehybrid", 1, Hook.CACHE, "no_buffer"),
    ],
)
def test_rows_that_share_are_restored_with_what_they_shared(  # noqa: PLR0917  (parametrized)
    runner_of: RunnerOf, tokens_alone: Alone, name: str, page_tokens: int, hook: Hook, strategy: str
) -> None:
    """Pages of the tree, hits among them, are copied with the row's own; it comes back without the tree, which may have let go of them."""
    requests = tuple(
        attrs.evolve(request, arrival_step=place, output_tokens=30)
        for place, request in enumerate(conversations())
    )
    policy, runner = STRATEGIES[strategy], runner_of(name, hook)
    storage, result = run(runner, page_tokens, policy, requests, overcommit=Overcommit(0.05))
    assert replay_on_plain_tensors(runner, result.forwards, page_tokens=page_tokens) is None
    for request in requests:
        alone = expected_tokens(request, tokens_alone(name, request))
        assert first_token_difference(request.request_id, result.tokens[request.request_id], alone) is None
    storage.verify_idle()
    statistics = storage.statistics()
    assert statistics.backups.restored_requests > 0
    assert statistics.sharing is not None
    assert statistics.sharing.hit_tokens > 0


@pytest.mark.requirement("X5")
def test_a_hit_on_a_wrong_byte_is_seen(runner_of: RunnerOf) -> None:
    """The comparison must be able to fail: a checkpoint that lost its last bits is gone on from."""
    requests = conversations()
    policy, runner = STRATEGIES["extra_buffer"], runner_of("falcon_h1", Hook.CACHE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainAllocator, "copy_state_slots", lambda *_: None)
        _, result = run(runner, 16, policy, requests)
    assert replay_on_plain_tensors(runner, result.forwards, page_tokens=16) is not None
