"""The loop as a scheduler: who is admitted when, what runs together, what is rejected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtide.arena import SCRATCH_BYTES
from kvtide.engine.batch import ForwardBatch
from kvtide.engine.check import CheckResult, first_token_difference
from kvtide.engine.errors import EngineError
from kvtide.engine.loop import ServeResult, StepReport, serve
from kvtide.engine.models import MODELS
from kvtide.engine.prompts import PROMPTS
from kvtide.engine.requests import Request
from kvtide.engine.runner import Hook
from kvtide.engine.stores import ForwardStore
from kvtide.engine.workload import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    RUNNING_REQUESTS,
    SIDE_BY_SIDE,
    random_requests,
    text_requests,
    tight_budget_bytes,
)
from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    MHAGeometry,
    WindowLifetime,
    plan_kv_storage,
)
from kvtide.storage import AdmissionRefusal, KVStorage, build_kv_storage

VOCABULARY = 11


class Counting:
    """Stands for a model: the next token is the row's length modulo the vocabulary."""

    hook = Hook.CACHE

    def run(self, batch: ForwardBatch, store: ForwardStore) -> torch.Tensor:
        lengths = torch.tensor(batch.tokens_before) + batch.query_tokens
        return torch.nn.functional.one_hot(lengths % VOCABULARY, VOCABULARY).float()


def plan_of(page_tokens: int = 4) -> KVStoragePlan:
    geometry = MHAGeometry(1, 4, 4, DType.FLOAT32)
    layers = (
        KVLayerDecl(0, (KVPart(geometry, WindowLifetime(8)),)),
        KVLayerDecl(1, (KVPart(geometry, FullLifetime()),)),
    )
    return plan_kv_storage(layers, page_tokens=page_tokens)


def storage_of(arena_bytes: int, rows: int = 4) -> KVStorage:
    return build_kv_storage(
        plan_of(),
        budget_bytes=SCRATCH_BYTES + arena_bytes,
        max_running_requests=rows,
        max_context_tokens=100,
        chunk_tokens=8,
    )


def request(name: str, prompt_tokens: int, output_tokens: int, arrival_step: int = 0) -> Request:
    return Request(
        request_id=name, prompt=(1,) * prompt_tokens, output_tokens=output_tokens, arrival_step=arrival_step
    )


def run(storage: KVStorage, requests: list[Request], reports: list[StepReport] | None = None) -> ServeResult:
    observe = None if reports is None else reports.append
    return serve(Counting(), storage, requests, chunk_tokens=8, observe=observe)  # type: ignore[arg-type]  # a stand-in


def test_every_request_gets_exactly_its_tokens() -> None:
    storage = storage_of(20_000)
    result = run(storage, [request("a", 20, 3), request("b", 1, 1, 2), request("c", 9, 12, 1)])
    assert result.tokens["a"] == (20 % VOCABULARY, 21 % VOCABULARY, 22 % VOCABULARY)
    assert result.tokens["b"] == (1,)
    assert len(result.tokens["c"]) == 12
    storage.verify_idle()


def test_a_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    result = run(storage_of(20_000), [request("a", 2, 9), request("b", 20, 2)])
    shapes = [(ran.batch.request_ids, ran.batch.counts) for ran in result.forwards]
    assert shapes[:6] == [
        (("a",), (2,)),
        (("a",), (1,)),
        (("b",), (8,)),
        (("a",), (1,)),
        (("b",), (8,)),
        (("a",), (1,)),
    ]
    assert (("a", "b"), (1, 1)) in shapes


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    """The small request would fit beside the first; it waits behind the large one, which came before it."""
    reports: list[StepReport] = []
    result = run(
        storage_of(4_000), [request("first", 30, 6), request("large", 60, 4), request("small", 2, 2)], reports
    )
    assert reports[0].waiting == ("large", "small")
    finished = [name for report in reports for name in report.finished]
    assert finished.index("first") < finished.index("small")
    assert set(result.tokens) == {"first", "large", "small"}


def test_a_request_that_never_fits_is_rejected_with_the_reason_and_holds_up_nobody() -> None:
    result = run(
        storage_of(4_000), [request("long", 95, 6), request("large", 90, 10), request("small", 2, 2)]
    )
    assert "longer than the 100" in result.rejected["long"]
    assert "not even alone" in result.rejected["large"]
    assert "with 90 prompt tokens no output could be served" in result.rejected["large"]
    assert set(result.tokens) == {"small"}


@pytest.mark.requirement("K5")
def test_a_request_that_never_fits_is_rejected_when_it_arrives_and_not_when_its_turn_comes() -> None:
    """Its client could have sent a shorter one meanwhile: it does not wait behind those that came before it."""
    reports: list[StepReport] = []
    requests = [request("first", 30, 6), request("next", 30, 6), request("large", 90, 10, 1)]
    result = run(storage_of(4_000), requests, reports)
    assert reports[1].waiting == ("next",), "the arena holds one of them at a time"
    assert all("large" not in (*report.waiting, *report.running) for report in reports)
    assert set(result.tokens) == {"first", "next"}
    assert set(result.rejected) == {"large"}


def test_requests_wait_for_rows() -> None:
    reports: list[StepReport] = []
    run(storage_of(20_000, rows=2), [request(name, 2, 4) for name in "abc"], reports)
    assert reports[0].running == ("a", "b")
    assert reports[0].waiting == ("c",)


def test_the_observer_sees_every_step() -> None:
    reports: list[StepReport] = []
    result = run(storage_of(20_000), [request("a", 2, 2, 3)], reports)
    assert [report.step for report in reports] == list(range(result.step_count))
    assert reports[0] == StepReport(step=0, waiting=(), running=(), finished=())
    assert reports[-1].finished == ("a",)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([request("a", 1, 1), request("a", 2, 2)], "two requests have the id 'a'"),
        ([request("a", 0, 1)], "0 prompt tokens"),
        ([request("a", 1, 0)], "asks for 0"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(requests: list[Request], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        run(storage_of(20_000), requests)


def test_the_first_differing_token_is_found() -> None:
    assert first_token_difference("a", (1, 2), (1, 2)) is None
    assert str(first_token_difference("a", (1, 2), (1, 3))) == "request 'a': token 1 is 2, alone it is 3"
    assert str(first_token_difference("a", (1,), (1, 3))) == "request 'a': token 1 is None, alone it is 3"
    assert CheckResult(logits=None, tokens=()).is_equal


# --- workload and models ------------------------------------------------------------------------------------------


def test_the_tight_budget_admits_the_first_requests_together_and_not_the_next() -> None:
    requests = random_requests(50)
    plan = plan_of(page_tokens=16)
    storage = build_kv_storage(
        plan,
        budget_bytes=tight_budget_bytes(plan, requests),
        max_running_requests=RUNNING_REQUESTS,
        max_context_tokens=CONTEXT_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
    )
    first = requests[:SIDE_BY_SIDE]
    rows = storage.admit(
        [len(request.prompt) for request in first], [request.output_tokens for request in first]
    )
    assert isinstance(rows, np.ndarray)
    assert isinstance(storage.admit([1], [1]), AdmissionRefusal)


def test_a_seed_gives_the_same_requests_again() -> None:
    assert random_requests(199, 5) == random_requests(199, 5)
    assert random_requests(199, 5) != random_requests(199, 6)
    assert text_requests(5) == text_requests(5)
    assert [len(request.prompt) for request in random_requests(199)] == [
        len(prompt.text) for prompt in PROMPTS
    ]


def test_prompts_are_ascii_of_mixed_length() -> None:
    lengths = [len(prompt.text.encode("ascii")) for prompt in PROMPTS]
    assert len(lengths) >= 12
    assert min(lengths) < 16
    assert max(lengths) > 200


def test_random_weights_are_the_same_every_time() -> None:
    """And drawing them leaves torch's own generator alone."""
    state = torch.get_rng_state()
    first, second = (MODELS["llama"].load().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_model_runs_with_the_cache_hook() -> None:
    assert all(model.hooks[0] is Hook.CACHE for model in MODELS.values())
    assert [model.name for model in MODELS.values() if Hook.PAGES not in model.hooks] == ["deepseek_v3"]


def test_a_forward_that_fails_leaves_the_storage_usable() -> None:
    """An out-of-memory in one forward must cost that run, not the storage: its rows can still be released."""

    class Failing(Counting):
        def run(self, batch: ForwardBatch, store: ForwardStore) -> torch.Tensor:
            if batch.tokens_before[0] >= 8:
                raise MemoryError("no room for activations")
            return super().run(batch, store)

    storage = storage_of(6_000)
    with pytest.raises(MemoryError):
        serve(Failing(), storage, [request("a", 20, 4), request("b", 3, 4)], chunk_tokens=8)  # type: ignore[arg-type]  # a stand-in
    assert len(storage.requests.live_rows()) == 2
    storage.release(storage.requests.live_rows())
    storage.verify_idle()
    assert not isinstance(storage.admit([20], [4]), AdmissionRefusal)
