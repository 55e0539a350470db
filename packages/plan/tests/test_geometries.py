"""What real models of 2025 and 2026 store, tensor by tensor and byte by byte (P6)."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.plan import (
    KV_FORMATS,
    ChunkLifetime,
    CompressedGeometry,
    DType,
    FullLifetime,
    Geometry,
    IndexerKeys,
    KVLayerDecl,
    KVPart,
    Lifetime,
    MHAGeometry,
    MLAGeometry,
    PlanError,
    Quantization,
    StateGeometry,
    StateLifetime,
    SubPoolKind,
    TensorDecl,
    WindowLifetime,
    from_config,
    page_multiple,
    plan_kv_storage,
)

from .published import DEEPSEEK_V3, DEEPSEEK_V4_FLASH, DEEPSEEK_V32, GEMMA4_E2B, LLAMA_31_8B

BF16 = DType.BFLOAT16
PER_HEAD = Quantization(scale_dtype=DType.FLOAT32)


def tensors_of(geometry: Geometry) -> list[tuple[str, tuple[int, ...], DType]]:
    return [(tensor.name, tensor.shape, tensor.dtype) for tensor in geometry.tensors()]


def layer(index: int, geometry: Geometry, lifetime: Lifetime) -> KVLayerDecl:
    return KVLayerDecl(index, (KVPart(geometry, lifetime),))


@pytest.mark.requirement("P6")
def test_keys_that_are_values_are_stored_once() -> None:
    """A second tensor would hold the same bytes: half of Gemma 4's global layers."""
    assert tensors_of(MHAGeometry(2, 512, 512, BF16, one_tensor=True)) == [("key_value", (2, 512), BF16)]
    with pytest.raises(PlanError, match="needs key_dim = value_dim, found 192 and 128"):
        MHAGeometry(2, 192, 128, BF16, one_tensor=True)


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("rope_dim", [0, 1, 64])
def test_a_latent_has_a_rotary_key_of_any_width(rope_dim: int) -> None:
    """In one tensor with it, or apart where it stays unquantised; of width 0 there is none to keep apart."""
    assert tensors_of(MLAGeometry(512, rope_dim, BF16)) == [("latent", (512 + rope_dim,), BF16)]
    apart = tensors_of(MLAGeometry(512, rope_dim, DType.FLOAT8_E4M3, rope_dtype=BF16))
    assert apart == [
        ("latent", (512,), DType.FLOAT8_E4M3),
        *([("rope", (rope_dim,), BF16)] if rope_dim else []),
    ]


@pytest.mark.requirement("P6")
@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("bfloat16", 2 * 8 * 128 * 2),
        ("fp8", 2 * 8 * 128),
        ("fp8_per_head", 2 * 8 * (128 + 4)),
        ("mxfp8", 2 * 8 * (128 + 128 // 32)),
        ("mxfp4", 2 * 8 * (128 // 2 + 128 // 32)),
        ("nvfp4", 2 * 8 * (128 // 2 + 128 // 16)),
    ],
)
def test_scales_lie_beside_quantised_keys_and_values(name: str, bytes_per_token: int) -> None:
    """Forgotten scales are 3 to 12 % of the cache; a scale for a whole tensor lies with the weights and costs nothing here."""
    geometry = KV_FORMATS[name].mha(8, 128, 128)
    assert sum(tensor.byte_count for tensor in geometry.tensors()) == bytes_per_token
    plan = plan_kv_storage(from_config(LLAMA_31_8B, kv_dtype=KV_FORMATS[name]), page_tokens=16)
    assert plan.sub_pool("full").payload_bytes_per_token == 32 * bytes_per_token


@pytest.mark.requirement("P6")
def test_each_scale_lies_right_behind_what_it_scales() -> None:
    """Kernels read both at once; one plane holds one element type."""
    assert tensors_of(MHAGeometry(4, 64, 32, DType.FLOAT8_E4M3, quantization=PER_HEAD)) == [
        ("key", (4, 64), DType.FLOAT8_E4M3),
        ("key_scale", (4, 1), DType.FLOAT32),
        ("value", (4, 32), DType.FLOAT8_E4M3),
        ("value_scale", (4, 1), DType.FLOAT32),
    ]


@pytest.mark.requirement("P6")
@pytest.mark.parametrize(
    ("name", "latent_dim", "row"), [("fp8_ds_mla", 512, 512 + 4 * 4 + 128), ("fp8_ds_v4", 448, 448 + 128 + 8)]
)
def test_deepseeks_rows_keep_the_rotary_key_in_bf16(name: str, latent_dim: int, row: int) -> None:
    """656 bytes for sparse MLA, 584 for V4, of which one byte pads seven scales to eight."""
    geometry = KV_FORMATS[name].mla(latent_dim, 64)
    assert sum(tensor.byte_count for tensor in geometry.tensors()) == row


@pytest.mark.requirement("P6")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: KV_FORMATS["mxfp8"].mha(8, 80, 80), "width of 'key' = 80 is no multiple of the 32 elements"),
        (lambda: KV_FORMATS["mxfp4"].mha(8, 65, 65), "width of 'key' = 65 does not pack 2 elements a byte"),
        (lambda: KV_FORMATS["fp8_ds_mla"].mha(8, 128, 128), "KV format 'fp8_ds_mla' is for latents"),
        (lambda: KV_FORMATS["fp8_ds_mla"].mla(500, 64), "width of 'latent' = 500 is no multiple of the 128"),
        (
            lambda: Quantization(block_elements=0),
            "Quantization.block_elements must be a positive integer, found 0",
        ),
        (lambda: IndexerKeys(0, BF16), "IndexerKeys.dim must be a positive integer, found 0"),
        (lambda: ChunkLifetime(-1), "ChunkLifetime.chunk_tokens must be a positive integer, found -1"),
        (
            lambda: CompressedGeometry(MLAGeometry(8, 0, BF16), 0),
            "CompressedGeometry.tokens_per_entry must be a positive integer, found 0",
        ),
    ],
)
def test_a_geometry_that_cannot_be_is_refused_in_one_line(make: Any, text: str) -> None:
    """Where it is written, naming the number."""
    with pytest.raises(PlanError) as caught:
        make()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.requirement("P6", "P2")
def test_indexer_keys_lie_beside_the_latent_in_one_page() -> None:
    """One id serves both, and layers that reuse another's choice have none; both kinds are MLA."""
    indexed = MLAGeometry(8, 4, BF16, indexer=IndexerKeys(6, DType.FLOAT8_E4M3, DType.FLOAT32))
    layers = [layer(0, indexed, FullLifetime()), layer(1, MLAGeometry(8, 4, BF16), FullLifetime())]
    (pool,) = plan_kv_storage(layers, page_tokens=2).sub_pools
    assert [(plane.layer, plane.name, plane.shape) for plane in pool.unit.planes] == [
        (0, "latent", (2, 12)),
        (0, "index_key", (2, 6)),
        (0, "index_key_scale", (2, 1)),
        (1, "latent", (2, 12)),
    ]
    assert from_config(DEEPSEEK_V32)[0].parts[0].geometry.tensors()[1:] == (
        TensorDecl("index_key", (128,), DType.FLOAT8_E4M3),
        TensorDecl("index_key_scale", (1,), DType.FLOAT32),
    )


@pytest.mark.requirement("P6", "P3")
def test_chunks_are_a_lifetime_of_their_own_between_state_and_full() -> None:
    """A finished chunk retires whole, so its pages cannot be a window's; of equal lengths the window comes first."""
    mha = MHAGeometry(1, 8, 8, BF16)
    layers = [
        layer(0, mha, FullLifetime()),
        layer(1, mha, ChunkLifetime(64)),
        layer(2, mha, WindowLifetime(64)),
        layer(3, mha, ChunkLifetime(128)),
        layer(4, mha, WindowLifetime(32)),
    ]
    plan = plan_kv_storage(layers, page_tokens=4)
    assert [pool.name for pool in plan.sub_pools] == [
        "chunk-128",
        "window-64",
        "chunk-64",
        "window-32",
        "full",
    ]
    chunk = plan.sub_pool("chunk-64")
    assert (chunk.kind, chunk.chunk_tokens, chunk.window_tokens) == (SubPoolKind.CHUNK, 64, None)
    assert (chunk.retained_tokens, plan.sub_pool("window-32").retained_tokens) == (63, 31)


@pytest.mark.requirement("P6")
def test_a_layer_that_shares_stores_nothing_and_says_whose_entries_it_reads() -> None:
    """Gemma 4 E2B: the last 20 of 35 layers read the last full and the last window layer before them."""
    decls = from_config(GEMMA4_E2B)
    plan = plan_kv_storage(decls, page_tokens=16)
    assert plan.sub_pool("full").layers == (4, 9, 14)
    assert dict(plan.shared_layers) == {index: 14 if index % 5 == 4 else 13 for index in range(15, 35)}
    assert all(not decl.parts for decl in decls[15:])


@pytest.mark.requirement("P6")
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (7, "layer 2 shares layer 7's entries, which is not declared"),
        (1, "layer 2 shares layer 1's entries, which stores no attention"),
        (2, "layer 2 shares layer 2's entries, which stores no attention"),
    ],
)
def test_sharing_what_is_not_there_is_refused(source: int, text: str) -> None:
    """The reader would find no plane, in the middle of a forward."""
    state = StateGeometry((TensorDecl("conv", (4,), BF16),))
    layers = [
        layer(0, MHAGeometry(1, 8, 8, BF16), FullLifetime()),
        layer(1, state, StateLifetime()),
        KVLayerDecl(2, (), shares_layer=source),
    ]
    with pytest.raises(PlanError) as caught:
        plan_kv_storage(layers, page_tokens=4)
    assert str(caught.value) == text


@pytest.mark.requirement("P6")
def test_a_layer_has_attention_of_its_own_or_shares() -> None:
    """Both would leave open which of them a kernel reads."""
    part = KVPart(MHAGeometry(1, 8, 8, BF16), FullLifetime())
    with pytest.raises(PlanError, match="layer 3 declares attention of its own and shares layer 1's"):
        KVLayerDecl(3, (part,), shares_layer=1)


@pytest.mark.requirement("P6")
def test_a_compressed_chain_has_one_entry_for_its_stride_and_a_page_of_whole_entries() -> None:
    """DeepSeek V4: 32 and 1 entries in a page of 128 tokens, and a window of single tokens beside them."""
    plan = plan_kv_storage(from_config(DEEPSEEK_V4_FLASH), page_tokens=128)
    full = [plane for plane in plan.sub_pool("full").unit.planes if plane.layer in (2, 3)]
    assert [(plane.layer, plane.name, plane.shape) for plane in full] == [
        (2, "latent", (32, 448)),
        (2, "latent_scale", (32, 8)),
        (2, "rope", (32, 64)),
        (2, "index_key", (32, 128)),
        (2, "index_key_scale", (32, 1)),
        (3, "latent", (1, 448)),
        (3, "latent_scale", (1, 8)),
        (3, "rope", (1, 64)),
    ]
    window = plan.sub_pool("window-128").unit.planes
    assert [(plane.name, plane.shape) for plane in window[:3]] == [
        ("latent", (128, 448)),
        ("latent_scale", (128, 8)),
        ("rope", (128, 64)),
    ]


@pytest.mark.requirement("P6", "P7")
@pytest.mark.parametrize(("sparse", "heavy"), [(4, 128), (8, 64), (2, 256)])
def test_the_rates_a_config_names_reach_both_chains_and_both_tails(sparse: int, heavy: int) -> None:
    """DeepSeek V4's older and newer spelling of one rate are one model: entries, tails and least page follow it alike."""
    older = {**DEEPSEEK_V4_FLASH, "compress_rate_csa": sparse, "compress_rate_hca": heavy}
    older["compress_ratios"] = [{4: sparse, 128: heavy}.get(one, one) for one in older["compress_ratios"]]
    newer = {
        **{key: value for key, value in older.items() if not key.startswith("compress_rate_")},
        "compress_rates": {"compressed_sparse_attention": sparse, "heavily_compressed_attention": heavy},
    }
    decls = from_config(newer)
    assert decls == from_config(older)
    _, sparse_chain, sparse_tail = decls[2].parts
    _, heavy_chain, heavy_tail = decls[3].parts
    for chain, rate in ((sparse_chain, sparse), (heavy_chain, heavy)):
        assert {tensor.tokens_per_entry for tensor in chain.geometry.tensors()} == {rate}
    tails = {t.name: t.shape for part in (sparse_tail, heavy_tail) for t in part.geometry.tensors()}
    assert tails["row_closed"] == (2, sparse, 512)
    assert tails["row_open"] == (2, heavy - 1, 512)
    assert page_multiple(decls) == heavy


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("page_tokens", [1, 16, 64, 130, 192])
def test_a_page_that_would_cut_a_compressed_entry_is_refused(page_tokens: int) -> None:
    """An entry of 128 tokens cannot lie in two pages, of which one might be freed."""
    decls = from_config(DEEPSEEK_V4_FLASH)
    assert page_multiple(decls) == 128
    assert page_multiple(from_config(DEEPSEEK_V3)) == 1
    with pytest.raises(
        PlanError, match=rf"^page_tokens = {page_tokens} is no multiple of (4|128), the tokens that"
    ):
        plan_kv_storage(decls, page_tokens=page_tokens)
    for fitting in (128, 256, 1280):
        assert plan_kv_storage(decls, page_tokens=fitting).page_tokens == fitting


@pytest.mark.requirement("P6", "P1")
def test_a_compressed_chain_keeps_every_entry() -> None:
    """A window over entries that stand for many tokens would retire what queries still read."""
    chain = CompressedGeometry(MLAGeometry(8, 0, BF16), 4)
    with pytest.raises(PlanError, match=r"^CompressedGeometry cannot have WindowLifetime: "):
        KVPart(chain, WindowLifetime(8))
    part = KVPart(chain, FullLifetime())
    with pytest.raises(PlanError, match=r"^layer 0 declares 0 attention, 2 compressed and 0 state parts"):
        KVLayerDecl(0, (part, part))


@pytest.mark.requirement("P6", "P2")
def test_a_compressed_chain_and_plain_attention_do_not_share_pages() -> None:
    """Their pages hold different numbers of entries; the refusal names the layers."""
    chain = CompressedGeometry(MLAGeometry(8, 0, BF16), 4)
    layers = [layer(0, chain, FullLifetime()), layer(1, MLAGeometry(8, 0, BF16), FullLifetime())]
    with pytest.raises(PlanError, match=r"CompressedGeometry in layers \[0\]; MLAGeometry in layers \[1\]"):
        plan_kv_storage(layers, page_tokens=4)


@pytest.mark.requirement("P6", "P9")
def test_one_plane_cannot_have_two_dtypes() -> None:
    """A view has one element type; the refusal says which two were asked for."""
    mixed = StateGeometry((TensorDecl("index_key", (4,), BF16),))
    layers = [layer(0, mixed, StateLifetime())]
    attention = MLAGeometry(8, 0, BF16, indexer=IndexerKeys(4, DType.INT8))
    assert len(plan_kv_storage([*layers, layer(1, attention, FullLifetime())], page_tokens=4).sub_pools) == 2
    clash = MHAGeometry(1, 8, 8, BF16, indexer=IndexerKeys(4, BF16))

    class Clashing(MHAGeometry):
        def tensors(self) -> tuple[TensorDecl, ...]:
            return (*clash.tensors(), TensorDecl("index_key", (4,), DType.INT8))

    with pytest.raises(PlanError) as caught:
        plan_kv_storage([layer(5, Clashing(1, 8, 8, BF16), FullLifetime())], page_tokens=4)
    assert str(caught.value) == (
        "layer 5 declares plane 'index_key' as bfloat16 and as int8: a plane has one tensor of one dtype"
    )


@pytest.mark.requirement("P6")
def test_state_may_have_many_tensors_of_many_dtypes() -> None:
    """Conv inputs in bf16, recurrence in fp32, cursors in int8: each plane keeps its own type and alignment."""
    geometry = StateGeometry(
        (
            TensorDecl("conv", (5, 3), BF16),
            TensorDecl("recurrent", (2, 3), DType.FLOAT32),
            TensorDecl("flags", (7,), DType.INT8),
        )
    )
    (pool,) = plan_kv_storage([layer(0, geometry, StateLifetime())], page_tokens=4).sub_pools
    assert [(plane.offset_bytes, plane.byte_count) for plane in pool.unit.planes] == [
        (0, 30),
        (32, 24),
        (64, 7),
    ]
    assert (pool.unit.payload_bytes, pool.unit.unit_bytes) == (61, 80)
