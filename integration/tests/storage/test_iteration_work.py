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
from kvtide.device import IntArray, Stream, UnitGrid
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
from kvtide.sizing import ROW_STATE_BYTES
from kvtide.storage import AdmissionRefusal, KVStorage, PreparedStep, build_kv_storage

ROWS = 64


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


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Counts what torch is asked to do: on a GPU, each is a launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def storage_of(device: type[CPUDevice], arena_bytes: int = 400_000, state_elements: int = 6) -> KVStorage:
    attention = MHAGeometry(1, 2, 2, DType.FLOAT32)
    state = StateGeometry((TensorDecl("recurrent", (state_elements,), DType.FLOAT32),))
    plan = plan_kv_storage(
        [
            KVLayerDecl(0, (KVPart(attention, FullLifetime()), KVPart(state, StateLifetime()))),
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
    )


def iteration(storage: KVStorage, rows: IntArray, tokens: int) -> int:
    """Run one, and count torch's operations between launch and the model's own kernels."""
    step = storage.prepare_step(rows, np.full(len(rows), tokens))
    assert isinstance(step, PreparedStep)
    with CountedOperations() as operations:
        storage.launch_forward(step).resolve()
    storage.record_forward(step)
    storage.forward_processed(step)
    storage.advance(step)
    return operations.count


def admitted(storage: KVStorage, count: int, prompt: int = 10) -> IntArray:
    rows = storage.admit([prompt] * count, [min(20, 40 - prompt)] * count)
    assert not isinstance(rows, AdmissionRefusal)
    return rows


@pytest.mark.requirement("K3", "V1")
def test_launches_and_uploads_of_an_iteration_do_not_grow_with_the_batch() -> None:
    """A launch a request would cost more than the step: one upload brings every table up to date, one translation a band."""
    counts = []
    for batch in (2, 7, ROWS):
        storage = storage_of(CountingDevice)
        device = storage.device
        assert isinstance(device, CountingDevice)
        rows = admitted(storage, batch)
        per_step = []
        for tokens in (10, 1, 1, 1):
            device.calls = Counter()
            operations = iteration(storage, rows, tokens)
            per_step.append((operations, dict(device.calls)))
        counts.append(per_step)
    assert counts[0] == counts[1] == counts[2]
    assert all(calls["upload"] == calls["send"] == 1 for _, calls in counts[0])
    # At most one zeroing a band of pages, and none where no row begins a page.
    assert [calls.get("zero", 0) for _, calls in counts[0]] == [2, 2, 0, 2]


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
