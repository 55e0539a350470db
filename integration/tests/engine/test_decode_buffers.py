"""Decode at fixed addresses and of fixed shape, as a captured graph needs it (K13): what is filled, and what padding does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtide.arena import SCRATCH_BYTES
from kvtide.engine import paged_attention
from kvtide.engine.attention import PagedRows, attend
from kvtide.engine.batch import ForwardBatch, Padding, inputs_of_host
from kvtide.engine.decode_buffers import DecodeBuffers
from kvtide.engine.forwards import TorchForwards
from kvtide.engine.overlap import serve_overlapped
from kvtide.engine.requests import Request
from kvtide.engine.runner import Hook, ModelRunner
from kvtide.engine.stores import ArenaStore, PlainStore
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
    plan_kv_storage,
)
from kvtide.storage import ForwardIds, KVStorage, PreparedStep, build_kv_storage

RunnerOf = Callable[[str, Hook], ModelRunner]
PAGE_TOKENS, ROWS = 4, 4
DECLARED = (
    KVLayerDecl(0, (KVPart(MHAGeometry(1, 2, 2, DType.FLOAT32), FullLifetime()),)),
    KVLayerDecl(
        1, (KVPart(StateGeometry((TensorDecl("recurrent", (4,), DType.FLOAT32),)), StateLifetime()),)
    ),
)


@pytest.fixture
def storage() -> KVStorage:
    return build_kv_storage(
        plan_kv_storage(DECLARED, page_tokens=PAGE_TOKENS),
        budget_bytes=SCRATCH_BYTES + 20_000,
        max_running_requests=ROWS,
        max_context_tokens=32,
        chunk_tokens=16,
    )


def decode_batch(tokens_before: tuple[int, ...]) -> ForwardBatch:
    rows = range(len(tokens_before))
    return ForwardBatch(
        request_ids=tuple(f"r{row}" for row in rows),
        rows=tuple(rows),
        token_ids=tuple((7 + row,) for row in rows),
        tokens_before=tokens_before,
    )


def resolved(storage: KVStorage, rows: list[int], counts: list[int]) -> ForwardIds:
    """The ids of a step that is then over."""
    step = storage.prepare_step(rows, counts)
    assert isinstance(step, PreparedStep)
    ids = storage.launch_forward(step).resolve()
    storage.record_forward(step)
    storage.forward_processed(step)
    storage.advance(step)
    return ids


def addresses(buffers: DecodeBuffers) -> list[int]:
    assert buffers.ids.state_slots is not None
    tensors = [
        *buffers.ids.write_slots.values(),
        *buffers.ids.page_tables.values(),
        buffers.ids.state_slots.slots,
        buffers.inputs.token_ids,
        buffers.inputs.positions,
    ]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.requirement("K13", "A8")
def test_places_behind_the_rows_name_the_sink_and_no_state(storage: KVStorage) -> None:
    """A step of three rows, then one of one row: at the same addresses, and nothing of the first is left in the second."""
    rows = storage.admit([9, 3, 5], [8, 8, 8])
    assert isinstance(rows, np.ndarray)
    for row, count in zip(rows.tolist(), (9, 3, 5), strict=True):
        resolved(storage, [row], [count])
    buffers = DecodeBuffers(storage)
    before = addresses(buffers)
    for chosen, lengths in ((rows, (9, 3, 5)), (rows[1:2], (4,))):
        ids = resolved(storage, chosen.tolist(), [1] * len(chosen))
        assert ids.state_slots is not None
        buffers.fill(ids, inputs_of_host(decode_batch(lengths)))
        assert addresses(buffers) == before
        padded = ROWS - len(chosen)
        assert buffers.ids.write_slots["full"].tolist() == [*ids.write_slots["full"].tolist(), *[0] * padded]
        table, columns = buffers.ids.page_tables["full"], ids.page_tables["full"].shape[1]
        assert torch.equal(table[: len(chosen), :columns], ids.page_tables["full"])
        assert not table[len(chosen) :].any()
        assert not table[:, columns:].any()
        assert buffers.ids.state_slots is not None
        assert buffers.ids.state_slots.slots.tolist() == [*ids.state_slots.slots.tolist(), *[-1] * padded]
        assert buffers.inputs.positions[:, 0].tolist() == [*lengths, *[0] * padded]
        assert buffers.inputs.token_ids[:, 0].tolist() == [*range(7, 7 + len(chosen)), *[0] * padded]


@pytest.mark.requirement("K13", "A8")
def test_padding_writes_the_sink_and_no_byte_beside(storage: KVStorage) -> None:
    """Its state reads as zeros, whatever other slots hold, and goes nowhere."""
    rows = storage.admit([5], [8])
    assert isinstance(rows, np.ndarray)
    resolved(storage, rows.tolist(), [5])
    ids = resolved(storage, rows.tolist(), [1])
    buffers = DecodeBuffers(storage)
    buffers.fill(ids, inputs_of_host(decode_batch((5,))))
    arena = storage.device.arena.bytes
    arena.view(torch.int8).fill_(1)
    store = ArenaStore(storage).forward(buffers.ids)
    loaded = store.load_state(1)["recurrent"]
    assert loaded[0].any()
    assert not loaded[1:].any()
    before = arena.clone()
    view, state = storage.routed_cache.attention(0), storage.routed_cache.state(1)
    assert view is not None
    assert state is not None
    assert ids.state_slots is not None
    slot = int(ids.write_slots["full"][0])
    for plane in view.planes.values():
        plane[slot // PAGE_TOKENS, slot % PAGE_TOKENS] = 3.0
        plane[0, 0] = 3.0
    state.planes["recurrent"][ids.state_slots.slots] = 5.0
    expected = arena.clone()
    arena.copy_(before)
    entries = torch.full((ROWS, 1, 2), 3.0)
    store.write_tokens(0, {"key": entries, "value": entries})
    store.store_state(1, {"recurrent": torch.full((ROWS, 4), 5.0)})
    assert torch.equal(arena, expected)


@pytest.mark.requirement("K13")
@pytest.mark.parametrize("name", ["gemma3", "granitemoehybrid", "llama4", "lfm2"])
def test_a_padded_batch_gives_its_rows_the_same_logits(runner_of: RunnerOf, name: str) -> None:
    """To within rounding: a batch of another size is multiplied in another order. Whatever padding computes reaches no row."""
    runner = runner_of(name, Hook.PAGES)
    padding = Padding(row_count=7, page_columns=5)
    logits = []
    for shape in (None, padding):
        plain = PlainStore(16)
        for row, length in enumerate((40, 9, 3)):
            prompt = ForwardBatch(
                request_ids=(f"r{row}",),
                rows=(row,),
                token_ids=(tuple(range(5, 5 + length)),),
                tokens_before=(0,),
            )
            runner.run(prompt, plain.forward(prompt))
        batch = decode_batch((40, 9, 3))
        logits.append(runner.run(batch, plain.forward(batch, shape), inputs_of_host(batch, shape)))
    assert logits[0].shape == logits[1].shape
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.requirement("K13", "K3")
def test_every_decode_step_reads_the_same_addresses(
    runner_of: RunnerOf,
    requests_of: Callable[[str], tuple[Request, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows come and go; what attention is called with is of one shape and, but for activations, at one place."""
    runner, requests = runner_of("gpt_oss", Hook.PAGES), requests_of("gpt_oss")[3:9]
    storage = build_kv_storage(
        plan_kv_storage(runner.layers, page_tokens=16),
        budget_bytes=SCRATCH_BYTES + (1 << 20),
        max_running_requests=4,
        max_context_tokens=64,
        chunk_tokens=16,
        policy=OVERLAP,
    )
    calls: set[tuple[object, ...]] = set()
    forwards = 0

    def noted(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PagedRows, **more: object
    ) -> torch.Tensor:
        nonlocal forwards
        if rows.query_tokens == 1 and len(rows.page_table) > 1:
            forwards += 1
            places = (keys, values, rows.page_table, rows.tokens_before)
            calls.add((query.shape, rows.loaded_pages, *(tensor.data_ptr() for tensor in places)))
        return attend(query, keys, values, rows, **more)  # type: ignore[arg-type]  # what it was called with

    monkeypatch.setattr(paged_attention, "attend", noted)
    result = serve_overlapped(runner, storage, TorchForwards(storage.device), requests, chunk_tokens=16)
    sizes = {len(ran.batch.rows) for ran in result.forwards if ran.padding is not None}
    assert sizes >= {1, 2, 3, 4}
    assert forwards > 4 * 20
    assert len(calls) == len(runner.layers), "one call for each layer, in every decode step the same"
