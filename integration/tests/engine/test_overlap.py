"""The overlap loop as a scheduler: what is launched when, and how requests end under a running forward."""

from __future__ import annotations

import random

import attrs
import pytest
import torch

from kvtide.engine.batch import FUTURE_TOKEN, ForwardBatch, ForwardInputs
from kvtide.engine.errors import EngineError
from kvtide.engine.forwards import LaunchedForward, ModelledForwards
from kvtide.engine.hand_off import HandBack, HandOff
from kvtide.engine.loop import StepReport, serve
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.engine.runner import Hook
from kvtide.engine.stores import ForwardStore
from kvtide.engine.workload import PLAIN
from kvtide.storage import KVStorage, PreparedStep, SharedReadEnds

from .summing import Summing, WithHostInputs, drawn_requests, request, run, storage_of, tokens_of


@pytest.mark.requirement("K1", "K2", "K4")
@pytest.mark.parametrize("declares", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_its_tokens_whatever_runs_when(seed: int, declares: bool) -> None:
    """Rows are reused under running forwards, requests end by stops, lengths and cancelled clients; no byte is wrong."""
    storage = storage_of(3_400, seed=seed)
    requests = drawn_requests(random.Random(seed))
    result = run(storage, requests, queue=ModelledForwards(storage, declares_read_end=declares))
    for one in requests:
        name, expected = one.request_id, tokens_of(one)
        if name in result.cancelled:
            assert result.cancelled[name] == expected[: len(result.cancelled[name])]
        else:
            assert result.tokens[name] == expected
    storage.verify_idle()
    assert len(result.tokens) + len(result.cancelled) == len(requests)


@pytest.mark.requirement("K1")
def test_both_loops_give_the_same_tokens() -> None:
    """On a device that does everything at once, too; the plain loop is the simpler one to believe."""
    requests = [attrs.evolve(one, cancelled_step=None) for one in drawn_requests(random.Random(7))]
    plain = serve(WithHostInputs(), storage_of(policy=PLAIN), requests, chunk_tokens=8)  # type: ignore[arg-type]  # a stand-in
    assert run(storage_of(), requests).tokens == plain.tokens


@pytest.mark.requirement("K1", "K4")
def test_a_forward_is_launched_before_the_last_one_is_processed() -> None:
    """A decode's input is then not known to the host; the device has it."""
    storage = storage_of(seed=1)
    flying: list[int] = []
    model = Summing()

    class Noting:
        def __init__(self) -> None:
            self.queue = ModelledForwards(storage)
            self.tokens: list[tuple[tuple[int, ...], ...]] = []

        def launch(self, forward: LaunchedForward, step: PreparedStep) -> SharedReadEnds:
            flying.append(storage.statistics().forwards_in_flight)
            self.tokens.append(forward.batch.token_ids)
            return self.queue.launch(forward, step)

    queue = Noting()
    result = run(storage, [request("a", 20, 6)], queue=queue, model=model)
    assert flying == [1, 2, 2, 2, 2, 2, 2, 2], "the launch itself, and the forward before"
    assert queue.tokens[3:] == [((FUTURE_TOKEN,),)] * 5
    fed = [int(inputs.token_ids[0, 0]) for inputs in model.inputs[3:]]
    assert tuple(fed) == result.tokens["a"][:5]
    assert [ran.batch.token_ids for ran in result.forwards][3:] == [((token,),) for token in fed]


def test_prefill_chunks_and_decode_batches_take_turns() -> None:
    result = run(storage_of(), [request("a", 2, 9), request("bb", 20, 2)])
    shapes = [(ran.batch.request_ids, ran.batch.counts) for ran in result.forwards]
    assert shapes[:6] == [
        (("a",), (2,)),
        (("a",), (1,)),
        (("bb",), (8,)),
        (("a",), (1,)),
        (("bb",), (8,)),
        (("a",), (1,)),
    ]
    assert (("a", "bb"), (1, 1)) in shapes


@pytest.mark.requirement("K2")
def test_a_row_is_handed_on_while_the_last_forward_of_its_former_request_runs() -> None:
    """The new request begins at position 0 with its own tokens, though that forward counts the row's tokens up at its end."""
    first = request("a", 4, 9)
    stopped = attrs.evolve(first, stops=(tokens_of(first)[3:4],))
    second = request("bb", 6, 5)
    storage = storage_of(seed=3, rows=1)
    result = run(storage, [stopped, second])
    last = [ran.batch.request_ids for ran in result.forwards].index(("bb",)) - 1
    assert result.forwards[last].batch.tokens_before[0] == 4 + len(tokens_of(stopped)) - 1
    assert result.tokens == {"a": tokens_of(stopped), "bb": tokens_of(second)}
    assert len(result.tokens["a"]) == 4, "and it was in one forward more"


def test_the_observer_sees_who_ends_and_who_goes_away() -> None:
    reports: list[StepReport] = []
    result = run(
        storage_of(),
        [request("a", 2, 3), request("bb", 2, 50, cancelled_step=5), request("ccc", 2, 2, arrival_step=8)],
        reports=reports,
    )
    assert [name for report in reports for name in report.finished] == ["a", "bb", "ccc"]
    assert "bb" in reports[5].finished
    assert set(result.cancelled) == {"bb"}
    assert len(reports) == result.step_count


def test_a_client_that_goes_away_while_waiting_was_never_there() -> None:
    requests = [request("a", 2, 12), request("bb", 2, 3, cancelled_step=2)]
    for storage, serve_it in (
        (storage_of(rows=1), run),
        (
            storage_of(rows=1, policy=PLAIN),
            lambda storage, requests: serve(Constant(), storage, requests, chunk_tokens=8),  # type: ignore[arg-type]  # a stand-in
        ),
    ):
        result = serve_it(storage, requests)
        assert set(result.tokens) == {"a"}
        assert result.cancelled == {"bb": ()}
        storage.verify_idle()


class Constant:
    """A model whose next token is always 1."""

    hook = Hook.CACHE

    def run(self, batch: ForwardBatch, store: ForwardStore) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.ones(len(batch.rows), dtype=torch.long), 3).float()


# --- what goes wrong ----------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Failing:
    """A queue on which every third launch beside a running forward fails, before or behind its metadata phase."""

    queue: ModelledForwards
    storage: KVStorage
    device: ModelledTensorDevice
    error: type[Exception]
    count: list[int] = attrs.field(factory=lambda: [0])

    def launch(self, forward: LaunchedForward, step: PreparedStep) -> SharedReadEnds:
        runs_beside = self.storage.statistics().forwards_in_flight > 1
        self.count[0] += runs_beside
        if runs_beside and self.count[0] % 3 == 0:
            if self.count[0] % 2:
                self.device.submit("metadata of an aborted launch", run=forward.resolve)
            raise self.error("no room for activations")
        return self.queue.launch(forward, step)


def failing(storage: KVStorage, error: type[Exception]) -> Failing:
    assert isinstance(storage.device, ModelledTensorDevice)
    return Failing(ModelledForwards(storage), storage, storage.device, error)


@pytest.mark.requirement("K1", "K2", "A5")
@pytest.mark.parametrize("seed", range(3))
def test_an_aborted_launch_is_tried_again_once_the_forward_before_is_over(seed: int) -> None:
    """Its tokens, pages, row resets and debts of zeroing are as if it had not been."""
    storage = storage_of(3_400, seed=seed)
    requests = [attrs.evolve(one, cancelled_step=None) for one in drawn_requests(random.Random(seed))]
    result = run(storage, requests, queue=failing(storage, torch.OutOfMemoryError))
    assert result.tokens == {one.request_id: tokens_of(one) for one in requests}
    assert storage.statistics().aborted_launches > 3
    storage.verify_idle()


@pytest.mark.requirement("C7")
def test_holes_are_closed_behind_a_result_that_is_processed_early() -> None:
    """The first request leaves holes; nothing runs once the launch beside the last forward was aborted."""
    storage = storage_of(seed=0)
    requests = [request("a", 16, 2), request("bb", 16, 20)]
    result = run(storage, requests, queue=failing(storage, torch.OutOfMemoryError))
    assert storage.statistics().flushed_units > 0
    assert result.tokens == {one.request_id: tokens_of(one) for one in requests}


def test_a_launch_that_fails_otherwise_ends_the_run_and_leaves_the_storage_usable() -> None:
    """With nothing in flight, and rows that can be released."""
    storage = storage_of(seed=0)
    with pytest.raises(ValueError, match="no room"):
        run(storage, [request("a", 20, 4), request("bb", 3, 4)], queue=failing(storage, ValueError))
    assert storage.statistics().forwards_in_flight == 0
    storage.release(storage.requests.live_rows())
    storage.verify_idle()


@pytest.mark.parametrize("seed", [None, 0])
def test_a_model_that_raises_is_heard_when_its_result_is_looked_at(seed: int | None) -> None:
    """As an error of a device is; what was in flight has ended by then."""

    class Raising(Summing):
        def run(
            self, batch: ForwardBatch, store: ForwardStore, inputs: ForwardInputs | None = None
        ) -> torch.Tensor:
            if batch.tokens_before[0] >= 8:
                raise ArithmeticError("overflow")
            return super().run(batch, store, inputs)

    storage = storage_of(seed=seed)
    with pytest.raises(ArithmeticError, match="overflow"):
        run(storage, [request("a", 20, 4)], model=Raising())
    assert storage.statistics().forwards_in_flight == 0
    storage.release(storage.requests.live_rows())
    storage.verify_idle()


def test_a_device_that_disagrees_with_the_host_about_a_row_is_found() -> None:
    """Row state that another forward wrote would be a wrong position next; the result brings it along."""

    class Meddling(Summing):
        def run(
            self, batch: ForwardBatch, store: ForwardStore, inputs: ForwardInputs | None = None
        ) -> torch.Tensor:
            storage.row_state.lengths += 1
            return super().run(batch, store, inputs)

    storage = storage_of()
    with pytest.raises(
        EngineError, match=r"request 'a' in row 0: the device counts 5 tokens and 1 chosen, the host 4 and 1"
    ):
        run(storage, [request("a", 4, 4)], model=Meddling())


def test_a_storage_that_prices_one_forward_is_refused() -> None:
    with pytest.raises(EngineError, match=r"needs a storage that prices two forwards in flight"):
        run(storage_of(policy=PLAIN), [request("a", 2, 2)])


def test_an_empty_stop_sequence_is_refused() -> None:
    with pytest.raises(EngineError, match="'a' has an empty stop sequence"):
        run(storage_of(), [request("a", 2, 2, stops=((),))])


# --- hand-off -----------------------------------------------------------------------------------------------------


def test_a_body_runs_in_pieces_and_in_order() -> None:
    """Between two pieces others run; told to finish, it hands nothing back."""
    seen: list[str] = []

    def body(hand_back: HandBack) -> None:
        for place in range(4):
            seen.append(f"body {place}")
            hand_back()

    run_of_body = HandOff(body)
    assert seen == []
    run_of_body.advance()
    seen.append("other")
    run_of_body.advance()
    seen.append("other")
    run_of_body.finish()
    run_of_body.advance()
    assert seen == ["body 0", "other", "body 1", "other", "body 2", "body 3"]


def test_what_a_body_raises_is_raised_where_it_is_told_to_go_on() -> None:
    def body(hand_back: HandBack) -> None:
        hand_back()
        raise LookupError("lost")

    run_of_body = HandOff(body)
    run_of_body.advance()
    with pytest.raises(LookupError, match="lost"):
        run_of_body.advance()
