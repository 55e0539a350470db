"""What one iteration asks of the device does not grow with its batch, and the addresses it uses never change (K3, K13, D11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtide.arena import SCRATCH_BYTES, CPUDevice, KVArena
from kvtide.device import Event, IntArray, Stream, UnitGrid
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
from kvtide.sizing import ROW_STATE_BYTES, CheckpointStrategy, ServingPolicy
from kvtide.storage import AdmissionRefusal, KVStorage, PreparedStep, build_kv_storage

ROWS = 64
OPERATIONS = 20
"""Of torch, to launch and resolve a decode step of three bands on a CPU."""


class CountingDevice(CPUDevice):
    """Counts the work that it is asked to do, by method."""

    def __init__(self, arena: KVArena) -> None:
        super().__init__(arena)
        self.calls: Counter[str] = Counter()

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        self.calls["copy"] += 1
        super().copy_units(stream, grid, sources, targets)

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        self.calls["zero"] += 1
        super().zero_units(stream, grid, units)

    def upload(self, stream: Stream) -> int:
        self.calls["upload"] += 1
        return super().upload(stream)

    def send(self, stream: Stream, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        self.calls["send"] += 1
        return super().send(stream, arrays)

    def wait_event(self, stream: Stream, event: Event) -> None:
        self.calls["wait"] += 1
        super().wait_event(stream, event)

    def queue_work(self, stream: Stream, work: Callable[[], None]) -> None:
        self.calls["work"] += 1
        super().queue_work(stream, work)


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Counts what torch is asked to do: on a GPU, each is a launch. Views are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = func._schema.returns
        self.count += all(one.alias_info is None or one.alias_info.is_write for one in results)
        return func(*args, **kwargs or {})


GRID_TOKENS = 4
STRATEGIES = [
    (CheckpointStrategy.NONE, False),
    (CheckpointStrategy.NO_BUFFER, False),
    (CheckpointStrategy.EXTRA_BUFFER, False),
    (CheckpointStrategy.EXTRA_BUFFER, True),
    (CheckpointStrategy.EXTRA_BUFFER_LAZY, True),
]


def storage_of(
    device: type[CPUDevice],
    arena_bytes: int = 400_000,
    state_elements: int = 6,
    policy: ServingPolicy = ServingPolicy(),  # noqa: B008  # a value
) -> KVStorage:
    attention = MHAGeometry(1, 2, 2, DType.FLOAT32)
    state = StateGeometry((TensorDecl("recurrent", (state_elements,), DType.FLOAT32),))
    plan = plan_kv_storage(
        [
            KVLayerDecl(0, (KVPart(attention, FullLifetime()), KVPart(state, StateLifetime(GRID_TOKENS)))),
            KVLayerDecl(1, (KVPart(attention, WindowLifetime(8)),)),
        ],
        page_tokens=2,
    )
    return build_kv_storage(
        plan,
        budget_bytes=SCRATCH_BYTES + ROW_STATE_BYTES * ROWS + arena_bytes,
        max_running_requests=ROWS,
        max_context_tokens=40,
        chunk_tokens=16,
        make_device=device,
        policy=policy,
    )


def iteration(storage: KVStorage, rows: IntArray, tokens: int) -> int:
    """Run one, and count torch's operations from launch to the model's own kernels."""
    step = storage.prepare_step(rows, np.full(len(rows), tokens))
    assert isinstance(step, PreparedStep)
    with CountedOperations() as operations:
        storage.launch_forward(step).resolve()
    storage.record_forward(step)
    storage.forward_processed(step)
    storage.advance(step, [7] * len(rows))
    return operations.count


def admitted(storage: KVStorage, count: int, prompt: int = 10) -> IntArray:
    tokens = [[row] * prompt for row in range(count)]
    rows = storage.admit([prompt] * count, [min(20, 40 - prompt)] * count, prompts=tokens)
    assert not isinstance(rows, AdmissionRefusal)
    return rows


def work_of(storage: KVStorage, rows: IntArray, tokens: int) -> tuple[int, dict[str, int]]:
    """Torch's operations of one iteration, and calls of the device."""
    device = storage.device
    assert isinstance(device, CountingDevice)
    device.calls = Counter()
    operations = iteration(storage, rows, tokens)
    return operations, dict(device.calls)


@pytest.mark.requirement("K1", "K3", "V1")
@pytest.mark.parametrize(
    ("strategy", "overlap"), STRATEGIES, ids=lambda value: getattr(value, "value", value)
)
def test_launches_and_uploads_of_an_iteration_do_not_grow_with_the_batch(
    strategy: CheckpointStrategy, overlap: bool
) -> None:
    """A launch a request would cost more than the step: one upload brings every table up to date, one translation a band; and rows that reach
    a checkpoint together, or were restored together, cost no more than one of them.
    """
    counts = []
    for batch in (2, 7, ROWS):
        storage = storage_of(CountingDevice, policy=ServingPolicy(strategy=strategy, overlap=overlap))
        rows = admitted(storage, batch)
        per_step = [work_of(storage, rows, tokens) for tokens in (8, 2, *[1] * 8)]
        sharing = storage.statistics().sharing
        if sharing is not None:
            # Each row's own: of its first chunk, then of its prompt's end, or of both points of the grid behind that.
            assert sharing.held_units["state"] == batch * (
                2 if strategy is CheckpointStrategy.NO_BUFFER else 3
            )
            assert not any(sharing.stalled_checkpoints.values())
        restored = storage.restore(storage.retract_to_host(rows))
        assert not isinstance(restored, AdmissionRefusal)
        per_step += [work_of(storage, restored, 1), work_of(storage, restored, 1)]
        counts.append(per_step)
    assert counts[0] == counts[1] == counts[2]
    calls = [each for _, each in counts[0]]
    assert all(each["upload"] == each["send"] == 1 for each in calls)
    # At most one zeroing a band of pages, and none where no row begins a page; a slot that is copied onto is not zeroed.
    assert [each.get("zero", 0) for each in calls] == [2, 2, 2, 0, 2, 0, 2, 0, 2, 0, 2, 0]
    copies = {
        CheckpointStrategy.NONE: [0] * 10,
        CheckpointStrategy.NO_BUFFER: [1, 1, *[0] * 8],
    }.get(strategy, [1, 0, 0, 1, 0, 0, 0, 1, 0, 0])
    assert [each.get("copy", 0) for each in calls] == [*copies, 0, 0]
    # The upload, the rows' tables, four for the state slots, seven for each band of pages: five translate, two find what is written.
    assert [operations for operations, _ in counts[0][1:]] == [OPERATIONS] * 11


@pytest.mark.requirement("V1", "A6")
def test_a_rearrangement_moves_each_band_in_one_call() -> None:
    """A call is a launch or two (ADR 8): one for each run, or each page, would cost more than the bytes."""
    storage = storage_of(CountingDevice, arena_bytes=9_000, state_elements=100)
    device, band_count = storage.device, len(storage.layout.bands)
    assert isinstance(device, CountingDevice)
    most = 0
    for first in (0, 1, 0):
        # Short requests fill the arena, every second one leaves, and a long one wants the holes of all bands together.
        short = [storage.admit([2], [1])]
        while not isinstance(short[-1], AdmissionRefusal):
            iteration(storage, short[-1], 2)
            short.append(storage.admit([2], [1]))
        for rows in short[first:-1:2]:
            storage.release(rows)  # type: ignore[arg-type]  # the refusal was the last
        long = admitted(storage, 1, prompt=38)
        for tokens in (16, 16, 6):
            device.calls = Counter()
            before = storage.chain.statistics().moved_units
            iteration(storage, long, tokens)
            moves = storage.chain.statistics().moved_units - before
            assert device.calls["copy"] <= band_count
            assert bool(device.calls["copy"]) == bool(moves)
            most = max(most, moves)
        storage.release(storage.requests.live_rows())
    assert most > band_count


@pytest.mark.requirement("K13", "A2")
def test_tables_and_views_stay_where_they_are() -> None:
    """A captured graph holds addresses: none may change while requests come, grow, move others' pages and go."""
    storage = storage_of(CPUDevice)

    def addresses() -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        tensors = list(storage.device.tables.values())
        for layer in (0, 1):
            for view in storage.routed_cache.views(layer):
                tensors += view.planes.values()
        return [(tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) for tensor in tensors]

    before = addresses()
    assert len(before) == 4 + 5
    for batch in (3, ROWS - 3):
        rows = admitted(storage, batch)
        for tokens in (10, *[1] * 19):
            iteration(storage, rows, tokens)
        if batch > 3:
            storage.release(rows)
    assert addresses() == before
