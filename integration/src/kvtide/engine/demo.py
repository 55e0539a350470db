"""The demo's work, without its words: real models served from tight arenas, each run checked twice.

A run is a model, a page size and a hook. Its requests go through the plain loop over a storage whose arena is too small for
comfort; then its tokens are compared with the model's own `generate()` for each request alone, and its logits bit for bit
with the same batches over plain tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from transformers import PreTrainedModel

from kvtide.engine.check import (
    CheckResult,
    TokenDifference,
    first_token_difference,
    generate_alone,
    replay_on_plain_tensors,
)
from kvtide.engine.loop import Request, ServeResult, StepReport, serve
from kvtide.engine.models import RANDOM_VOCABULARY, DemoModel
from kvtide.engine.picture import ArenaFrame, capture, draw
from kvtide.engine.runner import Hook, ModelRunner
from kvtide.engine.static_split import Held, average_split, peaks, requests_held
from kvtide.engine.workload import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    RUNNING_REQUESTS,
    random_requests,
    text_requests,
    tight_budget_bytes,
)
from kvtide.plan import plan_kv_storage
from kvtide.storage import KVStorage, build_kv_storage

Progress = Callable[[str], None]
"""Told what is happening, often."""


@attrs.frozen(kw_only=True)
class DemoRun:
    """One run and what it showed."""

    model: DemoModel
    """What was served."""

    hook: Hook
    """How its bytes were reached."""

    page_tokens: int
    """Tokens a page."""

    bands: tuple[str, ...]
    """In chain order."""

    arena_bytes: int
    """Bytes of the arena."""

    request_count: int
    """Requests served."""

    token_count: int
    """Tokens generated."""

    moved_units: int
    """Pages and state slots moved."""

    rearrangements: int
    """Times the bands were packed to serve a take."""

    held: Held
    """Requests in the arena at once."""

    held_static: Held
    """The same requests under a static split of the same bytes."""

    check: CheckResult
    """Both comparisons."""

    texts: tuple[tuple[str, str], ...]
    """Prompt and continuation, for a model of text."""

    picture: Path
    """SVG of the arena over time."""

    seconds: float
    """Wall time, checks included."""


def demo_runs(
    models: Sequence[DemoModel], page_sizes: Sequence[int], *, seed: int, folder: Path, progress: Progress
) -> Iterator[DemoRun]:
    """Serve each model with each page size and each of its hooks; pictures go to `folder`, which must exist."""
    torch.set_num_threads(1)
    for model in models:
        progress(f"{model.name}: generate() alone, for comparison")
        loaded = model.load()
        requests = text_requests(seed) if model.is_text else random_requests(RANDOM_VOCABULARY, seed)
        alone = {request.request_id: generate_alone(loaded, request) for request in requests}
        scene = _Scene(model, loaded, requests, alone, folder, progress)
        for page_tokens in page_sizes:
            for hook in model.hooks:
                yield scene.play(hook, page_tokens)


def build_tight_storage(runner: ModelRunner, requests: Sequence[Request], page_tokens: int) -> KVStorage:
    """A storage in which bands must take each other's bytes to serve `requests`."""
    plan = plan_kv_storage(runner.layers, page_tokens=page_tokens)
    return build_kv_storage(
        plan,
        budget_bytes=tight_budget_bytes(plan, requests),
        max_running_requests=RUNNING_REQUESTS,
        max_context_tokens=CONTEXT_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        writes_whole_pages=True,
    )


@attrs.frozen(eq=False)
class _Scene:
    """One model and its requests, to be served in several ways."""

    model: DemoModel
    loaded: PreTrainedModel
    requests: Sequence[Request]
    alone: Mapping[str, tuple[int, ...]]
    folder: Path
    progress: Progress

    def play(self, hook: Hook, page_tokens: int) -> DemoRun:
        """Serve, compare, draw."""
        started = time.monotonic()
        label = f"{self.model.name}, page size {page_tokens}, {hook.value}"
        runner = ModelRunner(self.loaded, hook)
        storage = build_tight_storage(runner, self.requests, page_tokens)
        frames: list[ArenaFrame] = []
        running: list[int] = []

        def observe(report: StepReport) -> None:
            frames.append(capture(storage))
            running.append(len(report.running) + len(report.finished))
            self.progress(
                f"{label}: step {report.step}, {len(report.running)} running, {len(report.waiting)} waiting"
            )

        result = serve(runner, storage, self.requests, chunk_tokens=CHUNK_TOKENS, observe=observe)
        storage.verify_idle()
        self.progress(f"{label}: the same batches on plain tensors, for comparison")
        check = CheckResult(
            logits=replay_on_plain_tensors(runner, result.forwards, page_tokens=page_tokens),
            tokens=tuple(_token_differences(self.requests, result, self.alone)),
        )
        demands = peaks(storage.plan, self.requests, CHUNK_TOKENS)
        split = average_split(storage.layout, demands)
        title = f"{self.model.title}; page size {page_tokens}"
        picture = self.folder / f"{self.model.name}-page{page_tokens}-{hook.name.lower()}.svg"
        picture.write_text(draw(storage.layout, frames, title=title, walls=split.walls), encoding="utf-8")
        held_static = requests_held(
            self.requests, demands, split.fits, chunk_tokens=CHUNK_TOKENS, row_count=RUNNING_REQUESTS
        )
        statistics = storage.chain.statistics()
        return DemoRun(
            model=self.model,
            hook=hook,
            page_tokens=page_tokens,
            bands=tuple(band.name for band in storage.layout.bands),
            arena_bytes=storage.layout.arena_bytes,
            request_count=len(result.tokens),
            token_count=sum(map(len, result.tokens.values())),
            moved_units=statistics.moved_units,
            rearrangements=statistics.rearrangements,
            held=Held(most=max(running), steps=len(running), never_fit=len(result.rejected)),
            held_static=held_static,
            check=check,
            texts=tuple(_texts(self.requests, result)) if self.model.is_text else (),
            picture=picture,
            seconds=time.monotonic() - started,
        )


def _token_differences(
    requests: Sequence[Request], result: ServeResult, alone: Mapping[str, tuple[int, ...]]
) -> Iterator[TokenDifference]:
    for request in requests:
        served = result.tokens.get(request.request_id, ())
        difference = first_token_difference(request.request_id, served, alone[request.request_id])
        if difference is not None:
            yield difference


def _texts(requests: Sequence[Request], result: ServeResult) -> Iterator[tuple[str, str]]:
    for request in requests:
        yield (
            bytes(request.prompt).decode("ascii"),
            bytes(result.tokens[request.request_id]).decode("ascii", "replace"),
        )
