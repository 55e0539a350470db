"""A plain scheduler loop over `KVStorage`: continuous batching, chunked prefill, admission in arrival order.

Each step:

1. a request that arrives and that not even an empty arena could hold is rejected at once, with the refusal's text;
2. those that wait are admitted from the head of the queue, for as long as the storage admits them;
3. the oldest admitted request whose prompt is not written yet runs one prefill chunk;
4. all requests with a written prompt decode one token in one batch;
5. requests that are complete, or whose client has gone, release everything they hold.

Admission promises every peak, so no step of an admitted request is refused. Over a storage that overcommits one may be: then the
newest request that was promised less than its whole output is retracted and waits at the head of the queue. Its memory is kept on the
host, and it goes on where it was. One whose state an aborted launch may have changed, or for which the host has no memory, computes what
it had again, in no more memory than it was admitted for. Tokens are chosen greedily. The rows of a batch are ordered by row number, which
is reused: it says nothing about who came first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import structlog
import torch

from kvtide.engine.batch import ForwardBatch, Padding
from kvtide.engine.errors import EngineError
from kvtide.engine.origins import Origins, RowOrigins
from kvtide.engine.requests import Request, RunningRequest, checked
from kvtide.engine.runner import ModelRunner
from kvtide.engine.stores import ArenaStore
from kvtide.storage import (
    AdmissionRefusal,
    HostMemoryError,
    KVStorage,
    PreparedStep,
    PromiseRefusal,
    Refusal,
    RowBackup,
)

log = structlog.get_logger(__name__)

NO_TOKEN = -1
"""Of a row whose forward chose none."""


@attrs.frozen(eq=False)
class RanForward:
    """A batch that ran."""

    batch: ForwardBatch
    """What it computed."""

    logits: torch.Tensor
    """After each row's last token, `[rows, vocabulary]`."""

    padding: Padding | None = None
    """Its shape, if it ran padded."""

    origins: tuple[RowOrigins, ...] | None = None
    """Whose bytes each row read, where prefixes are shared."""


@attrs.frozen(kw_only=True, eq=False)
class ServeResult:
    """Everything a run produced."""

    tokens: Mapping[str, tuple[int, ...]]
    """Generated tokens by request."""

    rejected: Mapping[str, str]
    """Why, by request, for those that no arena of this size could hold."""

    cancelled: Mapping[str, tuple[int, ...]]
    """Tokens that were there, by request, for those whose client went away."""

    forwards: tuple[RanForward, ...]
    """In the order in which they ran."""

    step_count: int
    """Steps of the loop."""


@attrs.frozen(kw_only=True)
class StepReport:
    """The loop after one step; what finished in it has been released."""

    step: int
    """From 0."""

    waiting: tuple[str, ...]
    """Arrived and not admitted."""

    running: tuple[str, ...]
    """Admitted and not finished."""

    finished: tuple[str, ...]
    """Finished or cancelled in this step."""


StepObserver = Callable[[StepReport], None]
"""Called after each step, between forwards: it may look at the storage, and must not change it."""


def serve(
    runner: ModelRunner,
    storage: KVStorage,
    requests: Iterable[Request],
    *,
    chunk_tokens: int,
    observe: StepObserver | None = None,
) -> ServeResult:
    """Run `requests` to their end over `storage`, prefilling at most `chunk_tokens` a forward.

    Raises `EngineError` for two requests of one id, an empty prompt, an empty stop sequence, or an output of no token; for a storage
    whose windows do not hold what the runner's hook reads of a chunk.
    """
    return SchedulerLoop(runner, storage, chunk_tokens, checked(requests)).run(observe)


class SchedulerLoop:
    """The plain loop; arrivals, admission and ends are those of every loop."""

    def __init__(
        self, runner: ModelRunner, storage: KVStorage, chunk_tokens: int, requests: Sequence[Request]
    ) -> None:
        """Nothing has arrived."""
        reads = storage.sized.policy.chunk_reads
        if reads not in runner.hook.chunk_reads:
            served = " or ".join(sorted(each.value for each in runner.hook.chunk_reads))
            raise EngineError(
                f"{runner.hook.value} reads a chunk's own tokens in {served}, and the storage's policy says {reads.value}: windows would "
                "not hold what it reads"
            )
        self._runner = runner
        self._storage = storage
        self._store = ArenaStore(storage)
        self._chunk_tokens = chunk_tokens
        self._origins = Origins(storage) if storage.shares_prefixes else None
        self._arriving = deque(sorted(requests, key=lambda request: request.arrival_step))
        self._waiting: deque[Request] = deque()
        self._running: list[RunningRequest] = []
        self._retracted: dict[str, RunningRequest] = {}
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._rejected: dict[str, str] = {}
        self._cancelled: dict[str, tuple[int, ...]] = {}
        self._forwards: list[RanForward] = []

    def run(self, observe: StepObserver | None) -> ServeResult:
        """Serve every request to its end."""
        step = 0
        while self._arriving or self._waiting or self._running:
            self._arrive(step)
            gone = self._cancel(step)
            self._admit()
            self._prefill()
            self._decode()
            finished = self._finish()
            if observe is not None:
                observe(self._report(step, gone + finished))
            step += 1
        return self._result(step)

    def _result(self, step: int) -> ServeResult:
        return ServeResult(
            tokens=self._tokens,
            rejected=self._rejected,
            cancelled=self._cancelled,
            forwards=tuple(self._forwards),
            step_count=step,
        )

    def _arrive(self, step: int) -> None:
        while self._arriving and self._arriving[0].arrival_step <= step:
            request = self._arriving.popleft()
            refusal = self._storage.arrival_refusal(len(request.prompt), request.output_tokens)
            if refusal is None:
                self._waiting.append(request)
            else:
                self._rejected[request.request_id] = str(refusal)

    def _admit(self) -> None:
        """Admit from the head of the queue; the first that must wait holds up those behind it."""
        while self._waiting:
            request = self._waiting[0]
            had = self._retracted.get(request.request_id)
            admitted = (
                self._begin(request, had)
                if had is None or had.backup is None
                else self._restore(had, had.backup)
            )
            if isinstance(admitted, AdmissionRefusal) and not admitted.is_final:
                return
            self._waiting.popleft()
            self._retracted.pop(request.request_id, None)
            if isinstance(admitted, AdmissionRefusal):
                if had is not None:
                    raise EngineError(
                        f"request {request.request_id!r} was retracted with {len(had.tokens)} generated tokens, and cannot go on: {admitted}"
                    )
                self._rejected[request.request_id] = str(admitted)
            else:
                self._running.append(admitted)

    def _begin(self, request: Request, had: RunningRequest | None) -> RunningRequest | AdmissionRefusal:
        """With nothing, or, if it has been retracted without a backup, with what it `had` generated behind its prompt."""
        recomputed = () if had is None else tuple(had.tokens)
        known, shares = request.prompt + recomputed, self._storage.shares_prefixes
        total = len(request.prompt) + request.output_tokens
        # In chunks of a longer prompt it may need more memory than it was admitted for. Then it is admitted for that once more.
        is_prompt = self._storage.arrival_refusal(len(known), total - len(known)) is None
        prompt = known if is_prompt else request.prompt
        rows = self._storage.admit(
            [len(prompt)],
            [total - len(prompt)],
            whole=had is not None,
            prompts=[prompt] if shares else None,
            extra_keys=[request.extra_key] if shares else None,
        )
        if isinstance(rows, AdmissionRefusal):
            return rows
        row = int(rows[0])
        if self._origins is not None:
            self._origins.admitted(row)
        if had is not None:
            had.is_over = True
        return RunningRequest(
            request,
            row,
            written_tokens=int(self._storage.requests.cached_tokens[row]),
            recomputed=recomputed,
            tokens=list(recomputed),
            chosen_tokens=len(recomputed),
        )

    def _restore(self, had: RunningRequest, backup: RowBackup) -> RunningRequest | AdmissionRefusal:
        rows = self._storage.restore([backup])
        if isinstance(rows, AdmissionRefusal):
            return rows
        had.row, had.backup, had.is_retracted = int(rows[0]), None, False
        if self._origins is not None and had.kept_origins is not None:
            self._origins.restored(had.row, had.kept_origins)
        return had

    def _prefill(self) -> None:
        running = next((running for running in self._running if running.is_prefilling), None)
        if running is not None:
            self._forward([running], [self._next_chunk(running)])

    def _next_chunk(self, running: RunningRequest) -> tuple[int, ...]:
        """Token ids of its next prefill forward; what is output to the storage is computed as it was the first time, token by token."""
        start = running.written_tokens
        is_output = start >= self._storage.requests.prompts[running.row]
        count = 1 if is_output else self._storage.next_chunk_tokens(running.row, self._chunk_tokens)
        return running.prompt[start : start + count]

    def _decode(self) -> None:
        decoding = [
            running for running in self._running if not running.is_prefilling and not running.is_complete
        ]
        if decoding:
            decoding.sort(key=lambda running: running.row)
            self._forward(decoding, [(running.tokens[-1],) for running in decoding])

    def _cancel(self, step: int) -> list[RunningRequest]:
        """End those whose client has gone; of them, those that were running."""

        def is_gone(request: Request) -> bool:
            return request.cancelled_step is not None and request.cancelled_step <= step

        gone = [one for one in self._running if is_gone(one.request)]
        self._cancelled |= {request.request_id: () for request in self._waiting if is_gone(request)}
        retracted = [one for one in self._retracted.values() if is_gone(one.request)]
        self._cancelled |= {one.request.request_id: tuple(one.tokens) for one in (*gone, *retracted)}
        self._waiting = deque(request for request in self._waiting if not is_gone(request))
        self._end([*gone, *retracted])
        return gone

    def _finish(self) -> list[RunningRequest]:
        """End those that are complete; the last token of one that is retracted may have come since."""
        finished = [one for one in (*self._running, *self._retracted.values()) if one.is_complete]
        self._tokens |= {one.request.request_id: tuple(one.tokens) for one in finished}
        self._end(finished)
        return finished

    def _end(self, over: Sequence[RunningRequest]) -> None:
        if not over:
            return
        self._storage.release([one.row for one in over if not one.is_retracted])
        for one in over:
            one.is_over = True
            if one.is_retracted:
                del self._retracted[one.request.request_id]
                self._waiting = deque(request for request in self._waiting if request is not one.request)
        self._running = [one for one in self._running if not one.is_over]

    def _forward(self, running: Sequence[RunningRequest], token_ids: Sequence[tuple[int, ...]]) -> None:
        """Run one forward and take in its result."""
        batch = ForwardBatch(
            request_ids=tuple(one.request.request_id for one in running),
            rows=tuple(one.row for one in running),
            token_ids=tuple(token_ids),
            tokens_before=tuple(one.written_tokens for one in running),
        )
        step = self._prepare(batch)
        if step is None:
            return
        ids = self._storage.launch_forward(step)
        origins = None if self._origins is None else self._origins.launched(step)
        try:
            logits = self._runner.run(batch, self._store.forward(ids.resolve()))
        except BaseException:
            self._storage.abandon(step, may_have_run=True)
            raise
        self._storage.record_forward(step)
        self._storage.forward_processed(step)
        self._forwards.append(RanForward(batch, logits, origins=origins))
        tokens = logits.argmax(dim=-1).tolist()
        for one, count, token in zip(running, batch.counts, tokens, strict=True):
            one.written_tokens += count
            if not one.is_prefilling:
                one.tokens.append(token)
        self._storage.advance(step, [NO_TOKEN if one.is_prefilling else one.tokens[-1] for one in running])

    def _prepare(self, batch: ForwardBatch) -> PreparedStep | None:
        """The batch's step, whoever must be retracted for it; `None` where a request of the batch was."""
        while isinstance(step := self._storage.prepare_step(batch.rows, batch.counts), PromiseRefusal):
            row = step.overcommitted[0]
            self._retract(next(running for running in self._running if running.row == row))
            if row in batch.rows:
                return None
        assert not isinstance(step, Refusal), f"an admitted request was refused its step: {step}"
        return step

    def _retract(self, running: RunningRequest, *, is_whole: bool = True) -> None:
        """Take its row away; what it had is kept, unless its state is lost, so that it is not `is_whole`, or the host has no memory."""
        storage, row = self._storage, running.row
        if is_whole:
            kept_origins = None if self._origins is None else self._origins.retracted(row)
            try:
                (running.backup,) = storage.retract_to_host([row])
                running.kept_origins = kept_origins
            except HostMemoryError as error:
                log.warning("engine.no_backup", request=running.request.request_id, reason=str(error))
                is_whole = False
        if not is_whole:
            storage.retract([row])
        running.is_retracted = True
        self._running.remove(running)
        self._retracted[running.request.request_id] = running
        self._waiting.appendleft(running.request)

    def _report(self, step: int, finished: Sequence[RunningRequest]) -> StepReport:
        return StepReport(
            step=step,
            waiting=tuple(request.request_id for request in self._waiting),
            running=tuple(running.request.request_id for running in self._running),
            finished=tuple(running.request.request_id for running in finished),
        )
