"""Runs of the overlap loop on the modelled device, in an arena whose free bytes turn to NaN."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import numpy as np
import torch

from kvtide.device import RunningWork
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
from kvtide.storage import KVStorage, Overcommit, PreparedStep, SharedReadEnds, build_kv_storage


def poison_free_bytes(storage: KVStorage) -> None:
    """Queue work on the schedule stream that fills with NaN what is nobody's: no live unit, sink, and nothing still read.

    The device reports it if a running forward, or a host copy, can touch one of those bytes after all.
    """
    device, layout = storage.device, storage.layout
    assert isinstance(device, ModelledTensorDevice)
    taken = np.zeros(layout.arena_bytes, np.bool_)
    taken[: layout.prefix_bytes] = True
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
) -> Overlapped:
    """Serve with the interleaving of `seed`, every free byte a NaN after each step."""
    plan = plan_kv_storage(runner.layers, page_tokens=page_tokens)
    storage = build_kv_storage(
        plan,
        budget_bytes=tight_budget_bytes(plan, requests, OVERLAP),
        max_running_requests=RUNNING_REQUESTS,
        max_context_tokens=CONTEXT_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        make_device=lambda arena: device_type(arena, seed=seed, raise_races=raise_races),
        writes_whole_pages=True,
        policy=OVERLAP,
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

    result = serve_overlapped(runner, storage, queue, requests, chunk_tokens=CHUNK_TOKENS, observe=observe)
    return Overlapped(runner, storage, requests, result)
