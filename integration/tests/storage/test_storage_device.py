"""What the storage asks of its device, and what it refuses to run on (A3, A6, K3, S1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import structlog
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtide.arena import SCRATCH_BYTES, CPUDevice, KVArena
from kvtide.device import IntArray, Stream
from kvtide.ledger import CheckLevel, InvariantError
from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    MHAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    plan_kv_storage,
)
from kvtide.storage import (
    AdmissionRefusal,
    ForwardIds,
    KVStorage,
    PreparedStep,
    StorageError,
    build_kv_storage,
)


def plan() -> KVStoragePlan:
    attention = MHAGeometry(1, 2, 2, DType.FLOAT32)
    state = StateGeometry((TensorDecl("recurrent", (6,), DType.FLOAT32),))
    parts = (KVPart(attention, FullLifetime()), KVPart(state, StateLifetime()))
    return plan_kv_storage([KVLayerDecl(0, parts)], page_tokens=2)


def build(**options: Any) -> KVStorage:
    return build_kv_storage(
        plan(),
        **{
            "budget_bytes": SCRATCH_BYTES + 20_000,
            "max_running_requests": 4,
            "max_context_tokens": 40,
            "chunk_tokens": 16,
            **options,
        },
    )


def run(storage: KVStorage, before: Callable[[], object] = lambda: None) -> ForwardIds:
    """One request's first chunk; `before` runs between the launch and the forward's metadata phase."""
    rows = storage.admit([5], [3])
    assert not isinstance(rows, AdmissionRefusal)
    step = storage.prepare_step(rows, [5])
    assert isinstance(step, PreparedStep)
    unresolved = storage.launch_forward(step)
    before()
    ids = unresolved.resolve()
    storage.record_forward(step)
    storage.forward_processed(step)
    storage.advance(step)
    storage.release(rows)
    return ids


class NotingDevice(CPUDevice):
    """Knows which stream torch queues on, as a GPU does."""

    current: Stream | None = None

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def send(self, stream: Stream, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        with self.on_stream(stream):
            return super().send(stream, arrays)


class Streams(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Notes on which stream each of torch's operations is queued."""

    def __init__(self, device: NotingDevice | None = None) -> None:
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
        self.calls.append((str(func), self.device.current if self.device else None))
        return func(*args, **kwargs or {})


@pytest.mark.requirement("K3", "K4")
@pytest.mark.parametrize("level", [CheckLevel.OFF, CheckLevel.STRICT])
def test_ids_are_resolved_on_the_forward_stream_whichever_is_torchs_current_one(level: CheckLevel) -> None:
    """Anywhere else nothing orders the look-up behind the upload, or the next upload behind the look-up."""
    storage = build(make_device=NotingDevice, check_level=level)
    device = storage.device
    assert isinstance(device, NotingDevice)
    streams = Streams(device)

    def begin() -> None:
        streams.__enter__()

    run(storage, begin)
    streams.__exit__(None, None, None)
    seen = [stream for _, stream in streams.calls]
    forward = [stream for stream in seen if stream is device.forward_stream]
    assert len(forward) > 5
    # What comes after belongs to the release.
    assert set(seen[: len(forward)]) == {device.forward_stream}


@pytest.mark.requirement("A6")
def test_faults_are_counted_from_zero_and_read_on_the_forward_stream() -> None:
    """Elsewhere the first forward may count into memory that is zeroed later, and the last be read before it has counted."""

    def on_the_forward_stream(level: CheckLevel) -> Counter[str]:
        streams = Streams()

        def watched(arena: KVArena) -> NotingDevice:
            streams.device = NotingDevice(arena)
            return streams.device

        with streams:
            storage = build(make_device=watched, check_level=level)
            storage.verify_idle()
        return Counter(name for name, stream in streams.calls if stream is storage.device.forward_stream)

    with_faults = on_the_forward_stream(CheckLevel.STRICT) - on_the_forward_stream(CheckLevel.OFF)
    assert with_faults == {"aten.zeros.default": 1, "aten._local_scalar_dense.default": 1}


@pytest.mark.requirement("K3")
@pytest.mark.parametrize("level", [CheckLevel.OFF, CheckLevel.STRICT])
def test_a_forwards_ids_are_int64_though_mirrors_are_int32(level: CheckLevel) -> None:
    """A kernel that is given a table by its address reads pairs of narrower ids as one."""
    ids = run(build(check_level=level))
    assert ids.state_slots is not None
    found = [*ids.page_tables.values(), *ids.write_slots.values(), ids.state_slots.slots]
    assert len(found) == 3
    assert {each.dtype for each in found} == {torch.int64}


@pytest.mark.requirement("A6")
def test_an_id_outside_its_table_is_masked_counted_and_told_at_idle() -> None:
    """It would read a neighbour's table, and write its pages; at the levels that look, nobody's bytes are touched."""
    storage = build(check_level=CheckLevel.STRICT)
    run(storage)
    storage.verify_idle()
    ids = run(storage, lambda: storage.device.tables["rows"].view(4, -1)[0, 1].fill_(10**6))
    assert ids.page_tables["full"][0].tolist()[1] == -1
    assert (ids.write_slots["full"][2:4] < 0).all()
    # Two tokens are written there, by what was translated to be read.
    with pytest.raises(InvariantError, match="1 ids of forwards lay outside their tables"):
        storage.verify_idle()

    warned = build(check_level=CheckLevel.WARN)
    run(warned, lambda: warned.device.tables["rows"].view(4, -1)[0, 1].fill_(10**6))
    with structlog.testing.capture_logs() as logs:
        warned.verify_idle()
    assert [each["invariant"] for each in logs] == ["storage.translated_ids"]


@pytest.mark.requirement("A6")
def test_a_state_slot_outside_its_table_is_masked_counted_and_told_at_idle() -> None:
    """A row's state would be read from, and written to, another's."""
    storage = build(check_level=CheckLevel.STRICT)
    rows = storage.admit([5], [3])
    assert not isinstance(rows, AdmissionRefusal)
    step = storage.prepare_step(rows, [5])
    assert isinstance(step, PreparedStep)
    unresolved = storage.launch_forward(step)
    unresolved.state_slots[0] = 10**6
    ids = unresolved.resolve()
    assert ids.state_slots is not None
    assert ids.state_slots.slots.tolist() == [-1]
    storage.record_forward(step)
    storage.forward_processed(step)
    storage.advance(step)
    storage.release(rows)
    with pytest.raises(InvariantError, match="1 ids of forwards lay outside their tables"):
        storage.verify_idle()


@pytest.mark.requirement("S1")
def test_a_device_that_holds_more_than_the_budget_has_for_it_is_refused() -> None:
    """The arena fills the budget to the last byte: what a device takes beside it would not be there."""

    class Larger(CPUDevice):
        @property
        def scratch_bytes(self) -> int:
            return SCRATCH_BYTES + 16

    with pytest.raises(
        StorageError, match=rf"holds {SCRATCH_BYTES + 16} bytes .*, the budget has {SCRATCH_BYTES} for them"
    ):
        build(make_device=Larger)
    roomy = build(make_device=Larger, scratch_bytes=SCRATCH_BYTES + 16, budget_bytes=SCRATCH_BYTES + 20_016)
    assert roomy.layout == build().layout
    assert any(term.byte_count == SCRATCH_BYTES + 16 for term in roomy.sized.fixed)


@pytest.mark.requirement("A3")
def test_kernels_that_cannot_address_the_arena_are_refused_at_start() -> None:
    """Their offsets would wrap to another request's pages, in service, once the arena is full enough."""
    assert build(kernel_offset_bits=32)
    with pytest.raises(ValueError, match="kernels with 12-bit offsets cannot address plane 'recurrent' of"):
        build(kernel_offset_bits=12)
