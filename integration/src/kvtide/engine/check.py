"""Proof that a run was right: its logits against plain tensors bit for bit, its tokens against `generate()` alone.

The two answer different questions. The replay runs the same batches through the same code over a store without pages, so a
single wrong byte that reaches a logit shows, and nothing else can. `generate()` shares none of that code.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from transformers import PreTrainedModel

from kvtide.engine.batch import ForwardBatch, inputs_of_host
from kvtide.engine.loop import RanForward
from kvtide.engine.requests import Request
from kvtide.engine.runner import ModelRunner, attention_implementation
from kvtide.engine.shared_replay import SharedPlainStore
from kvtide.engine.stores import PlainStore
from kvtide.plan import plan_kv_storage


@attrs.frozen(kw_only=True)
class LogitDifference:
    """The first place where a run and its replay on plain tensors differ."""

    forward: int
    """Index of the forward in the run."""

    request_id: str
    """Request whose row differs."""

    position: int
    """Position in the request of the token whose logits differ."""

    differing: int
    """Logits of that row that differ in any bit."""

    largest: float
    """Their largest absolute difference; NaN where either is."""

    def __str__(self) -> str:
        return (
            f"forward {self.forward}: {self.differing} logits of request {self.request_id!r} at position {self.position} "
            f"differ by up to {self.largest:.3g}"
        )


@attrs.frozen(kw_only=True)
class TokenDifference:
    """The first token of a request that differs from what `generate()` gives it alone."""

    request_id: str
    """Request."""

    index: int
    """Which generated token, from 0."""

    served: int | None
    """What the run gave; `None` where it gave fewer."""

    alone: int | None
    """What `generate()` gives; `None` where it gives fewer."""

    def __str__(self) -> str:
        return f"request {self.request_id!r}: token {self.index} is {self.served}, alone it is {self.alone}"


@attrs.frozen(kw_only=True)
class CheckResult:
    """A run compared with both oracles."""

    logits: LogitDifference | None
    """`None` where every logit of every forward is equal bit for bit."""

    tokens: tuple[TokenDifference, ...]
    """One for each request that differs, in the order of the requests."""

    @property
    def is_equal(self) -> bool:
        """Nothing differs."""
        return self.logits is None and not self.tokens


def replay_on_plain_tensors(
    runner: ModelRunner, forwards: Sequence[RanForward], *, page_tokens: int
) -> LogitDifference | None:
    """Run the batches of `forwards` again, in order, over a `PlainStore`; the first difference in any bit of a logit.

    `page_tokens` is the page size of the run, on which the columns of page attention depend.
    """
    if any(ran.origins is not None for ran in forwards):
        return _replay_shared(runner, forwards, page_tokens)
    store = PlainStore(page_tokens)
    last_forward = {
        request_id: index for index, ran in enumerate(forwards) for request_id in ran.batch.request_ids
    }
    for index, ran in enumerate(forwards):
        inputs = inputs_of_host(ran.batch, ran.padding)
        logits = runner.run(ran.batch, store.forward(ran.batch, ran.padding), inputs)
        difference = _first_difference(index, ran.batch, ran.logits, logits)
        if difference is not None:
            return difference
        for request_id in ran.batch.request_ids:
            if last_forward[request_id] == index:
                store.release(request_id)
    return None


def _replay_shared(
    runner: ModelRunner, forwards: Sequence[RanForward], page_tokens: int
) -> LogitDifference | None:
    """The same for a run that shares prefixes."""
    plan = plan_kv_storage(runner.layers, page_tokens=page_tokens)
    bands = {layer: pool.name for pool in plan.token_sub_pools for layer in pool.layers}
    logs = [ran.origins or () for ran in forwards]
    store = SharedPlainStore(page_tokens, bands, logs)
    for index, (ran, origins) in enumerate(zip(forwards, logs, strict=True)):
        inputs = inputs_of_host(ran.batch, ran.padding)
        logits = runner.run(ran.batch, store.forward(ran.batch, origins, ran.padding), inputs)
        difference = _first_difference(index, ran.batch, ran.logits, logits)
        if difference is not None:
            return difference
        store.ran(ran.batch, origins)
    return None


@torch.no_grad()
def generate_alone(model: PreTrainedModel, request: Request) -> tuple[int, ...]:
    """What the model's own `generate()` gives `request`, with nothing else in the batch: greedy, with its own cache."""
    prompt = torch.tensor([request.prompt])
    with attention_implementation(model, "eager"):
        output: torch.Tensor = model.generate(  # type: ignore[operator]  # a mixin that transformers adds untyped
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.output_tokens,
            min_new_tokens=request.output_tokens,
            do_sample=False,
        )
    return tuple(output[0, len(request.prompt) :].tolist())


def expected_tokens(request: Request, alone: Sequence[int]) -> tuple[int, ...]:
    """What a request is to be given where `generate()`, which knows no stop sequences, gives `alone`."""
    ends = (end for end in range(1, len(alone)) if request.is_complete(alone[:end]))
    return tuple(alone[: next(ends, len(alone))])


def first_token_difference(
    request_id: str, served: Sequence[int], alone: Sequence[int]
) -> TokenDifference | None:
    """Where `served` leaves `alone`, or `None`."""
    for index in range(max(len(served), len(alone))):
        pair = tuple(tokens[index] if index < len(tokens) else None for tokens in (served, alone))
        if pair[0] != pair[1]:
            return TokenDifference(request_id=request_id, index=index, served=pair[0], alone=pair[1])
    return None


def _first_difference(
    forward: int, batch: ForwardBatch, run: torch.Tensor, replayed: torch.Tensor
) -> LogitDifference | None:
    # As integers: a NaN equals itself, and 0.0 is not −0.0.
    differs = run.contiguous().view(torch.int32) != replayed.contiguous().view(torch.int32)
    rows = differs.any(dim=-1).nonzero()
    if not len(rows):
        return None
    row = int(rows[0])
    return LogitDifference(
        forward=forward,
        request_id=batch.request_ids[row],
        position=batch.tokens_before[row] + batch.query_tokens - 1,
        differing=int(differs[row].sum()),
        largest=float((run[row] - replayed[row]).abs().max()),
    )
