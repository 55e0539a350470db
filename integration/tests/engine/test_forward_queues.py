"""What a forward queues where, and what becomes of a launch for which there is no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtide.arena import SCRATCH_BYTES, CPUDevice
from kvtide.device import Event, IntArray, Stream
from kvtide.engine.batch import ForwardBatch, ForwardInputs
from kvtide.engine.decode_buffers import DecodeBuffers
from kvtide.engine.errors import EngineError
from kvtide.engine.stores import ForwardStore, Planes
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
from kvtide.sizing import CheckpointStrategy
from kvtide.storage import AdmissionRefusal, KVStorage, build_kv_storage

from .summing import WINDOW, Summing, request, run, storage_of, tokens_of


class NotingDevice(CPUDevice):
    """Knows which stream torch queues on, as a GPU does, and what was told to the device in which order."""

    current: Stream | None = None

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.log: list[tuple[object, ...]] = []

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def record_event(self, stream: Stream) -> Event:
        event = super().record_event(stream)
        self.log.append(("record", stream, event))
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        self.log.append(("wait", stream, event))
        super().wait_event(stream, event)

    def send(self, stream: Stream, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        self.log.append(("send", stream, len(arrays)))
        before, self.current = self.current, None
        sent = super().send(stream, arrays)
        self.current = before
        return sent


class Streams(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Notes on which stream each of torch's operations is queued."""

    def __init__(self, device: NotingDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.calls: list[tuple[str, Stream | None]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls.append((str(func), self.device.current))
        return func(*args, **kwargs or {})


def noting_storage() -> tuple[KVStorage, NotingDevice]:
    storage = storage_of(make_device=NotingDevice)
    assert isinstance(storage.device, NotingDevice)
    return storage, storage.device


class Noting(Summing):
    """Says to the device when it runs."""

    def __init__(self, device: NotingDevice) -> None:
        super().__init__()
        self.device = device

    def run(
        self, batch: ForwardBatch, store: ForwardStore, inputs: ForwardInputs | None = None
    ) -> torch.Tensor:
        self.device.log.append(("model", self.device.current, batch.query_tokens))
        return super().run(batch, store, inputs)


@pytest.mark.requirement("K4")
def test_a_forward_runs_on_the_forward_stream_and_is_waited_for_to_its_read_end_only() -> None:
    """The barrier behind a launch waits for an event that lies before the model: the backend reads no mirror later."""
    storage, device = noting_storage()
    one = request("a", 12, 5)
    assert run(storage, [one], model=Noting(device)).tokens == {"a": tokens_of(one)}
    models = [place for place, (what, *_) in enumerate(device.log) if what == "model"]
    assert len(models) == 6
    assert all(device.log[place][1] is device.forward_stream for place in models)
    for model in models:
        barrier = next(
            entry for entry in device.log[model:] if entry[0] == "wait" and entry[1] is device.schedule_stream
        )
        assert device.log.index(("record", device.forward_stream, barrier[2])) < model


@pytest.mark.requirement("K1", "K4")
def test_a_decode_step_sends_its_ids_and_no_token() -> None:
    """Its tokens are on the device. A chunk's go as ids do, by `send`: a copy of torch's own would have the host wait for the stream."""
    storage, device = noting_storage()
    run(storage, [request("a", 12, 5)], model=Noting(device))
    sent: list[tuple[int, list[int]]] = []
    since: list[int] = []
    for what, stream, value in device.log:
        if what == "send":
            assert stream is device.forward_stream
            assert isinstance(value, int)
            since.append(value)
        if what == "model":
            assert isinstance(value, int)
            sent.append((value, since))
            since = []
    assert sent == [(8, [6, 1]), (4, [6, 1]), *[(1, [6])] * 4]


@pytest.mark.requirement("K1")
def test_a_forward_makes_no_tensor_of_host_data_but_by_sending() -> None:
    """Whatever else makes one on its stream is a copy that a GPU's host waits for, behind the forward that runs."""
    storage, device = noting_storage()
    with Streams(device) as streams:
        run(storage, [request("a", 12, 5)])
    queued = [name for name, stream in streams.calls if stream is device.forward_stream]
    assert "aten.index.Tensor" in queued
    # What torch makes of numbers of the host: one is the zero that a row is reset to, before the first chunk.
    assert queued.count("aten.lift_fresh.default") == 1
    assert queued.index("aten.lift_fresh.default") < queued.index("aten.index.Tensor")


@pytest.mark.requirement("K13")
def test_decode_buffers_are_made_on_the_stream_that_fills_them() -> None:
    """Zeroed on another, they could be zeroed behind their first step, and their memory handed out under the last."""
    storage, device = noting_storage()
    with Streams(device) as streams:
        buffers = DecodeBuffers(storage)
    assert streams.calls
    assert {stream for _, stream in streams.calls} == {device.forward_stream}
    assert buffers.ids.state_slots is not None
    assert buffers.ids.state_slots.slots.tolist() == [-1] * buffers.padding.row_count
    fixed = [*buffers.ids.write_slots.values(), *buffers.ids.page_tables.values()]
    assert not any(tensor.any() for tensor in [*fixed, buffers.inputs.token_ids, buffers.inputs.positions])


# --- no room ------------------------------------------------------------------------------------------------------


class Room(Summing):
    """A model that finds no room at some of its runs, counted from 0: at their beginning, or once everything is written."""

    def __init__(self, none_at: Sequence[int], *, is_at_the_end: bool = False) -> None:
        super().__init__()
        self.none_at = none_at
        self.is_at_the_end = is_at_the_end
        self.runs = 0

    def run(
        self, batch: ForwardBatch, store: ForwardStore, inputs: ForwardInputs | None = None
    ) -> torch.Tensor:
        has_none = self.runs in self.none_at
        self.runs += 1
        if has_none:
            if self.is_at_the_end:
                super().run(batch, store, inputs)
            else:
                super().run(batch, WithoutStates(store), inputs)
            raise torch.OutOfMemoryError("no room for activations")
        return super().run(batch, store, inputs)


class WithoutStates:
    """A store whose model never gets so far as to store a state."""

    def __init__(self, store: ForwardStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def store_state(self, layer: int, values: Planes) -> None:
        pass


@pytest.mark.requirement("K1", "K2")
@pytest.mark.parametrize("none_at", [(3,), (4, 6), (3, 7, 9)])
def test_a_model_without_room_runs_again_once_the_forward_before_is_over(none_at: tuple[int, ...]) -> None:
    """Torch says so while the forward is launched, and its other errors later; the tokens that it has written are written again."""
    storage = storage_of()
    requests = [request("a", 4, 9), request("bb", 11, 6)]
    result = run(storage, requests, model=Room(none_at))
    assert result.tokens == {one.request_id: tokens_of(one) for one in requests}
    assert storage.statistics().aborted_launches == len(none_at)
    storage.verify_idle()


@pytest.mark.requirement("K1")
def test_a_model_without_room_beside_nothing_ends_the_run() -> None:
    """There will be no more room at another try, and there must not be one for ever."""
    storage = storage_of()
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        run(storage, [request("a", 4, 9)], model=Room(range(100)))
    assert storage.statistics().aborted_launches == 1
    storage.release(storage.requests.live_rows())
    storage.verify_idle()


@pytest.mark.requirement("K1", "K2", "K5")
@pytest.mark.parametrize("none_at", [(1,), (3,), (4,), (7,)])
def test_requests_whose_states_an_aborted_forward_has_stored_begin_anew(none_at: tuple[int, ...]) -> None:
    """Run again, it would begin with the states of its own end. So its rows are retracted, and compute again what they had."""
    storage = storage_of()
    requests = [request("a", 4, 9), request("bb", 11, 6)]
    result = run(storage, requests, model=Room(none_at, is_at_the_end=True))
    assert result.tokens == {one.request_id: tokens_of(one) for one in requests}
    statistics = storage.statistics()
    assert statistics.aborted_launches == len(none_at)
    assert statistics.admission.retracted_requests >= len(none_at)
    assert statistics.backups.backed_up_requests == 0, "what would be kept is spoilt"
    storage.verify_idle()


class NoneBeside(Room):
    """A model that finds no room while another forward is in flight, `times` times from one of its runs on."""

    def __init__(self, storage: KVStorage, *, is_at_the_end: bool, first: int = 0, times: int = 1000) -> None:
        super().__init__((), is_at_the_end=is_at_the_end)
        self.storage = storage
        self.first = first
        self.times = times

    def run(
        self, batch: ForwardBatch, store: ForwardStore, inputs: ForwardInputs | None = None
    ) -> torch.Tensor:
        assert self.runs < 200, "it goes on for ever"
        if self.runs >= self.first and self.times and self.storage.statistics().forwards_in_flight > 1:
            self.none_at = [self.runs]
            self.times -= 1
        return super().run(batch, store, inputs)


@pytest.mark.requirement("K1", "K2", "K5")
@pytest.mark.parametrize("is_at_the_end", [False, True])
@pytest.mark.parametrize(
    "lengths", [((20, 4),), ((4, 3),), ((4, 9),), ((4, 9), (11, 6)), ((20, 9), (3, 14), (17, 2), (1, 1))]
)
def test_requests_end_though_no_forward_ever_finds_room_beside_another(
    lengths: Sequence[tuple[int, int]], is_at_the_end: bool
) -> None:
    """What has to be computed again must not meet again what it failed of; each request is retracted once at most."""
    storage = storage_of()
    requests = [
        request("r" * place, prompt, output) for place, (prompt, output) in enumerate(lengths, start=1)
    ]
    result = run(storage, requests, model=NoneBeside(storage, is_at_the_end=is_at_the_end))
    assert result.tokens == {one.request_id: tokens_of(one) for one in requests}
    retracted = storage.statistics().admission.retracted_requests
    assert retracted <= len(requests)
    assert bool(retracted) == is_at_the_end
    storage.verify_idle()


def on_a_grid(arena_bytes: int) -> KVStorage:
    """Two forwards and checkpoints on a grid of 8 tokens: a chunk of a prompt needs more than as many tokens of output."""
    geometry = MHAGeometry(1, 1, 1, DType.FLOAT32)
    state = StateGeometry((TensorDecl("s", (4,), DType.FLOAT32),))
    layers = (
        KVLayerDecl(0, (KVPart(geometry, WindowLifetime(WINDOW)),)),
        KVLayerDecl(1, (KVPart(geometry, FullLifetime()),)),
        KVLayerDecl(2, (KVPart(state, StateLifetime(8)),)),
    )
    return build_kv_storage(
        plan_kv_storage(layers, page_tokens=2),
        budget_bytes=SCRATCH_BYTES + arena_bytes,
        max_running_requests=3,
        max_context_tokens=80,
        chunk_tokens=16,
        policy=attrs.evolve(OVERLAP, strategy=CheckpointStrategy.EXTRA_BUFFER),
    )


@pytest.mark.requirement("K1", "K5")
@pytest.mark.parametrize("prompt_tokens", [2, 3, 9])
@pytest.mark.parametrize("arena_bytes", [1280, 1440])
def test_what_was_admitted_can_be_computed_again_whenever_a_launch_has_no_room(
    arena_bytes: int, prompt_tokens: int
) -> None:
    """As a longer prompt it would not always be admitted, not even alone: what it generated must not be lost with that, nor the request."""
    output_tokens = on_a_grid(arena_bytes).max_new_tokens_for_memory(prompt_tokens)
    one = request("a", prompt_tokens, output_tokens)
    for first in range(output_tokens + 2):
        storage = on_a_grid(arena_bytes)
        result = run(storage, [one], model=NoneBeside(storage, is_at_the_end=True, first=first, times=1))
        assert result.tokens == {"a": tokens_of(one)}, (first, result.rejected)
        storage.verify_idle()


@pytest.mark.requirement("K5")
def test_a_prompt_that_would_need_more_than_its_request_was_promised_is_tried() -> None:
    """Else the test above would show nothing."""
    storage = on_a_grid(1280)
    most = storage.max_new_tokens_for_memory(2)
    assert most > 8
    assert any(storage.arrival_refusal(2 + count, most - count) for count in range(1, most))


@pytest.mark.requirement("K5")
def test_a_retracted_request_that_cannot_go_on_ends_the_run() -> None:
    """By none of the storage's promises can it be; should it be, what it has generated is not dropped without a word."""
    storage = storage_of()
    refused = AdmissionRefusal(rule="no room any more", waits_for=(), turned_away=(0,))
    admit = storage.admit

    def admitted(*lengths: Any, whole: bool, **more: Any) -> Any:
        return refused if whole else admit(*lengths, whole=whole, **more)

    storage.admit = admitted  # type: ignore[method-assign]
    with pytest.raises(
        EngineError, match=r"'a' was retracted with 3 generated tokens, and cannot go on: no room"
    ):
        run(storage, [request("a", 4, 9)], model=Room((3,), is_at_the_end=True))
    storage.verify_idle()


@pytest.mark.requirement("K1")
def test_forwards_run_beside_one_another_again_once_the_retracted_request_is_over() -> None:
    """Want of room may be a moment's."""
    storage = storage_of()
    model = Room((3,), is_at_the_end=True)
    beside: list[int] = []

    class Noted(Room):
        def run(
            self, batch: ForwardBatch, store: ForwardStore, inputs: ForwardInputs | None = None
        ) -> torch.Tensor:
            beside.append(storage.statistics().forwards_in_flight)
            return model.run(batch, store, inputs)

    requests = [request("a", 4, 9), request("bb", 11, 6, arrival_step=60)]
    result = run(storage, requests, model=Noted(()))
    assert result.tokens == {one.request_id: tokens_of(one) for one in requests}
    failed = 3
    again = len(beside) - 7
    assert beside[failed] == 2
    assert set(beside[failed + 1 : again]) == {1}, "the retracted request, alone"
    assert set(beside[again + 1 :]) == {2}, "the one that comes later"


@pytest.mark.requirement("K1", "K2")
def test_a_request_that_finds_no_room_by_itself_either_ends_the_run() -> None:
    """It was retracted, and computed again with nothing beside it: there will be no more room."""
    storage = storage_of()
    model = Room(range(3, 100), is_at_the_end=True)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        run(storage, [request("a", 4, 9)], model=model)
    assert model.runs == 5
    assert storage.statistics().admission.retracted_requests == 1
    assert storage.statistics().forwards_in_flight == 0
    storage.release(storage.requests.live_rows())
    storage.verify_idle()


@pytest.mark.requirement("K1", "K2")
def test_states_that_were_stored_beside_nothing_end_the_run() -> None:
    """There will be no more room at another try; and the rows that are left know that their states are lost."""
    storage = storage_of()
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        run(storage, [request("a", 4, 9)], model=Room(range(100), is_at_the_end=True))
    rows = storage.requests.live_rows()
    assert storage.requests.state_is_lost[rows].all()
    storage.release(rows)
    storage.verify_idle()


def test_an_interrupt_is_heard_at_once() -> None:
    """It is nobody's result: waiting for one, whoever stops the program would look at another step."""

    class Interrupted(Summing):
        def run(
            self, batch: ForwardBatch, store: ForwardStore, inputs: ForwardInputs | None = None
        ) -> torch.Tensor:
            if batch.tokens_before[0]:
                raise KeyboardInterrupt
            return super().run(batch, store, inputs)

    storage = storage_of()
    with pytest.raises(KeyboardInterrupt):
        run(storage, [request("a", 4, 9)], model=Interrupted())
    assert storage.statistics().aborted_launches == 1
    assert storage.statistics().forwards_in_flight == 0
