"""The demo's work, without its words: real models served from tight arenas, each run checked twice.

A run is a model, a page size and a hook. Its requests go through a loop over a storage whose arena is too small for comfort; then
its tokens are compared with the model's own `generate()` for each request alone, and its logits bit for bit with the same batches
over plain tensors. The overlap loop runs on the modelled device: forwards run late and in pieces, and accesses that nothing orders
are reported.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from transformers import PreTrainedModel

from kvtide.arena import CPUDevice, KVArena, TensorDevice
from kvtide.engine.broken_rules import BrokenDevice, Rule, SpoilingForwards
from kvtide.engine.check import (
    CheckResult,
    TokenDifference,
    expected_tokens,
    first_token_difference,
    generate_alone,
    replay_on_plain_tensors,
)
from kvtide.engine.declare import with_checkpoints
from kvtide.engine.forwards import ForwardQueue, ModelledForwards
from kvtide.engine.loop import ServeResult, StepObserver, StepReport, serve
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.engine.models import RANDOM_VOCABULARY, DemoModel
from kvtide.engine.overlap import serve_overlapped
from kvtide.engine.picture import ArenaFrame, capture, draw
from kvtide.engine.requests import Request
from kvtide.engine.runner import Hook, ModelRunner
from kvtide.engine.static_split import Held, average_split, peaks, requests_held
from kvtide.engine.workload import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    PLAIN,
    RUNNING_REQUESTS,
    chunk_on_grid,
    random_requests,
    text_requests,
    tight_budget_bytes,
    with_follow_ups,
)
from kvtide.ledger import CheckLevel
from kvtide.plan import plan_kv_storage
from kvtide.sizing import CheckpointStrategy, ServingPolicy
from kvtide.storage import KVStorage, SharingStatistics, build_kv_storage

Progress = Callable[[str], None]
"""Told what is happening, often."""


class Loop(enum.Enum):
    """How requests are scheduled."""

    OVERLAP = "overlap"
    """The next forward is launched before the last one is processed (`kvtide.engine.overlap`)."""

    PLAIN = "plain"
    """One forward at a time (`kvtide.engine.loop`)."""


@attrs.frozen(kw_only=True)
class DemoSettings:
    """What all runs of a demo share."""

    seed: int = 0
    """Of arrivals, of random prompts, and of the interleaving."""

    loop: Loop = Loop.OVERLAP
    """How requests are scheduled."""

    broken: Rule | None = None
    """A rule that is switched off; only with the overlap loop."""

    strategy: CheckpointStrategy = CheckpointStrategy.EXTRA_BUFFER
    """How prefixes are shared, if at all; with a rule switched off they are not."""

    check_level: CheckLevel = CheckLevel.OFF
    """How much is checked beyond what always is."""

    @property
    def policy(self) -> ServingPolicy:
        """How the storage is to serve; raises `SizingError` for a strategy that the loop does not run."""
        strategy = self.strategy if self.broken is None else CheckpointStrategy.NONE
        return ServingPolicy(strategy=strategy, overlap=self.loop is Loop.OVERLAP)

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests share prefixes."""
        return self.policy.strategy is not CheckpointStrategy.NONE


@attrs.frozen(kw_only=True)
class Continuation:
    """What a model of text wrote."""

    prompt: str
    """What it was to continue."""

    served: str
    """What the run gave."""

    alone: str
    """What `generate()` gives."""


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

    sharing: SharingStatistics | None
    """What sharing prefixes came to, where they were."""

    check: CheckResult
    """Both comparisons."""

    races: tuple[str, ...]
    """Accesses of the device that nothing ordered; always empty in the plain loop."""

    texts: tuple[Continuation, ...]
    """One a request, for a model of text."""

    picture: Path
    """SVG of the arena over time."""

    seconds: float
    """Wall time, checks included."""

    @property
    def is_right(self) -> bool:
        """Nothing differs, and everything was ordered."""
        return self.check.is_equal and not self.races


def demo_runs(
    models: Sequence[DemoModel],
    page_sizes: Sequence[int],
    *,
    settings: DemoSettings,
    folder: Path,
    progress: Progress,
) -> Iterator[DemoRun]:
    """Serve each model with each page size and each of its hooks; pictures go to `folder`, which must exist."""
    seed = settings.seed
    torch.set_num_threads(1)
    for model in models:
        progress(f"{model.name}: generate() alone, for comparison")
        loaded = model.load()
        requests = text_requests(seed) if model.is_text else random_requests(RANDOM_VOCABULARY, seed)
        if settings.shares_prefixes:
            vocabulary = None if model.is_text else RANDOM_VOCABULARY
            requests = with_follow_ups(requests, vocabulary=vocabulary, seed=seed)
        alone = {request.request_id: generate_alone(loaded, request) for request in requests}
        scene = _Scene(model, loaded, requests, alone, settings, folder, progress)
        for page_tokens in page_sizes:
            for hook in model.hooks:
                yield scene.play(hook, page_tokens)


def build_tight_storage(
    runner: ModelRunner,
    requests: Sequence[Request],
    page_tokens: int,
    *,
    policy: ServingPolicy = PLAIN,
    make_device: Callable[[KVArena], TensorDevice] = CPUDevice,
    check_level: CheckLevel = CheckLevel.OFF,
) -> KVStorage:
    """A storage in which bands must take each other's bytes to serve `requests`."""
    layers, chunk_tokens = runner.layers, CHUNK_TOKENS
    if policy.strategy is not CheckpointStrategy.NONE:
        chunk_tokens = chunk_on_grid(page_tokens)
        layers = with_checkpoints(layers, chunk_tokens)
    plan = plan_kv_storage(layers, page_tokens=page_tokens)
    return build_kv_storage(
        plan,
        budget_bytes=tight_budget_bytes(plan, requests, policy, chunk_tokens=chunk_tokens),
        max_running_requests=RUNNING_REQUESTS,
        max_context_tokens=CONTEXT_TOKENS,
        chunk_tokens=chunk_tokens,
        make_device=make_device,
        writes_whole_pages=True,
        policy=policy,
        check_level=check_level,
    )


@attrs.frozen(eq=False)
class _Scene:
    """One model and its requests, to be served in several ways."""

    model: DemoModel
    loaded: PreTrainedModel
    requests: Sequence[Request]
    alone: Mapping[str, tuple[int, ...]]
    settings: DemoSettings
    folder: Path
    progress: Progress

    def play(self, hook: Hook, page_tokens: int) -> DemoRun:
        """Serve, compare, draw."""
        started = time.monotonic()
        label = f"{self.model.name}, page size {page_tokens}, {hook.value}"
        runner = ModelRunner(self.loaded, hook)
        storage = self._build(runner, page_tokens)
        frames: list[ArenaFrame] = []
        running: list[int] = []

        def observe(report: StepReport) -> None:
            frames.append(capture(storage))
            running.append(len(report.running) + len(report.finished))
            self.progress(
                f"{label}: step {report.step}, {len(report.running)} running, {len(report.waiting)} waiting"
            )

        result = self._serve(runner, storage, observe)
        if self.settings.broken is None:
            storage.verify_idle()
        self.progress(f"{label}: the same batches on plain tensors, for comparison")
        check = CheckResult(
            logits=replay_on_plain_tensors(runner, result.forwards, page_tokens=page_tokens),
            tokens=tuple(_token_differences(self.requests, result, self.alone)),
        )
        chunk_tokens = storage.sized.chunk_tokens
        demands = peaks(storage.plan, self.requests, chunk_tokens, storage.sized.policy)
        split = average_split(storage.layout, demands)
        title = f"{self.model.title}; page size {page_tokens}"
        picture = self.folder / f"{self.model.name}-page{page_tokens}-{hook.name.lower()}.svg"
        picture.write_text(draw(storage.layout, frames, title=title, walls=split.walls), encoding="utf-8")
        held_static = requests_held(
            self.requests, demands, split.fits, chunk_tokens=chunk_tokens, row_count=RUNNING_REQUESTS
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
            sharing=storage.statistics().sharing,
            check=check,
            races=_races(storage),
            texts=tuple(_texts(self.requests, result, self.alone)) if self.model.is_text else (),
            picture=picture,
            seconds=time.monotonic() - started,
        )

    def _build(self, runner: ModelRunner, page_tokens: int) -> KVStorage:
        settings = self.settings
        build = functools.partial(
            build_tight_storage,
            runner,
            self.requests,
            page_tokens,
            policy=settings.policy,
            check_level=settings.check_level,
        )
        if settings.loop is Loop.PLAIN:
            return build()
        broken = settings.broken

        def make_device(arena: KVArena) -> TensorDevice:
            if broken is not None:
                return BrokenDevice(arena, broken)
            return ModelledTensorDevice(arena, seed=settings.seed, raise_races=False)

        return build(make_device=make_device)

    def _serve(self, runner: ModelRunner, storage: KVStorage, observe: StepObserver) -> ServeResult:
        if self.settings.loop is Loop.PLAIN:
            return serve(
                runner, storage, self.requests, chunk_tokens=storage.sized.chunk_tokens, observe=observe
            )
        # Where no read end is declared, the barrier orders whole forwards, and shows most where it is missing.
        forwards: ForwardQueue = ModelledForwards(
            storage, declares_read_end=self.settings.broken is not Rule.BARRIER
        )
        if self.settings.broken is not None:
            forwards = SpoilingForwards(forwards, storage)
        return serve_overlapped(
            runner,
            storage,
            forwards,
            self.requests,
            chunk_tokens=storage.sized.chunk_tokens,
            observe=observe,
        )


def _races(storage: KVStorage) -> tuple[str, ...]:
    device = storage.device
    return tuple(map(str, device.model.races)) if isinstance(device, ModelledTensorDevice) else ()


def _token_differences(
    requests: Sequence[Request], result: ServeResult, alone: Mapping[str, tuple[int, ...]]
) -> Iterator[TokenDifference]:
    for request in requests:
        served = result.tokens.get(request.request_id, ())
        difference = first_token_difference(
            request.request_id, served, expected_tokens(request, alone[request.request_id])
        )
        if difference is not None:
            yield difference


def _texts(
    requests: Sequence[Request], result: ServeResult, alone: Mapping[str, tuple[int, ...]]
) -> Iterator[Continuation]:
    for request in requests:
        name = request.request_id
        yield Continuation(
            prompt=_text(request.prompt),
            served=_text(result.tokens[name]),
            alone=_text(expected_tokens(request, alone[name])),
        )


def _text(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("ascii", "replace")
