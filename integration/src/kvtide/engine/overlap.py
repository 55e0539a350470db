"""The overlap loop: forward N + 1 is launched before the result of N is looked at, so the device never waits for the scheduler.

    host      │ admit, launch N + 1 │ wait for N, process N: tokens, ends │ admit, launch N + 2 │ wait for N + 1 …
    forwards  … N ──────────────────┤ N + 1 ─────────────────────────────────────────────────── ┤ N + 2 …

What the host cannot know when it launches N + 1, N brings there itself: the tokens it chooses. What N brings to an end, by a stop
sequence, by its length, or because the client has gone, N + 1 may still compute: its pages pend until N + 1 is over, its row may be
another's, and that part of N + 1's result is dropped.

Each step launches one forward: a prefill chunk and a decode batch in turn, where there are both. Where nothing can be launched
before the result in flight is known, that is processed early; behind it, and at idle, holes are closed.

A launch that finds no room for its activations beside the forward in flight is tried again behind that. If it has changed states or row
state, it cannot begin where it began: its requests are retracted without a backup, and until they are over no forward is launched beside
another. So a request is retracted for that once at most, and what fails beside nothing ends the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import attrs
import torch

from kvtide.engine.batch import FUTURE_TOKEN, ForwardBatch
from kvtide.engine.decode_buffers import DecodeBuffers
from kvtide.engine.errors import EngineError
from kvtide.engine.forwards import ForwardQueue, ForwardResult, LaunchedForward
from kvtide.engine.loop import RanForward, SchedulerLoop, ServeResult, StepObserver
from kvtide.engine.origins import RowOrigins
from kvtide.engine.requests import Request, RunningRequest, checked
from kvtide.engine.runner import Hook, ModelRunner
from kvtide.storage import KVStorage, PreparedStep


def serve_overlapped(
    runner: ModelRunner,
    storage: KVStorage,
    forwards: ForwardQueue,
    requests: Iterable[Request],
    *,
    chunk_tokens: int,
    observe: StepObserver | None = None,
) -> ServeResult:
    """Run `requests` to their end over `storage`, whose policy overlaps, with launches through `forwards`.

    Raises `EngineError` as `kvtide.engine.loop.serve`, and for a storage that lets a row have one step only. Whatever is raised,
    what was in flight has ended, and the rows in use can be released.
    """
    if not storage.sized.policy.overlap:
        raise EngineError(
            "the overlap loop needs a storage that prices two forwards in flight: ServingPolicy(overlap=True)"
        )
    return OverlapLoop(runner, storage, forwards, chunk_tokens, checked(requests)).run(observe)


@attrs.frozen(eq=False)
class _Flying:
    """A forward in flight."""

    step: PreparedStep
    forward: LaunchedForward
    running: Sequence[RunningRequest]
    chooses: bool
    chosen_before: Sequence[int]
    """Tokens chosen for each request by earlier forwards."""
    origins: tuple[RowOrigins, ...] | None
    """Whose bytes each row reads, where prefixes are shared."""


class OverlapLoop(SchedulerLoop):
    """See the module's docstring; arrivals, admission and ends are the plain loop's."""

    def __init__(
        self,
        runner: ModelRunner,
        storage: KVStorage,
        forwards: ForwardQueue,
        chunk_tokens: int,
        requests: Sequence[Request],
    ) -> None:
        """Nothing has arrived, nothing is in flight."""
        super().__init__(runner, storage, chunk_tokens, requests)
        self._queue = forwards
        # Attention over pages can run on what lies at fixed addresses; the cache hook's shapes follow the rows' lengths.
        self._buffers = DecodeBuffers(storage) if runner.hook is Hook.PAGES else None
        self._flying: deque[_Flying] = deque()
        self._last_was_prefill = False
        self._spoilt: set[str] = set()
        """Requests not over whose states a launch without room has changed."""

    def run(self, observe: StepObserver | None) -> ServeResult:
        """Serve every request to its end."""
        step = 0
        try:
            while self._arriving or self._waiting or self._running or self._flying:
                self._arrive(step)
                over = self._cancel(step)
                self._admit()
                over += self._launch_and_process()
                if observe is not None:
                    observe(self._report(step, over))
                step += 1
        except BaseException:
            self._drain()
            raise
        return self._result(step)

    def _launch_and_process(self) -> list[RunningRequest]:
        """One forward is launched, the one before is processed; the requests that ended with it."""
        if self._launch_next():
            return self._process() if len(self._flying) > 1 else []
        over = self._process() if self._flying else []
        # Nothing runs, so nothing keeps its pages where they are.
        self._storage.flush_opportunistic()
        return over

    # ── launching ──

    def _launch_next(self) -> bool:
        """Launch a prefill chunk or a decode batch; false where there is none for now, or it was given up for want of memory."""
        self._spoilt -= self._tokens.keys() | self._cancelled.keys() if self._spoilt else set()
        if self._flying and self._spoilt:
            return False
        prefilling = next((one for one in self._running if one.is_prefilling), None)
        decoding = [
            one
            for one in self._running
            if not one.is_prefilling and one.chosen_tokens < one.request.output_tokens
        ]
        if prefilling is not None and not (decoding and self._last_was_prefill):
            self._last_was_prefill = True
            return self._launch([prefilling], [self._next_chunk(prefilling)])
        if decoding:
            self._last_was_prefill = False
            decoding.sort(key=lambda one: one.row)
            return self._launch(decoding, [(FUTURE_TOKEN,)] * len(decoding))
        return False

    def _launch(self, running: Sequence[RunningRequest], token_ids: Sequence[tuple[int, ...]]) -> bool:
        storage = self._storage
        batch = ForwardBatch(
            request_ids=tuple(one.request.request_id for one in running),
            rows=tuple(one.row for one in running),
            token_ids=tuple(token_ids),
            tokens_before=tuple(one.written_tokens for one in running),
        )
        chooses = all(
            one.written_tokens + count >= len(one.prompt)
            for one, count in zip(running, batch.counts, strict=True)
        )
        step = self._prepare(batch)
        if step is None:
            return False
        unresolved = storage.launch_forward(step)
        forward = LaunchedForward(
            self._runner,
            storage,
            self._store,
            batch,
            unresolved,
            chooses=chooses,
            buffers=self._buffers if token_ids[0] == (FUTURE_TOKEN,) else None,
        )
        try:
            read_ends = self._queue.launch(forward, step)
        except torch.OutOfMemoryError:
            # What is in flight holds activations; without them there may be room. Without anything in flight there will be no more.
            storage.abandon(step, may_have_run=forward.has_changed_rows)
            if not self._flying:
                raise
            if forward.has_changed_rows:
                for one in reversed(running):
                    self._retract(one, is_whole=False)
                self._spoilt.update(batch.request_ids)
            return False
        except BaseException:
            storage.abandon(step, may_have_run=True)
            raise
        origins = None if self._origins is None else self._origins.launched(step)
        storage.record_forward(step, read_ends)
        self._flying.append(
            _Flying(step, forward, running, chooses, [one.chosen_tokens for one in running], origins)
        )
        for one, count in zip(running, batch.counts, strict=True):
            one.written_tokens += count
            one.chosen_tokens += chooses
        return True

    # ── processing ──

    def _process(self) -> list[RunningRequest]:
        """Wait for the oldest forward in flight and take in its result; the requests that are complete with it."""
        flying = self._flying.popleft()
        result = self._end_of(flying)
        self._forwards.append(
            RanForward(_known(flying), result.logits, padding=flying.forward.padding, origins=flying.origins)
        )
        tokens, drawn = result.tokens.tolist(), result.drawn_counts.tolist()
        lengths = result.lengths.tolist()
        for place, one in enumerate(flying.running):
            if one.is_over:
                continue
            if flying.chooses:
                one.tokens.append(tokens[place])
            known = (
                flying.step.starts[place] + flying.step.counts[place],
                len(one.tokens) - len(one.recomputed),
            )
            if known != (lengths[place], drawn[place]):
                raise EngineError(
                    f"request {one.request.request_id!r} in row {one.row}: the device counts {lengths[place]} tokens and "
                    f"{drawn[place]} chosen, the host {known[0]} and {known[1]}"
                )
        return self._finish()

    def _end_of(self, flying: _Flying) -> ForwardResult:
        assert flying.step.done_event is not None, "what flies has been recorded"
        self._storage.device.wait_on_host(flying.step.done_event)
        self._storage.forward_processed(flying.step)
        chosen = None
        try:
            result = flying.forward.result()
            chosen = result.tokens.tolist() if flying.chooses else None
        finally:
            self._storage.advance(flying.step, chosen)
        return result

    def _drain(self) -> None:
        """End what is in flight, whatever came of it."""
        while self._flying:
            flying = self._flying.popleft()
            try:
                self._end_of(flying)
            except Exception:  # noqa: BLE001, S112  # another error is on its way to the caller
                continue


def _known(flying: _Flying) -> ForwardBatch:
    """The batch with the tokens that the host knows by now: what the forward was to find on the device."""
    token_ids = [
        (one.tokens[chosen - 1],) if tokens == (FUTURE_TOKEN,) else tokens
        for one, tokens, chosen in zip(
            flying.running, flying.forward.batch.token_ids, flying.chosen_before, strict=True
        )
    ]
    return attrs.evolve(flying.forward.batch, token_ids=tuple(token_ids))
