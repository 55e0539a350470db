"""The proof of addressing: every plane of every page lies where the layout says, and nowhere else (A1, A2, A8, P9).

Everything above rests on one sentence: page k of a band is the bytes `[origin + k × unit, +unit)`. Here every byte is written
through the views that a model uses, and read from the raw region by that sentence's arithmetic alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from kvtide.arena import CPUDevice, KVArena, LayerView, RoutedKVCache, torch_dtype
from kvtide.device import UnitGrid
from kvtide.plan import (
    ArenaLayout,
    BandLayout,
    ChunkLifetime,
    CompressedGeometry,
    DType,
    FullLifetime,
    Geometry,
    Growth,
    IndexerKeys,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    Lifetime,
    MHAGeometry,
    MLAGeometry,
    PageSpan,
    Plane,
    Quantization,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    lay_out,
    pack,
    page_multiple,
    plan_kv_storage,
)

GOLDEN = Path(__file__).parent / "golden"
UNWRITTEN = 0xA5
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Machines are shared: no test fails for the time it takes."""

Bytes = npt.NDArray[np.uint8]


# --- what is drawn ------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from(DType)
STATES = st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), DTYPES), min_size=1, max_size=3)


@st.composite
def quantizations(draw: st.DrawFn) -> Quantization | None:
    """None, scales a head or a block, or four-bit elements; widths drawn beside it are multiples of 4."""
    scales = draw(st.sampled_from([None, DType.FLOAT32, DType.UINT8]))
    block = draw(st.sampled_from([None, 2, 4]))
    packed = draw(st.sampled_from([1, 2]))
    quantization = Quantization(scale_dtype=scales, block_elements=block, elements_per_byte=packed)
    return draw(st.sampled_from([None, quantization]))


@st.composite
def geometries(draw: st.DrawFn, kind: str) -> Geometry:
    """One of a kind: unequal or shared K and V, a rotary key apart, scales, indexer keys, entries for several tokens."""
    quantization, dtype = draw(quantizations()), draw(DTYPES)
    width = draw(st.integers(1, 9)) * (4 if quantization else 1)
    indexer = draw(st.sampled_from([None, IndexerKeys(5, DType.FLOAT8_E4M3, DType.FLOAT32)]))
    if kind == "mha":
        one_tensor = draw(st.booleans())
        value_width = width if one_tensor else draw(st.integers(1, 9)) * (4 if quantization else 1)
        return MHAGeometry(
            draw(st.integers(1, 3)),
            width,
            value_width,
            dtype,
            one_tensor=one_tensor,
            quantization=quantization,
            indexer=indexer,
        )
    rope_dtype = draw(st.sampled_from([None, DType.BFLOAT16]))
    rope_width = draw(st.integers(0, 3)) * (4 if quantization else 1)
    latent = MLAGeometry(
        width, rope_width, dtype, rope_dtype=rope_dtype, quantization=quantization, indexer=indexer
    )
    return latent if kind == "mla" else CompressedGeometry(latent, draw(st.sampled_from([1, 2, 4])))


@st.composite
def attention_parts(draw: st.DrawFn, lifetime: Lifetime) -> list[KVPart]:
    """One or two layers' parts of one kind and one lifetime, with shapes and types of their own."""
    kinds = ["mha", "mla", *(["compressed"] if isinstance(lifetime, FullLifetime) else [])]
    kind = draw(st.sampled_from(kinds))
    return [KVPart(draw(geometries(kind)), lifetime) for _ in range(draw(st.integers(1, 2)))]


@st.composite
def plans(draw: st.DrawFn, floating: bool = False) -> KVStoragePlan:
    """Chains of one to five bands of MHA, MLA, compressed chains and state, `floating` ones with a float among them, of one
    page size or two; a layer may hold attention, a chain and state together.
    """
    windows = draw(st.integers(floating, 3))
    state = floating or draw(st.booleans())
    full = floating or (draw(st.booleans()) if windows or state else True)
    lifetimes: list[Lifetime] = [
        draw(st.sampled_from([WindowLifetime(2**place), ChunkLifetime(2 ** (place + 1))]))
        for place in range(3, 3 + windows)
    ]
    lifetimes += [FullLifetime()] * full
    parts = [part for lifetime in lifetimes for part in draw(attention_parts(lifetime))]
    chains = [part for part in parts if isinstance(part.geometry, CompressedGeometry)]
    attention = [part for part in parts if part not in chains]
    recurrent = [
        KVPart(
            StateGeometry(
                tuple(TensorDecl(f"s{n}", tuple(shape), dtype) for n, (shape, dtype) in enumerate(tensors))
            ),
            StateLifetime(),
        )
        for tensors in (draw(st.lists(STATES, min_size=1, max_size=2)) if state else [])
    ]
    layer_parts: list[list[KVPart]] = []
    for group in (attention, chains, recurrent):
        # Beside the layers there are, or into them.
        first = 0 if draw(st.booleans()) else len(layer_parts)
        layer_parts += [[] for _ in range(first + len(group) - len(layer_parts))]
        for place, part in enumerate(group):
            layer_parts[first + place].append(part)
    layers = [KVLayerDecl(layer, tuple(parts)) for layer, parts in enumerate(layer_parts)]
    pages = [size for size in (1, 2, 4, 16) if size % page_multiple(layers) == 0]
    page_tokens = draw(st.sampled_from(pages))
    smaller = draw(st.sampled_from([size for size in (1, 2, 4, 16) if page_tokens % size == 0]))
    return plan_kv_storage(
        layers, page_tokens=page_tokens, window_page_tokens=draw(st.sampled_from([None, smaller]))
    )


def prefix_of(plan: KVStoragePlan) -> int:
    return sum(pool.unit.unit_bytes for pool in plan.sub_pools if pool.has_sink)


@st.composite
def placements(draw: st.DrawFn, floating: bool = False) -> tuple[ArenaLayout, tuple[PageSpan, ...]]:
    """A plan over an arena, tight or roomy, and a place for each band's pages; floats stand anywhere between."""
    plan = draw(plans(floating))
    units = [pool.unit.unit_bytes for pool in plan.sub_pools]
    counts = [draw(st.integers(0, 4)) for _ in units]
    needed = sum(count * unit for count, unit in zip(counts, units, strict=True))
    layout = lay_out(plan, prefix_of(plan) + max(1, needed + draw(st.integers(-sum(units), 3 * sum(units)))))
    # Half of a roomless arena is lost to alignment: then fewer pages, the most numerous band's first.
    while (lowest := pack(layout, counts)) is None:
        longest = counts.index(max(counts))
        counts[longest] -= 1
    return layout, draw(spread(layout, lowest))


@st.composite
def spread(draw: st.DrawFn, layout: ArenaLayout, lowest: tuple[PageSpan, ...]) -> tuple[PageSpan, ...]:
    """A packed layout with each float pushed up by any number of bytes that leaves room for those above it."""
    highest: dict[int, int] = {}
    edge_byte = layout.arena_bytes
    for place in reversed(range(len(lowest))):
        band, span = layout.bands[place], lowest[place]
        if span.page_count:
            is_float = band.growth is Growth.FLOAT
            highest[place] = band.highest_end_to(edge_byte) - span.page_count if is_float else span.first_page
            edge_byte = band.start_byte(highest[place])
    spans = []
    edge_byte = layout.prefix_bytes
    for place, (band, span) in enumerate(zip(layout.bands, lowest, strict=True)):
        first_page = span.first_page
        if span.page_count:
            if band.growth is Growth.FLOAT:
                room = max(0, band.start_byte(highest[place]) - edge_byte)
                pushed = band.lowest_page_from(edge_byte + draw(st.integers(0, room)))
                first_page = min(pushed, highest[place])
            edge_byte = band.start_byte(first_page + span.page_count)
        spans.append(PageSpan(first_page=first_page, end_page=first_page + span.page_count))
    return tuple(spans)


# --- the model: arithmetic on raw bytes -----------------------------------------------------------------------------


def planes_of(layout: ArenaLayout, routed: RoutedKVCache) -> Iterator[tuple[BandLayout, Plane, torch.Tensor]]:
    """Every plane of every band with the view that a model finds for it, by layer and name."""
    for band in layout.bands:
        for plane in band.planes:
            view = view_of(routed, band, plane.layer)
            yield band, plane, view.planes[plane.name]


def view_of(routed: RoutedKVCache, band: BandLayout, layer: int) -> LayerView:
    (view,) = [view for view in routed.views(layer) if view.band == band.name]
    assert view.page_tokens == band.page_tokens
    return view


def unit_bytes_of(band: BandLayout) -> int:
    """The unit by its planes: the last one's end, padded to 16."""
    end = max(plane.offset_bytes + plane.byte_count for plane in band.planes)
    return (end + 15) // 16 * 16


def pattern(seed: int, band: str, plane: Plane, page: int) -> Bytes:
    """Bytes that no other plane of no other page has: a stream of their own."""
    generator = np.random.default_rng([seed, *band.encode(), 0, plane.layer, *plane.name.encode(), page])
    return generator.integers(0, 256, plane.byte_count, np.uint8)


def as_values(raw: Bytes, plane: Plane) -> torch.Tensor:
    return torch.from_numpy(raw).view(torch_dtype(plane.dtype)).reshape(plane.shape)


def raw_bytes(values: torch.Tensor) -> Bytes:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy()


@pytest.mark.requirement("A1", "A2", "A4", "A8", "P9")
@settings(PROPERTY, max_examples=300)
@given(case=placements(), lead=st.sampled_from([0, 16, 80]), seed=st.integers(0, 2**32))
def test_each_byte_written_through_a_view_lies_where_the_layout_says_and_no_other_byte_changes(
    case: tuple[ArenaLayout, tuple[PageSpan, ...]], lead: int, seed: int
) -> None:
    """The risk that was retired first. Bands of units that do not divide each other stand side by side in any packed order:
    no two live pages share a byte, each plane's bytes lie at origin + k × unit + offset, and sinks, free bytes and the bytes
    around the arena stay as they were.
    """
    layout, spans = case
    event(f"{len(layout.bands)} bands, {sum(span.page_count > 0 for span in spans)} with pages")
    around = torch.full((lead + layout.arena_bytes + 64,), UNWRITTEN, dtype=torch.uint8)
    arena = KVArena(around[lead : lead + layout.arena_bytes])
    routed = RoutedKVCache(arena, layout)
    live = {
        band.name: range(span.first_page, span.end_page)
        for band, span in zip(layout.bands, spans, strict=True)
    }

    for band, plane, view in planes_of(layout, routed):
        for page in live[band.name]:
            view[page] = as_values(pattern(seed, band.name, plane, page), plane)

    expected = np.full(layout.arena_bytes, UNWRITTEN, np.uint8)
    owned = np.zeros(layout.arena_bytes, np.bool_)
    owned[: sum(unit_bytes_of(band) for band in layout.bands if band.has_sink)] = True
    for band in layout.bands:
        for page in live[band.name]:
            start = band.origin_bytes + page * unit_bytes_of(band)
            unit = slice(start, start + unit_bytes_of(band))
            assert unit.start >= 0
            assert unit.stop <= layout.arena_bytes
            assert not owned[unit].any(), (
                f"page {page} of {band.name} shares bytes with a sink or another page"
            )
            owned[unit] = True
            for plane in band.planes:
                first = start + plane.offset_bytes
                expected[first : first + plane.byte_count] = pattern(seed, band.name, plane, page)
    np.testing.assert_array_equal(around[lead : lead + layout.arena_bytes].numpy(), expected)
    assert (around[:lead] == UNWRITTEN).all()
    assert (around[lead + layout.arena_bytes :] == UNWRITTEN).all()

    for band, plane, view in planes_of(layout, routed):
        for page in live[band.name]:
            np.testing.assert_array_equal(raw_bytes(view[page]), pattern(seed, band.name, plane, page))


@pytest.mark.requirement("A2", "P9")
@settings(PROPERTY, max_examples=100)
@given(case=placements())
def test_views_have_the_planes_shape_and_type_and_the_units_stride(
    case: tuple[ArenaLayout, tuple[PageSpan, ...]],
) -> None:
    """Kernels are compiled and graphs captured over these strides; a page's own elements are contiguous, as kernels assume."""
    layout, _ = case
    arena = KVArena.allocate(layout.arena_bytes)
    for band, plane, view in planes_of(layout, RoutedKVCache(arena, layout)):
        width = plane.dtype.byte_width
        assert view.dtype == torch_dtype(plane.dtype)
        assert view.element_size() == width
        assert list(view.shape) == [band.page_count, *plane.shape]
        assert view.stride(0) * width == unit_bytes_of(band)
        assert band.page_count == 0 or view[0].is_contiguous()
        assert view.storage_offset() * width == band.origin_bytes + plane.offset_bytes
        assert view.untyped_storage().data_ptr() == arena.bytes.data_ptr()
        assert view.data_ptr() % 16 == 0


@pytest.mark.requirement("A8")
@settings(PROPERTY, max_examples=100)
@given(case=placements())
def test_page_0_of_every_attention_band_is_its_own_sink_inside_the_prefix(
    case: tuple[ArenaLayout, tuple[PageSpan, ...]],
) -> None:
    """Padded rows write page 0 of every layer: it must be nobody's page, not even another band's sink."""
    layout, _ = case
    region = torch.zeros(layout.arena_bytes, dtype=torch.uint8)
    routed = RoutedKVCache(KVArena(region), layout)
    planes = [(band, plane, view) for band, plane, view in planes_of(layout, routed) if band.has_sink]
    for band, plane, view in planes:
        view[0] = as_values(pattern(7, band.name, plane, 0), plane)
    for band, plane, view in planes:
        np.testing.assert_array_equal(raw_bytes(view[0]), pattern(7, band.name, plane, 0))
    assert not region[layout.prefix_bytes :].any()


@pytest.mark.requirement("A2")
@settings(PROPERTY, max_examples=150)
@given(data=st.data(), case=placements(floating=True), seed=st.integers(0, 2**32))
def test_a_view_made_once_finds_a_page_wherever_its_band_has_moved(
    data: st.DataObject, case: tuple[ArenaLayout, tuple[PageSpan, ...]], seed: int
) -> None:
    """A band moves by moving pages, never its origin: no view, and no captured graph, changes for it."""
    layout, spans = case
    device = CPUDevice(KVArena(torch.full((layout.arena_bytes,), UNWRITTEN, dtype=torch.uint8)))
    routed = RoutedKVCache(device.arena, layout)
    floats = [
        place
        for place, band in enumerate(layout.bands)
        if band.growth is Growth.FLOAT and spans[place].page_count
    ]
    assume(floats)
    moved = data.draw(st.sampled_from(floats))
    band, old = layout.bands[moved], spans[moved]
    neighbours = [place for place, span in enumerate(spans) if span.page_count and place != moved]
    below = [layout.bands[place].start_byte(spans[place].end_page) for place in neighbours if place < moved]
    above = [layout.bands[place].start_byte(spans[place].first_page) for place in neighbours if place > moved]
    lowest = band.lowest_page_from(max(below, default=layout.prefix_bytes))
    highest = band.highest_end_to(min(above, default=layout.arena_bytes)) - old.page_count
    shift = data.draw(st.integers(lowest, highest)) - old.first_page

    for other, plane, view in planes_of(layout, routed):
        span = spans[layout.bands.index(other)]
        for page in range(span.first_page, span.end_page):
            view[page] = as_values(pattern(seed, other.name, plane, page), plane)
    pages = np.arange(old.first_page, old.end_page)
    sources = pages[::-1] if shift > 0 else pages
    grid = UnitGrid(band.origin_bytes, band.unit_bytes)
    device.copy_units(device.schedule_stream, grid, sources, sources + shift)

    for other, plane, view in planes_of(layout, routed):
        span = spans[layout.bands.index(other)]
        for page in range(span.first_page, span.end_page):
            now = page + shift if other is band else page
            np.testing.assert_array_equal(raw_bytes(view[now]), pattern(seed, other.name, plane, page))


# --- golden addresses -----------------------------------------------------------------------------------------------


def golden_layout() -> ArenaLayout:
    """State, a latent window and full attention in three layers, of 1-, 2- and 4-byte types; no unit divides another."""
    state = StateGeometry(
        (TensorDecl("conv", (5, 3), DType.BFLOAT16), TensorDecl("recurrent", (2, 3, 2), DType.FLOAT32))
    )
    full = MHAGeometry(2, 8, 9, DType.FLOAT8_E4M3)
    layers = [
        KVLayerDecl(0, (KVPart(full, FullLifetime()), KVPart(state, StateLifetime()))),
        KVLayerDecl(1, (KVPart(MLAGeometry(5, 2, DType.FLOAT16), WindowLifetime(8)),)),
        KVLayerDecl(2, (KVPart(full, FullLifetime()),)),
    ]
    return lay_out(plan_kv_storage(layers, page_tokens=4), 2000)


def chains_layout() -> ArenaLayout:
    """Quantised chunks of one tensor with scales, and a compressed chain with its indexer's keys, its layer's window beside
    it in pages of half the size.
    """
    scales = Quantization(scale_dtype=DType.FLOAT32, block_elements=4, elements_per_byte=2)
    chunk = MHAGeometry(1, 8, 8, DType.UINT8, one_tensor=True, quantization=scales)
    entry = MLAGeometry(
        6,
        2,
        DType.FLOAT8_E4M3,
        rope_dtype=DType.BFLOAT16,
        indexer=IndexerKeys(3, DType.FLOAT8_E5M2, DType.FLOAT32),
    )
    chain = KVPart(CompressedGeometry(entry, 4), FullLifetime())
    window = KVPart(MLAGeometry(5, 0, DType.FLOAT16), WindowLifetime(8))
    layers = [KVLayerDecl(0, (window, chain)), KVLayerDecl(1, (KVPart(chunk, ChunkLifetime(16)),))]
    return lay_out(plan_kv_storage(layers, page_tokens=8, window_page_tokens=4), 1500)


def latents_layout() -> ArenaLayout:
    """One band, which grows down: quantised latents whose rotary part has a type of its own, with indexer keys beside them."""
    latent = MLAGeometry(
        12,
        4,
        DType.FLOAT8_E4M3,
        rope_dtype=DType.BFLOAT16,
        quantization=Quantization(scale_dtype=DType.FLOAT32, block_elements=4, elements_per_byte=1),
        indexer=IndexerKeys(5, DType.FLOAT8_E5M2, DType.FLOAT32),
    )
    layers = [KVLayerDecl(layer, (KVPart(latent, FullLifetime()),)) for layer in (0, 3)]
    return lay_out(plan_kv_storage(layers, page_tokens=2), 1000)


GOLDENS = {
    "addresses.txt": golden_layout,
    "addresses-of-chains.txt": chains_layout,
    "addresses-of-latents.txt": latents_layout,
}


def address(arena: KVArena, view: torch.Tensor, page: int) -> int:
    """Where torch finds the first byte of one page of a view, from the region's start."""
    return view[page].data_ptr() - arena.bytes.data_ptr()


def render(layout: ArenaLayout) -> str:
    """Where torch finds every plane of the pages that could be handed out, as byte offsets in the region."""
    arena = KVArena.allocate(layout.arena_bytes)
    lines = [f"arena {layout.arena_bytes} bytes"]
    banner = None
    for band, plane, view in planes_of(layout, RoutedKVCache(arena, layout)):
        if banner != band.name:
            banner = band.name
            lines += ["", f"band {band.name}: pages [{band.first_page}, {band.page_count})"]
        first, last = band.first_page, band.page_count - 1
        begin = functools.partial(address, arena, view)
        strides = [stride * view.element_size() for stride in view.stride()]
        lines += [
            f"  layer {plane.layer} {plane.name} {str(view.dtype).removeprefix('torch.')} {list(view.shape)}",
            f"    byte strides {strides}",
            f"    page 0 at {begin(0)}, page {first} at {begin(first)}, page {last} ends at {begin(last) + plane.byte_count}",
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.requirement("A2", "P9")
@pytest.mark.parametrize("name", GOLDENS)
def test_the_addresses_are_those_on_file(name: str) -> None:
    """What torch computes, pinned to a file that can be checked by hand.

    After a change that is meant, rewrite it and read the difference:

    python packages/arena/tests/test_addressing.py
    """
    assert render(GOLDENS[name]()) == (GOLDEN / name).read_text()


if __name__ == "__main__":
    for name, layout in GOLDENS.items():
        (GOLDEN / name).write_text(render(layout()))
