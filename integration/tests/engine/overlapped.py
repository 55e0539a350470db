"""Runs of the overlap loop on the modelled device, in an arena whose free bytes turn to NaN."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import attrs
import numpy as np
import torch

from kvtide.device import RunningWork
from kvtide.engine.check import expected_tokens, first_token_difference, replay_on_plain_tensors
from kvtide.engine.forwards import ForwardQueue, LaunchedForward, ModelledForwards
from kvtide.engine.loop import ServeResult, StepReport
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.engine.overlap import serve_overlapped
from kvtide.engine.requests import Request
from kvtide.engine.runner import ModelRunner
from kvtide.engine.workload import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    OVERLAP,
    RUNNING_REQUESTS,
    tight_budget_bytes,
)
from kvtide.ledger import CheckLevel, Hazard
from kvtide.plan import plan_kv_storage
from kvtide.sizing import ChunkReads, ServingPolicy
from kvtide.storage import KVStorage, Overcommit, PreparedStep, SharedReadEnds, build_kv_storage

SEEDS = int(os.environ.get("KVTIDE_OVERLAP_SEEDS", "1"))
"""Interleavings of each model and hook."""


def poison_free_bytes(storage: KVStorage) -> None:
    """Queue work on the schedule stream that fills with NaN what is nobody's: no live unit, sink, and nothing still read.

    Sinks too, where chunks are read in activations: page attention, which loads them with weight zero, does not run there.
    The device reports it if a running forward, or a host copy, can touch one of those bytes after all.
    """
    device, layout = storage.device, storage.layout
    assert isinstance(device, ModelledTensorDevice)
    taken = np.zeros(layout.arena_bytes, np.bool_)
    taken[: layout.prefix_bytes] = storage.sized.policy.chunk_reads is ChunkReads.PAGES
    for band in layout.bands:
        books = storage.chain._bands[band.name]
        copied = [pages for _, pages in books.usage._uses.pages_by_signal()]
        for units in (
            books.live_pages(),
            books.pending.pages(),
            books.usage.vacated_pages(),
            *copied,
        ):
            starts = band.origin_bytes + units * band.unit_bytes
            taken[(starts[:, None] + np.arange(band.unit_bytes)).flatten()] = True
    for hazard in (Hazard.FORWARD, Hazard.COPY_READ, Hazard.COPY_WRITE):
        for first, end in zip(*storage.chain._fences.extents(hazard), strict=True):
            taken[first:end] = True
    edges = np.flatnonzero(np.diff(np.concatenate([[True], taken, [True]]).astype(np.int8)))
    spans = [
        device.model.arena_buffer.span(int(start), int(end))
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]

    def fill(work: RunningWork) -> None:
        for span in spans:
            work.write(span, 0xFF)

    device.model.submit(device.schedule_stream, "poison", writes=spans, run=fill)


@attrs.frozen(eq=False)
class AbortingQueue:
    """A queue on which some launches beside a running forward fail for want of memory, once their metadata phase is queued."""

    queue: ForwardQueue
    storage: KVStorage
    device: ModelledTensorDevice
    numbers: random.Random
    share: float

    def launch(self, forward: LaunchedForward, step: PreparedStep) -> SharedReadEnds | None:
        runs_beside = self.storage.statistics().forwards_in_flight > 1
        if runs_beside and self.numbers.random() < self.share:
            self.device.submit("metadata of an aborted launch", run=forward.resolve)
            raise torch.OutOfMemoryError("activations")
        return self.queue.launch(forward, step)


@attrs.frozen(eq=False)
class Overlapped:
    """A run and what it ran with."""

    runner: ModelRunner
    storage: KVStorage
    requests: tuple[Request, ...]
    result: ServeResult

    @property
    def device(self) -> ModelledTensorDevice:
        assert isinstance(self.storage.device, ModelledTensorDevice)
        return self.storage.device


def serve_overlapped_on_tight_arena(
    runner: ModelRunner,
    requests: tuple[Request, ...],
    page_tokens: int,
    seed: int,
    *,
    declares_read_end: bool = True,
    aborted_share: float = 0.0,
    device_type: Callable[..., ModelledTensorDevice] = ModelledTensorDevice,
    raise_races: bool = True,
    overcommit: Overcommit | None = None,
    policy: ServingPolicy = OVERLAP,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Overlapped:
    """Serve with the interleaving of `seed`, every free byte a NaN after each step."""
    plan = plan_kv_storage(runner.layers, page_tokens=page_tokens)
    storage = build_kv_storage(
        plan,
        budget_bytes=tight_budget_bytes(plan, requests, policy, chunk_tokens=chunk_tokens),
        max_running_requests=RUNNING_REQUESTS,
        max_context_tokens=CONTEXT_TOKENS,
        chunk_tokens=chunk_tokens,
        make_device=lambda arena: device_type(arena, seed=seed, raise_races=raise_races),
        writes_whole_pages=True,
        policy=policy,
        check_level=CheckLevel.STRICT,
        overcommit=overcommit,
    )
    device = storage.device
    assert isinstance(device, ModelledTensorDevice)
    queue: ForwardQueue = ModelledForwards(storage, declares_read_end=declares_read_end)
    if aborted_share:
        queue = AbortingQueue(queue, storage, device, random.Random(seed), aborted_share)

    def observe(_: StepReport) -> None:
        poison_free_bytes(storage)

    result = serve_overlapped(runner, storage, queue, requests, chunk_tokens=chunk_tokens, observe=observe)
    return Overlapped(runner, storage, requests, result)


def with_early_ends(
    requests: tuple[Request, ...], alone: dict[str, tuple[int, ...]], seed: int
) -> tuple[Request, ...]:
    """Some stop at two tokens that they are known to generate; the clients of two go away."""
    changed = []
    for place, request in enumerate(requests):
        tokens = alone[request.request_id]
        at = (7 * place + 3 * seed) % max(1, len(tokens) - 2)
        if place % 3 == 0 and len(tokens) > 4:
            changed.append(attrs.evolve(request, stops=(tokens[at : at + 2], (999, 999))))
        elif place % 7 == 5:
            changed.append(attrs.evolve(request, cancelled_step=request.arrival_step + 9 + seed))
        else:
            changed.append(request)
    return tuple(changed)


def check(run: Overlapped, alone: dict[str, tuple[int, ...]]) -> None:
    page_tokens = run.storage.plan.page_tokens
    assert replay_on_plain_tensors(run.runner, run.result.forwards, page_tokens=page_tokens) is None
    for request in run.requests:
        name, expected = request.request_id, expected_tokens(request, alone[request.request_id])
        if name in run.result.cancelled:
            cancelled = run.result.cancelled[name]
            assert cancelled == expected[: len(cancelled)]
        else:
            assert first_token_difference(name, run.result.tokens[name], expected) is None
    run.storage.verify_idle()
    assert run.device.model.races == ()
