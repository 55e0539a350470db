"""A stand-in for a model whose every token depends on every byte that it should read, and requests to serve with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import torch

from kvtide.arena import SCRATCH_BYTES, KVArena, TensorDevice
from kvtide.engine.batch import ForwardBatch, ForwardInputs
from kvtide.engine.forwards import ForwardQueue, ModelledForwards, TorchForwards
from kvtide.engine.loop import ServeResult, StepReport
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.engine.overlap import serve_overlapped
from kvtide.engine.requests import Request
from kvtide.engine.runner import Hook
from kvtide.engine.stores import ForwardStore
from kvtide.engine.workload import OVERLAP
from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MHAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    plan_kv_storage,
)
from kvtide.sizing import ServingPolicy
from kvtide.storage import KVStorage, Overcommit, build_kv_storage

VOCABULARY = 97
WINDOW = 5


class Summing:
    """Stands for a model: the next token follows from all tokens before, from those in a window, and from a state.

    A wrong byte in any band, a wrong position or a wrong input changes it.
    """

    hook = Hook.CACHE

    def __init__(self) -> None:
        self.inputs: list[ForwardInputs] = []

    def run(
        self, batch: ForwardBatch, store: ForwardStore, inputs: ForwardInputs | None = None
    ) -> torch.Tensor:
        assert inputs is not None
        self.inputs.append(inputs)
        rows = len(inputs.token_ids)
        entries = inputs.token_ids.reshape(-1, 1, 1).float()
        sums = torch.zeros(rows)
        for layer, window in ((0, WINDOW), (1, None)):
            store.write_tokens(layer, {"key": entries, "value": entries + layer})
            last = inputs.positions[:, -1:]
            positions = last - torch.arange(int(last.max()) + 1)
            if window is not None:
                positions = torch.where(positions > last - window, positions, -1)
            read = store.read_tokens(layer, positions.clamp(min=-1))
            sums += (read["key"] + 2 * read["value"]).sum(dim=(1, 2, 3))
        before = torch.zeros(rows) if not batch.has_previous_state else store.load_state(2)["s"][:, 0]
        state = before + inputs.token_ids.float().sum(dim=1)
        store.store_state(2, {"s": state[:, None].repeat(1, 4)})
        tokens = (sums + 3 * state + inputs.positions[:, -1]).long() % VOCABULARY
        return torch.nn.functional.one_hot(tokens, VOCABULARY).float()


class WithHostInputs(Summing):
    """The same under the plain loop, which knows every input when it launches."""

    def run(
        self, batch: ForwardBatch, store: ForwardStore, inputs: ForwardInputs | None = None
    ) -> torch.Tensor:
        positions = torch.tensor(batch.tokens_before)[:, None] + torch.arange(batch.query_tokens)
        return super().run(batch, store, ForwardInputs(torch.tensor(batch.token_ids), positions))


def tokens_of(request: Request) -> tuple[int, ...]:
    """What `Summing` is to give, from plain sums over a list."""
    sequence, output = list(request.prompt), []
    while not (output and request.is_complete(output)):
        window = sequence[-WINDOW:]
        total = 3 * sum(window) + 3 * sum(sequence) + 2 * len(sequence)
        output.append((total + 3 * sum(sequence) + len(sequence) - 1) % VOCABULARY)
        sequence.append(output[-1])
    return tuple(output)


def storage_of(
    arena_bytes: int = 20_000,
    *,
    policy: ServingPolicy = OVERLAP,
    seed: int | None = None,
    make_device: Callable[[KVArena], TensorDevice] | None = None,
    rows: int = 4,
    overcommit: Overcommit | None = None,
) -> KVStorage:
    geometry = MHAGeometry(1, 1, 1, DType.FLOAT32)
    state = StateGeometry((TensorDecl("s", (4,), DType.FLOAT32),))
    layers = (
        KVLayerDecl(0, (KVPart(geometry, WindowLifetime(WINDOW)),)),
        KVLayerDecl(1, (KVPart(geometry, FullLifetime()),)),
        KVLayerDecl(2, (KVPart(state, StateLifetime()),)),
    )
    more: dict[str, Any] = {}
    if make_device is not None:
        more["make_device"] = make_device
    elif seed is not None:
        more["make_device"] = lambda arena: ModelledTensorDevice(arena, seed=seed)
    return build_kv_storage(
        plan_kv_storage(layers, page_tokens=2),
        budget_bytes=SCRATCH_BYTES + arena_bytes,
        max_running_requests=rows,
        max_context_tokens=100,
        chunk_tokens=8,
        policy=policy,
        overcommit=overcommit,
        **more,
    )


def request(name: str, prompt_tokens: int, output_tokens: int, **more: Any) -> Request:
    prompt = tuple((7 * place + len(name)) % VOCABULARY for place in range(prompt_tokens))
    return Request(request_id=name, prompt=prompt, output_tokens=output_tokens, **more)


def run(
    storage: KVStorage,
    requests: list[Request],
    *,
    queue: ForwardQueue | None = None,
    reports: list[StepReport] | None = None,
    model: Summing | None = None,
) -> ServeResult:
    if queue is None:
        is_modelled = isinstance(storage.device, ModelledTensorDevice)
        queue = ModelledForwards(storage) if is_modelled else TorchForwards(storage.device)
    observe = None if reports is None else reports.append
    return serve_overlapped(
        model or Summing(),  # type: ignore[arg-type]  # a stand-in
        storage,
        queue,
        requests,
        chunk_tokens=8,
        observe=observe,
    )


def drawn_requests(numbers: random.Random) -> list[Request]:
    """A dozen, some of which stop early or are cancelled."""
    drawn = []
    for place in range(12):
        one = request("r" * (place + 1), numbers.randint(1, 30), numbers.randint(1, 14))
        one = attrs.evolve(one, arrival_step=numbers.randint(0, 20))
        tokens = tokens_of(one)
        if numbers.random() < 0.4:
            at = numbers.randrange(len(tokens))
            one = attrs.evolve(one, stops=(tokens[at : at + numbers.randint(1, 2)],))
        elif numbers.random() < 0.2:
            one = attrs.evolve(one, cancelled_step=one.arrival_step + numbers.randint(0, 12))
        drawn.append(one)
    return drawn
