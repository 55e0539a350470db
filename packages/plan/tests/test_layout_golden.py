"""The byte layout, pinned to files small enough to check by hand (P9).

Views, host mirrors, transfers and captured graphs all rest on these offsets, and two versions that disagree exchange
garbage. After a change that is meant, rewrite the files and read the difference:

    python packages/plan/tests/test_layout_golden.py
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from kvtide.plan import (
    ArenaLayout,
    BandLayout,
    ChunkLifetime,
    CompressedGeometry,
    DType,
    FullLifetime,
    IndexerKeys,
    KVLayerDecl,
    KVPart,
    Lifetime,
    MHAGeometry,
    MLAGeometry,
    Quantization,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    lay_out,
    pack,
    plan_kv_storage,
)

GOLDEN = Path(__file__).parent / "golden"


def _mha(layer: int, lifetime: Lifetime, heads: int, key_dim: int, value_dim: int) -> KVLayerDecl:
    return KVLayerDecl(layer, (KVPart(MHAGeometry(heads, key_dim, value_dim, DType.BFLOAT16), lifetime),))


def _state(layer: int, conv_width: int, recurrent: tuple[int, ...]) -> KVPart:
    tensors = (
        TensorDecl("conv", (conv_width, 3), DType.BFLOAT16),
        TensorDecl("recurrent", recurrent, DType.FLOAT32),
    )
    return KVPart(StateGeometry(tensors), StateLifetime())


def _state_two_windows_and_full() -> tuple[ArenaLayout, tuple[int, ...]]:
    """Four bands of which no unit divides another, with planes of 12, 20, 30 and 60 bytes that need padding."""
    layers = [
        KVLayerDecl(0, (_state(0, 5, (2, 3, 2)),)),
        _mha(1, WindowLifetime(8), 1, 5, 3),
        _mha(2, WindowLifetime(32), 3, 4, 5),
        KVLayerDecl(3, (_state(3, 5, (2, 3, 2)),)),
        _mha(4, FullLifetime(), 1, 8, 8),
        _mha(5, FullLifetime(), 2, 8, 9),
    ]
    return lay_out(plan_kv_storage(layers, page_tokens=2), 4000), (3, 2, 5, 4)


def _window_and_full() -> tuple[ArenaLayout, tuple[int, ...]]:
    """gpt-oss's form: the grow-up end has a sink too, and it is the prefix's last."""
    layers = [
        _mha(0, WindowLifetime(128), 1, 8, 8),
        _mha(1, FullLifetime(), 1, 8, 8),
        _mha(2, WindowLifetime(128), 1, 8, 8),
    ]
    return lay_out(plan_kv_storage(layers, page_tokens=1), 1000), (6, 11)


def _attention_and_state_in_every_layer() -> tuple[ArenaLayout, tuple[int, ...]]:
    """Falcon-H1's form: two bands, both ends, the same layers in each."""
    attention = KVPart(MHAGeometry(2, 16, 16, DType.BFLOAT16), FullLifetime())
    layers = [KVLayerDecl(layer, (attention, _state(layer, 24, (4, 4, 4)))) for layer in range(2)]
    return lay_out(plan_kv_storage(layers, page_tokens=16), 100_000), (7, 10)


def _latent_beyond_4_gib() -> tuple[ArenaLayout, tuple[int, ...]]:
    """DeepSeek-V3's form in an arena past 2^33 bytes: a lone band, offsets that no 32-bit integer holds."""
    latent = KVPart(MLAGeometry(512, 64, DType.BFLOAT16), FullLifetime())
    layers = [KVLayerDecl(layer, (latent,)) for layer in range(61)]
    return lay_out(plan_kv_storage(layers, page_tokens=64), 2**33 + 2**20 + 7), (1900,)


def _compressed_chain_with_window_and_tail() -> tuple[ArenaLayout, tuple[int, ...]]:
    """DeepSeek V4's form, small: an fp8 row with its scales and rotary key, strides of 2 and 4, indexer keys, compressor tails."""
    row = MLAGeometry(
        16,
        4,
        DType.FLOAT8_E4M3,
        rope_dtype=DType.BFLOAT16,
        quantization=Quantization(scale_dtype=DType.UINT8, block_elements=8, scale_multiple=4),
    )
    indexed = attrs.evolve(row, indexer=IndexerKeys(8, DType.FLOAT8_E4M3, DType.FLOAT32))
    tail = StateGeometry((TensorDecl("row_open", (2, 3, 20), DType.BFLOAT16),))
    window = KVPart(row, WindowLifetime(4))
    layers = [
        KVLayerDecl(0, (window,)),
        KVLayerDecl(1, (window, KVPart(CompressedGeometry(indexed, 2), FullLifetime()))),
        KVLayerDecl(
            2,
            (window, KVPart(CompressedGeometry(row, 4), FullLifetime()), KVPart(tail, StateLifetime())),
        ),
    ]
    return lay_out(plan_kv_storage(layers, page_tokens=8, window_page_tokens=4), 4000), (2, 3, 2)


def _quantised_chunks_and_one_tensor() -> tuple[ArenaLayout, tuple[int, ...]]:
    """Chunked-local layers in fp8 with a scale a head, in small pages; full layers whose value is their key, one of them shared."""
    scaled = MHAGeometry(2, 16, 8, DType.FLOAT8_E4M3, quantization=Quantization(scale_dtype=DType.FLOAT32))
    packed = MHAGeometry(
        1,
        32,
        32,
        DType.UINT8,
        one_tensor=True,
        quantization=Quantization(scale_dtype=DType.FLOAT8_E4M3, block_elements=16, elements_per_byte=2),
    )
    layers = [
        KVLayerDecl(0, (KVPart(scaled, ChunkLifetime(16)),)),
        KVLayerDecl(1, (KVPart(packed, FullLifetime()),)),
        KVLayerDecl(2, (), shares_layer=1),
    ]
    return lay_out(plan_kv_storage(layers, page_tokens=8, window_page_tokens=2), 3000), (8, 5)


CASES = {
    "compressed-chain-window-tail": _compressed_chain_with_window_and_tail,
    "quantised-chunks-one-tensor": _quantised_chunks_and_one_tensor,
    "window-full": _window_and_full,
    "state-two-windows-full": _state_two_windows_and_full,
    "attention-and-state-in-every-layer": _attention_and_state_in_every_layer,
    "latent-past-8-gib": _latent_beyond_4_gib,
}


def render(layout: ArenaLayout, page_counts: tuple[int, ...]) -> str:
    """A layout, and where `page_counts` pack in it, as text."""
    lines = [f"arena {layout.arena_bytes} bytes, prefix {layout.prefix_bytes} bytes"]
    packed = pack(layout, page_counts)
    assert packed is not None
    for band, span in zip(layout.bands, packed, strict=True):
        payload = sum(plane.byte_count for plane in band.planes)
        sink = "yes" if band.has_sink else "no"
        lines += [
            "",
            f"band {band.name} ({band.growth.value})",
            f"  unit {band.unit_bytes} bytes, payload {payload}, page_tokens {band.page_tokens}, sink {sink}",
            f"  origin {band.origin_bytes}, {_extent(band, band.first_page, band.page_count)}",
            f"  {span.page_count} packed: {_extent(band, span.first_page, span.end_page)}",
        ]
        planes = band.planes if len(band.planes) <= 8 else (*band.planes[:2], *band.planes[-2:])
        lines += [
            f"    +{plane.offset_bytes:<6} layer {plane.layer} {plane.name} {list(plane.shape)} {plane.dtype.value}"
            for plane in planes
        ]
    return "\n".join(lines) + "\n"


def _extent(band: BandLayout, first_page: int, end_page: int) -> str:
    return f"pages [{first_page}, {end_page}) = bytes [{band.start_byte(first_page)}, {band.start_byte(end_page)})"


@pytest.mark.requirement("P9")
@pytest.mark.parametrize("name", CASES)
def test_the_layout_is_the_one_on_file(name: str) -> None:
    """An offset that drifts breaks every peer and every captured graph, however right the new one is."""
    assert render(*CASES[name]()) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.requirement("P9")
def test_every_file_is_compared() -> None:
    """A golden file that nothing reads pins nothing."""
    assert {file.stem for file in GOLDEN.iterdir()} == set(CASES)


if __name__ == "__main__":
    for case, make in CASES.items():
        (GOLDEN / f"{case}.txt").write_text(render(*make()))
