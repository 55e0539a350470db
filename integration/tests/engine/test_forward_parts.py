"""What a forward is made of: declarations, batches, stores, cache layers, page attention."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import attrs
import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvtide.arena import SCRATCH_BYTES
from kvtide.engine.attention import Reach
from kvtide.engine.batch import ForwardBatch
from kvtide.engine.cache import HybridCache, column_positions, columns
from kvtide.engine.declare import KNOWN_LAYERS, declare_layers
from kvtide.engine.errors import EngineError
from kvtide.engine.models import MODELS
from kvtide.engine.paged_attention import attend_pages
from kvtide.engine.runner import Hook, ModelRunner
from kvtide.engine.stores import ArenaStore, ForwardStore, PlainStore
from kvtide.plan import (
    ChunkLifetime,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MHAGeometry,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    from_config,
    plan_kv_storage,
)
from kvtide.storage import KVStorage, PreparedStep, build_kv_storage

RunnerOf = Callable[[str, Hook], ModelRunner]


def decode_batch(tokens_before: tuple[int, ...]) -> ForwardBatch:
    rows = tuple(range(len(tokens_before)))
    return ForwardBatch(
        request_ids=tuple(f"r{row}" for row in rows),
        rows=rows,
        token_ids=tuple((7,) for _ in rows),
        tokens_before=tokens_before,
    )


def chunk(tokens_before: int, count: int, row: int = 0) -> ForwardBatch:
    return ForwardBatch(
        request_ids=(f"r{row}",),
        rows=(row,),
        token_ids=(tuple(range(3, 3 + count)),),
        tokens_before=(tokens_before,),
    )


# --- declarations -------------------------------------------------------------------------------------------------


def mamba_state(columns: int) -> KVPart:
    tensors = (
        TensorDecl("conv", (144, columns), DType.FLOAT32),
        TensorDecl("recurrent", (8, 16, 8), DType.FLOAT32),
    )
    return KVPart(StateGeometry(tensors), StateLifetime())


def test_declarations_are_what_the_cache_of_the_model_holds(runner_of: RunnerOf) -> None:
    """Transformers keeps all four columns of a convolution of width four, where a serving kernel keeps three."""
    attention = MHAGeometry(2, 16, 16, DType.FLOAT32)
    full = KVPart(attention, FullLifetime())
    window = KVPart(attention, WindowLifetime(16))
    latent = KVPart(MLAGeometry(32, 8, DType.FLOAT32), FullLifetime())
    expected = {
        "llama": [(full,)] * 4,
        "gpt_oss": [(window,), (full,)] * 2,
        "deepseek_v3": [(latent,)] * 4,
        "falcon_h1": [(full, mamba_state(4))] * 4,
        "granitemoehybrid": [(mamba_state(4),), (mamba_state(4),), (full,)] * 2,
        "bamba": [(mamba_state(4),), (full,)] * 2,
        "nemotron_h": [(mamba_state(4),), (), (full,), (mamba_state(4),)],
        "llama4": [(KVPart(attention, ChunkLifetime(32)),)] * 3 + [(full,)],
    }
    for name, parts in expected.items():
        assert runner_of(name, Hook.CACHE).layers == tuple(map(KVLayerDecl, range(len(parts)), parts)), name


@pytest.mark.requirement("P7", "X5")
@pytest.mark.parametrize("name", list(MODELS))
def test_declarations_agree_with_those_that_the_config_gives(runner_of: RunnerOf, name: str) -> None:
    """But for the one column of a convolution's state that transformers keeps and a serving kernel does not."""

    def served(part: KVPart) -> KVPart:
        if not isinstance(part.geometry, StateGeometry):
            return part
        tensors = tuple(
            attrs.evolve(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] - 1))
            if tensor.name == "conv"
            else tensor
            for tensor in part.geometry.tensors()
        )
        return KVPart(StateGeometry(tensors), part.lifetime)

    runner = runner_of(name, Hook.CACHE)
    declared = from_config(runner.model.config.to_dict(), kv_dtype=DType.FLOAT32)
    assert declared == tuple(
        KVLayerDecl(decl.layer, tuple(map(served, decl.parts))) for decl in runner.layers
    )


def test_declarations_agree_with_the_declared_types_of_a_bf16_model() -> None:
    """The trained models run in fp32; in bf16, keys are bf16 and recurrent state stays fp32."""
    model = MODELS["qwen3_5"].load().to(torch.bfloat16)
    tensors = {
        tensor.name: tensor.dtype
        for part in declare_layers(model)[0].parts
        for tensor in part.geometry.tensors()
    }
    assert tensors == {"conv": DType.BFLOAT16, "recurrent": DType.FLOAT32}


class LayerWithMore(DynamicLayer):
    """Keeps something a declaration could not name."""


def test_a_cache_layer_that_keeps_more_is_refused(
    monkeypatch: pytest.MonkeyPatch, runner_of: RunnerOf
) -> None:
    def cache_with_more(config: object) -> DynamicCache:
        cache = DynamicCache(config=config)
        cache.layers[2] = LayerWithMore()
        return cache

    monkeypatch.setattr("kvtide.engine.declare.DynamicCache", cache_with_more)
    with pytest.raises(EngineError, match=r"layer 2 keeps a LayerWithMore.*known are DynamicLayer"):
        declare_layers(runner_of("llama", Hook.CACHE).model)
    assert LayerWithMore not in KNOWN_LAYERS


# --- batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": (0,)}, "2 request ids, 1 rows"),
        ({"token_ids": ((1, 2), (3,))}, "many rows with one token each"),
        ({"token_ids": ((1,), ())}, "many rows with one token each"),
        ({"tokens_before": (0, 4)}, "cannot mix rows with and without earlier tokens"),
    ],
)
def test_a_batch_that_transformers_cannot_run_is_refused(fields: dict[str, object], message: str) -> None:
    right: dict[str, object] = {
        "request_ids": ("a", "b"),
        "rows": (0, 1),
        "token_ids": ((1,), (2,)),
        "tokens_before": (3, 4),
    }
    with pytest.raises(EngineError, match=message):
        ForwardBatch(**{**right, **fields})  # type: ignore[arg-type]  # some of them are wrong on purpose


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(EngineError, match="at least one row"):
        ForwardBatch(request_ids=(), rows=(), token_ids=(), tokens_before=())


# --- columns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_tokens", [None, 1, 2, 5])
@pytest.mark.parametrize("query_tokens", [1, 3])
@pytest.mark.parametrize("before", [0, 1, 3, 4, 5, 9])
def test_a_row_alone_has_the_columns_of_transformers_own_cache(
    window_tokens: int | None, query_tokens: int, before: int
) -> None:
    """The mask is built from these figures, so they must be those of the cache that the model was written for."""
    layer = DynamicLayer() if window_tokens is None else DynamicSlidingWindowLayer(window_tokens)
    if before:
        layer.update(torch.zeros(1, 1, before, 2), torch.zeros(1, 1, before, 2))
    batch = chunk(before, query_tokens)
    assert columns(batch, window_tokens) == layer.get_mask_sizes(query_tokens)
    count, first = columns(batch, window_tokens)
    assert column_positions(batch, window_tokens).tolist() == [list(range(first, first + count))]


def test_shorter_rows_are_padded_on_the_left() -> None:
    batch = decode_batch((5, 2))
    assert column_positions(batch, None).tolist() == [[0, 1, 2, 3, 4, 5], [-1, -1, -1, 0, 1, 2]]
    assert column_positions(batch, 3).tolist() == [[3, 4, 5], [0, 1, 2]]


# --- stores -------------------------------------------------------------------------------------------------------

PAGE_TOKENS = 4
DECLARED = (
    KVLayerDecl(0, (KVPart(MHAGeometry(2, 3, 5, DType.FLOAT32), WindowLifetime(6)),)),
    KVLayerDecl(
        1,
        (
            KVPart(MLAGeometry(4, 2, DType.FLOAT32), FullLifetime()),
            KVPart(StateGeometry((TensorDecl("conv", (3, 2), DType.FLOAT32),)), StateLifetime()),
        ),
    ),
)


@pytest.fixture
def storage() -> KVStorage:
    return build_kv_storage(
        plan_kv_storage(DECLARED, page_tokens=PAGE_TOKENS),
        budget_bytes=SCRATCH_BYTES + 20_000,
        max_running_requests=4,
        max_context_tokens=64,
        chunk_tokens=16,
    )


def both_stores(
    storage: KVStorage,
) -> Iterator[tuple[ForwardBatch, PreparedStep, ForwardStore, ForwardStore]]:
    """Two rows: a prefill each, then decode together; the arena's and the plain store of each forward."""
    rows = storage.admit([9, 3], [8, 8])
    assert isinstance(rows, np.ndarray)
    arena, plain = ArenaStore(storage), PlainStore(PAGE_TOKENS)
    batches = [chunk(0, 9, 0), chunk(0, 3, 1), *(decode_batch((9 + step, 3 + step)) for step in range(6))]
    for batch in batches:
        step = storage.prepare_step(batch.rows, batch.counts)
        assert isinstance(step, PreparedStep)
        yield batch, step, arena.forward(storage.launch_forward(step).resolve()), plain.forward(batch)
        storage.record_forward(step)
        storage.forward_processed(step)
        storage.advance(step)


@pytest.mark.requirement("X5")
def test_both_stores_read_the_same(storage: KVStorage, numbers: np.random.Generator) -> None:
    """Columns of the cache hook, whole pages of the other with what is not written yet, and state."""
    shapes = {0: {"key": (2, 3), "value": (2, 5)}, 1: {"latent": (6,)}}

    def drawn(*shape: int) -> torch.Tensor:
        return torch.from_numpy(numbers.standard_normal(shape).astype(np.float32))

    for batch, _, arena, plain in both_stores(storage):
        rows, tokens = len(batch.rows), sum(batch.counts)
        for layer, planes in shapes.items():
            values = {name: drawn(tokens, *shape) for name, shape in planes.items()}
            window_tokens = 6 if layer == 0 else None
            positions = column_positions(batch, window_tokens)
            for store in (arena, plain):
                store.write_tokens(layer, values)
            from_arena, from_plain = (store.read_tokens(layer, positions) for store in (arena, plain))
            pages = [store.pages(layer) for store in (arena, plain)]
            assert pages[0].page_table.shape == pages[1].page_table.shape
            before = torch.tensor(batch.tokens_before)
            # A page may hold tokens behind the window; retired ones differ, and no query sees either.
            seen_from = Reach(window_tokens=window_tokens).first_seen(before)[:, None]
            at = torch.arange(pages[0].page_table.shape[1] * PAGE_TOKENS)
            is_seen = (at >= seen_from) & (at < (before + batch.query_tokens)[:, None])
            for name, shape in planes.items():
                assert torch.equal(from_arena[name], from_plain[name])
                assert from_arena[name].shape == (rows, positions.shape[1], *shape)
                assert torch.equal(
                    from_arena[name][:, -1].flatten(), values[name].view(rows, -1, *shape)[:, -1].flatten()
                )
                in_arena, in_plain = (
                    each.planes[name][each.page_table].flatten(1, 2)[is_seen] for each in pages
                )
                assert torch.equal(in_arena, in_plain)
                assert in_arena.shape == (int(is_seen.sum()), *shape)
        if batch.has_previous_state:
            assert torch.equal(arena.load_state(1)["conv"], plain.load_state(1)["conv"])
        state = {"conv": drawn(rows, 3, 2)}
        for store in (arena, plain):
            store.store_state(1, state)
            assert torch.equal(store.load_state(1)["conv"], state["conv"])


def test_the_plain_store_forgets_what_is_released() -> None:
    plain = PlainStore(PAGE_TOKENS)
    plain.forward(chunk(0, 2))
    plain.forward(chunk(2, 2))
    plain.release("r0")
    with pytest.raises(KeyError):
        plain.forward(chunk(4, 2))


# --- the cache ----------------------------------------------------------------------------------------------------


def test_the_cache_answers_only_within_a_step() -> None:
    cache = HybridCache(DECLARED)
    with pytest.raises(EngineError, match="outside a step"):
        cache.get_seq_length(0)


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


@pytest.mark.requirement("X5")
@pytest.mark.parametrize("hook", list(Hook))
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "falcon_h1"])
def test_no_tensor_outlives_a_step_outside_the_arena(runner_of: RunnerOf, name: str, hook: Hook) -> None:
    """The bytes of a request are in the arena and nowhere else: after a forward, only its logits are new."""
    runner = runner_of(name, hook)
    plan = plan_kv_storage(runner.layers, page_tokens=16)
    storage = build_kv_storage(
        plan,
        budget_bytes=SCRATCH_BYTES + (1 << 20),
        max_running_requests=2,
        max_context_tokens=64,
        chunk_tokens=32,
    )
    store = ArenaStore(storage)
    rows = storage.admit([20], [5])
    assert isinstance(rows, np.ndarray)

    def run(batch: ForwardBatch) -> torch.Tensor:
        step = storage.prepare_step(batch.rows, batch.counts)
        assert isinstance(step, PreparedStep)
        logits = runner.run(batch, store.forward(storage.launch_forward(step).resolve()))
        storage.record_forward(step)
        storage.forward_processed(step)
        storage.advance(step)
        return logits

    run(chunk(0, 20))
    for batch in (decode_batch((20,)), decode_batch((21,))):
        before = live_tensors()
        known = {id(tensor) for tensor in before}
        logits = run(batch)
        new = [tensor for tensor in live_tensors() if id(tensor) not in known]
        assert [(tensor.shape, tensor.dtype) for tensor in new] == [(logits.shape, logits.dtype)]


class BrokenStoreError(Exception):
    """What the store of the next test raises."""


def test_a_forward_that_raises_leaves_the_cache_empty(runner_of: RunnerOf) -> None:
    """Its state is not stored, and the next forward runs."""
    runner = runner_of("qwen3_5", Hook.CACHE)
    plain = PlainStore(16)
    runner.run(chunk(0, 5), plain.forward(chunk(0, 5)))
    right = runner.run(decode_batch((5,)), PlainStoreCopy(plain).forward(decode_batch((5,))))

    class Failing:
        page_tokens = 16

        def __init__(self, store: ForwardStore) -> None:
            self.load_state = store.load_state

        def write_tokens(self, *_: object) -> None:
            raise BrokenStoreError

    with pytest.raises(BrokenStoreError):
        runner.run(decode_batch((5,)), Failing(plain.forward(decode_batch((5,)))))  # type: ignore[arg-type]  # it fails first
    again = runner.run(decode_batch((5,)), plain.forward(decode_batch((5,))))
    assert torch.equal(again, right)


class PlainStoreCopy(PlainStore):
    """What one store holds, to run from there twice."""

    def __init__(self, other: PlainStore) -> None:
        self.__dict__.update(other.__dict__)
        self._requests = {
            request_id: type(request)(dict(request.tokens), dict(request.states))
            for request_id, request in other._requests.items()
        }


# --- page attention -----------------------------------------------------------------------------------------------


def test_page_attention_runs_only_the_families_that_it_computes(runner_of: RunnerOf) -> None:
    with pytest.raises(EngineError, match=r"page attention does not run deepseek_v3; it runs .*gemma3_text"):
        ModelRunner(runner_of("deepseek_v3", Hook.CACHE).model, Hook.PAGES)


def test_a_model_that_drops_keywords_is_named() -> None:
    empty = torch.zeros(1, 1, 1, 1)
    with pytest.raises(EngineError, match="Linear did not pass 'kvtide_step' on"):
        attend_pages(torch.nn.Linear(1, 1), empty, empty, empty, None, 1.0)
