"""Models, storages and runs shared by the engine's tests."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
import structlog
import torch

from kvtide.arena import CPUDevice, KVArena
from kvtide.engine.check import generate_alone
from kvtide.engine.loop import ServeResult, StepReport, serve
from kvtide.engine.models import MODELS
from kvtide.engine.requests import Request
from kvtide.engine.runner import Hook, ModelRunner
from kvtide.engine.workload import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    PLAIN,
    RUNNING_REQUESTS,
    random_requests,
    text_requests,
    tight_budget_bytes,
)
from kvtide.plan import plan_kv_storage
from kvtide.sizing import ChunkReads, ServingPolicy
from kvtide.storage import KVStorage, build_kv_storage

MakeDevice = Callable[[KVArena], CPUDevice]
Meddle = Callable[[KVStorage, StepReport], None]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that run in this process say what is logged; other tests look at what is."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models run many times slower on two threads; and workers share the cores already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def poison(storage: KVStorage) -> None:
    """Fill every byte outside live pages and live state slots with 0xFF, a NaN in every float type.

    Sinks too, where chunks are read in activations: page attention, which loads them with weight zero, does not run there.
    """
    arena = storage.device.arena.bytes
    owned = torch.zeros(arena.numel(), dtype=torch.bool)
    owned[: storage.layout.prefix_bytes] = storage.sized.policy.chunk_reads is ChunkReads.PAGES
    for band in storage.layout.bands:
        starts = band.origin_bytes + torch.from_numpy(storage.chain.live_units(band.name)) * band.unit_bytes
        owned[(starts[:, None] + torch.arange(band.unit_bytes)).flatten()] = True
    arena[~owned] = 0xFF


@attrs.frozen(eq=False)
class Served:
    """A run over a tight arena, and what it ran with."""

    runner: ModelRunner
    storage: KVStorage
    requests: tuple[Request, ...]
    result: ServeResult

    @property
    def page_tokens(self) -> int:
        return self.storage.plan.page_tokens


@functools.cache
def runner_of(name: str, hook: Hook) -> ModelRunner:
    if hook is not Hook.CACHE:
        return ModelRunner(runner_of(name, Hook.CACHE).model, hook)
    return ModelRunner(MODELS[name].load(), hook)


def requests_of(name: str) -> tuple[Request, ...]:
    return (
        text_requests()
        if MODELS[name].is_text
        else random_requests(runner_of(name, Hook.CACHE).model.config.vocab_size)
    )


@functools.cache
def tokens_alone(name: str, request: Request) -> tuple[int, ...]:
    return generate_alone(runner_of(name, Hook.CACHE).model, request)


def serve_on_tight_arena(
    name: str,
    page_tokens: int,
    hook: Hook,
    *,
    requests: tuple[Request, ...] | None = None,
    make_device: MakeDevice = CPUDevice,
    meddle: Meddle | None = None,
    policy: ServingPolicy = PLAIN,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Served:
    """Serve the workload, every free byte a NaN from the start and after each step; `meddle` may then break something."""
    runner = runner_of(name, hook)
    plan = plan_kv_storage(runner.layers, page_tokens=page_tokens)
    every_request = requests_of(name)
    storage = build_kv_storage(
        plan,
        budget_bytes=tight_budget_bytes(plan, every_request, policy, chunk_tokens=chunk_tokens),
        max_running_requests=RUNNING_REQUESTS,
        max_context_tokens=CONTEXT_TOKENS,
        chunk_tokens=chunk_tokens,
        make_device=make_device,
        writes_whole_pages=True,
        policy=policy,
    )
    storage.device.arena.bytes[: storage.layout.prefix_bytes] = 0
    poison(storage)

    def observe(report: StepReport) -> None:
        poison(storage)
        if meddle is not None:
            meddle(storage, report)

    chosen = every_request if requests is None else requests
    result = serve(runner, storage, chosen, chunk_tokens=chunk_tokens, observe=observe)
    return Served(runner, storage, chosen, result)


@pytest.fixture(name="serve_on_tight_arena")
def serve_on_tight_arena_fixture() -> Callable[..., Served]:
    return serve_on_tight_arena


@pytest.fixture(name="runner_of")
def runner_of_fixture() -> Callable[[str, Hook], ModelRunner]:
    return runner_of


@pytest.fixture(name="requests_of")
def requests_of_fixture() -> Callable[[str], tuple[Request, ...]]:
    return requests_of


@pytest.fixture(name="tokens_alone")
def tokens_alone_fixture() -> Callable[[str, Request], tuple[int, ...]]:
    return tokens_alone


@pytest.fixture(name="numbers")
def seeded_numbers() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def loops_in_the_interpreter() -> None:
    """Programs whose loops have bounds that they compute run in Triton's interpreter."""
    # Imported here, from a folder of programs: what rehearses them for a GPU needs the same.
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
    from interpreter_loops import let_interpreter_loop  # noqa: PLC0415

    sys.path.pop(0)
    let_interpreter_loop()
