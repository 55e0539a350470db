"""Layout and packing against the dumbest models: bytes painted one by one, placements tried one by one (P9, P3, A8)."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtide.plan import (
    ALIGNMENT_BYTES,
    ArenaLayout,
    DType,
    FullLifetime,
    Growth,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    MLAGeometry,
    PageSpan,
    PlanError,
    StateGeometry,
    StateLifetime,
    SubPoolKind,
    TensorDecl,
    WindowLifetime,
    lay_out,
    pack,
    plan_kv_storage,
)

EXHAUSTIVE = settings(deadline=None, max_examples=400)
"""For properties that try everything."""

DTYPES = st.sampled_from(DType)
NOTHING = PageSpan(first_page=0, end_page=0)


def plan_with_units(*, state: int = 0, windows: tuple[int, ...] = (), full: int = 0) -> KVStoragePlan:
    """A plan of one-token pages and slots with payloads of so many bytes; 0 leaves a band out."""
    parts = []
    if state:
        parts.append(
            KVPart(StateGeometry((TensorDecl("recurrent", (state,), DType.UINT8),)), StateLifetime())
        )
    for place, payload in enumerate(windows):
        parts.append(KVPart(MLAGeometry(payload, 0, DType.UINT8), WindowLifetime(100 - place)))
    if full:
        parts.append(KVPart(MLAGeometry(full, 0, DType.UINT8), FullLifetime()))
    return plan_kv_storage([KVLayerDecl(layer, (part,)) for layer, part in enumerate(parts)], page_tokens=1)


@st.composite
def plans(draw: st.DrawFn, most_windows: int = 3, most_bytes: int = 100) -> KVStoragePlan:
    """Chains of one to five bands with units of up to `most_bytes`, state and full each there or not."""
    payload = st.integers(1, most_bytes)
    windows = draw(st.lists(payload, max_size=most_windows))
    state = draw(st.just(0) | payload)
    full = draw(payload if not windows and not state else st.just(0) | payload)
    return plan_with_units(state=state, windows=tuple(windows), full=full)


def prefix_of(plan: KVStoragePlan) -> int:
    return sum(pool.unit.unit_bytes for pool in plan.sub_pools if pool.has_sink)


@st.composite
def tiny_arenas(draw: st.DrawFn) -> tuple[ArenaLayout, tuple[int, ...]]:
    """A chain of up to four bands over at most 400 bytes behind the prefix, and a count for each band."""
    plan = draw(plans(most_windows=2, most_bytes=60))
    layout = lay_out(plan, prefix_of(plan) + draw(st.integers(1, 400)))
    counts = tuple(draw(st.integers(0, 4)) for _ in layout.bands)
    return layout, counts


def every_placement(
    layout: ArenaLayout, counts: tuple[int, ...], place: int = 0, edge_byte: int | None = None
) -> Iterator[tuple[PageSpan, ...]]:
    """Every way to give each band from `place` on a run of its count behind `edge_byte`, in chain order."""
    edge_byte = layout.prefix_bytes if edge_byte is None else edge_byte
    if place == len(counts):
        yield ()
        return
    band, count = layout.bands[place], counts[place]
    if not count:
        for rest in every_placement(layout, counts, place + 1, edge_byte):
            yield (NOTHING, *rest)
        return
    for first in range(layout.arena_bytes // band.unit_bytes + 1):
        start = band.origin_bytes + first * band.unit_bytes
        end = start + count * band.unit_bytes
        if start >= edge_byte and end <= layout.arena_bytes:
            for rest in every_placement(layout, counts, place + 1, end):
                yield (PageSpan(first_page=first, end_page=first + count), *rest)


@pytest.mark.requirement("P9")
@given(
    tensors=st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), DTYPES), min_size=1, max_size=5),
    layer_count=st.integers(1, 3),
)
def test_planes_are_aligned_and_share_no_byte(
    tensors: list[tuple[list[int], DType]], layer_count: int
) -> None:
    """Two planes that shared a byte would be two layers overwriting each other in every page."""
    geometry = StateGeometry(
        tuple(TensorDecl(f"t{place}", tuple(shape), dtype) for place, (shape, dtype) in enumerate(tensors))
    )
    part = KVPart(geometry, StateLifetime())
    plan = plan_kv_storage([KVLayerDecl(layer, (part,)) for layer in range(layer_count)], page_tokens=1)
    unit = plan.sub_pools[0].unit

    painted: list[int] = []
    for plane in unit.planes:
        assert plane.offset_bytes % ALIGNMENT_BYTES == 0
        elements = 1
        for size in plane.shape:
            elements *= size
        painted.extend(range(plane.offset_bytes, plane.offset_bytes + elements * plane.dtype.byte_width))
    assert len(painted) == len(set(painted)) == unit.payload_bytes
    assert unit.unit_bytes % ALIGNMENT_BYTES == 0
    assert 0 <= unit.unit_bytes - (max(painted) + 1) < ALIGNMENT_BYTES
    assert len(unit.planes) == layer_count * len(tensors)


@pytest.mark.requirement("P9", "A8")
@EXHAUSTIVE
@given(plan=plans(), arena_bytes=st.integers(1, 3000))
def test_sinks_fill_the_prefix_and_every_other_page_lies_behind_it(
    plan: KVStoragePlan, arena_bytes: int
) -> None:
    """A page that overlapped a sink would be written by every padded token."""
    sinks = [pool.name for pool in plan.sub_pools if pool.has_sink]
    try:
        layout = lay_out(plan, arena_bytes)
    except PlanError:
        assert arena_bytes <= prefix_of(plan)
        return
    assert [band.name for band in layout.bands if band.has_sink] == sinks
    sink_bytes = [
        byte
        for band in layout.bands
        if band.has_sink
        for byte in range(band.origin_bytes, band.origin_bytes + band.unit_bytes)
    ]
    assert sorted(sink_bytes) == list(range(layout.prefix_bytes))
    for band in layout.bands:
        assert band.origin_bytes % ALIGNMENT_BYTES == 0
        assert band.unit_bytes % ALIGNMENT_BYTES == 0
        handed_out = [
            page
            for page in range(-1, arena_bytes // band.unit_bytes + 2)
            if band.origin_bytes + page * band.unit_bytes >= layout.prefix_bytes
            and band.origin_bytes + (page + 1) * band.unit_bytes <= arena_bytes
        ]
        assert list(range(band.first_page, band.first_page + band.capacity_pages)) == handed_out


@pytest.mark.requirement("A8")
@given(plan=plans())
def test_the_grow_up_ends_sink_is_the_prefixs_last(plan: KVStoragePlan) -> None:
    """So that its first page follows its sink without a remainder between them."""
    layout = lay_out(plan, 100_000)
    first = layout.bands[0]
    if first.growth is Growth.UP and first.has_sink:
        assert first.start_byte(1) == layout.prefix_bytes
        assert first.first_page == 1


@pytest.mark.requirement("P3")
@given(plan=plans())
def test_the_first_band_grows_up_the_last_down_and_a_lone_one_down(plan: KVStoragePlan) -> None:
    """A lone band has no neighbour, and full attention is at the arena's end in every model."""
    growths = [band.growth for band in lay_out(plan, 100_000).bands]
    assert growths[-1] is Growth.DOWN
    assert growths.count(Growth.DOWN) == 1
    assert growths.count(Growth.UP) == (len(growths) > 1)
    assert len(growths) == 1 or growths[0] is Growth.UP


@pytest.mark.requirement("P9")
@EXHAUSTIVE
@given(case=tiny_arenas(), byte=st.integers(-50, 700))
def test_the_edges_of_a_band_are_those_found_by_trying_every_page(
    case: tuple[ArenaLayout, tuple[int, ...]], byte: int
) -> None:
    """Neighbours meet on a byte; each must know exactly its first page behind it and its last before it."""
    layout, _ = case
    for band in layout.bands:
        pages = range(band.first_page, band.first_page + band.capacity_pages)
        starts = {page: band.origin_bytes + page * band.unit_bytes for page in pages}
        after = [page for page in pages if starts[page] >= byte]
        before = [page for page in pages if starts[page] + band.unit_bytes <= byte]
        if after:
            assert band.lowest_page_from(byte) == after[0]
        else:
            assert band.lowest_page_from(byte) >= band.first_page + band.capacity_pages
        if before:
            assert band.highest_end_to(byte) == before[-1] + 1
        else:
            assert band.highest_end_to(byte) <= band.first_page or not pages


@pytest.mark.requirement("P9")
@EXHAUSTIVE
@given(case=tiny_arenas())
@example(case=(lay_out(plan_with_units(state=16, full=16), 48), (1, 1)))
@example(case=(lay_out(plan_with_units(state=17, windows=(33,), full=49), 256), (1, 1, 1)))
def test_pack_finds_the_lowest_placement_or_none_exists(case: tuple[ArenaLayout, tuple[int, ...]]) -> None:
    """A wrong refusal wastes the arena, a wrong yes corrupts it; every placement is tried to know which is which."""
    layout, counts = case
    packed = pack(layout, counts)
    placements = list(every_placement(layout, counts))
    if not placements:
        assert packed is None
        return
    assert packed is not None
    assert tuple(span.page_count for span in packed) == counts
    for place, (band, span) in enumerate(zip(layout.bands, packed, strict=True)):
        if not span.page_count:
            continue
        possible = [spans[place].first_page for spans in placements]
        assert span.first_page == (max(possible) if band.growth is Growth.DOWN else min(possible))
    assert tuple(span if span.page_count else NOTHING for span in packed) in placements


@pytest.mark.requirement("P9")
@EXHAUSTIVE
@given(case=tiny_arenas())
def test_an_empty_band_is_transparent(case: tuple[ArenaLayout, tuple[int, ...]]) -> None:
    """Neighbours of an empty float share the room between them, whatever grid it has."""
    layout, counts = case
    kept = [place for place, count in enumerate(counts) if count]
    if not kept:
        assert pack(layout, counts) is not None
        return
    without = attrs.evolve(layout, bands=tuple(layout.bands[place] for place in kept))
    all_packed = pack(layout, counts)
    packed = pack(without, [counts[place] for place in kept])
    assert packed == (None if all_packed is None else tuple(all_packed[place] for place in kept))


@pytest.mark.requirement("P9")
@given(case=tiny_arenas(), growth=st.integers(1, 100))
def test_what_packs_packs_in_a_larger_arena_and_with_fewer_pages(
    case: tuple[ArenaLayout, tuple[int, ...]], growth: int
) -> None:
    """Sizing bisects over arena bytes and page counts; it is exact only while this holds."""
    layout, counts = case
    if pack(layout, counts) is None:
        return
    for place, count in enumerate(counts):
        if count:
            fewer = (*counts[:place], count - 1, *counts[place + 1 :])
            assert pack(layout, fewer) is not None
    plan = plan_of(layout)
    assert pack(lay_out(plan, layout.arena_bytes + growth), counts) is not None


def plan_of(layout: ArenaLayout) -> KVStoragePlan:
    """The plan whose units are `layout`'s, in its order."""
    units: dict[SubPoolKind, list[int]] = {kind: [] for kind in SubPoolKind}
    for band in layout.bands:
        units[SubPoolKind(band.name.partition("-")[0])].append(band.unit_bytes)
    return plan_with_units(
        state=sum(units[SubPoolKind.STATE]),
        windows=tuple(units[SubPoolKind.WINDOW]),
        full=sum(units[SubPoolKind.FULL]),
    )


@pytest.mark.requirement("P9", "A3")
@given(
    plan=plans(most_bytes=20_000).filter(lambda plan: all(p.unit.unit_bytes > 64 for p in plan.sub_pools)),
    beyond=st.integers(0, 2**35),
)
def test_arenas_past_2_33_bytes_are_exact_to_the_last_page(plan: KVStoragePlan, beyond: int) -> None:
    """A float or a 32-bit integer anywhere on the way would be off by whole pages here."""
    arena_bytes = 2**33 + beyond
    layout = lay_out(plan, arena_bytes)
    for band in layout.bands:
        last_start = band.start_byte(band.page_count - 1)
        assert (last_start - band.origin_bytes) // (band.page_count - 1) == band.unit_bytes
        assert (last_start - band.origin_bytes) % (band.page_count - 1) == 0
        assert last_start + band.unit_bytes <= arena_bytes < last_start + 2 * band.unit_bytes
        assert band.lowest_page_from(last_start) == band.page_count - 1
        assert band.lowest_page_from(last_start + 1) == band.page_count
        assert band.highest_end_to(last_start) == band.page_count - 1
    last = layout.bands[-1]
    full = [0] * (len(layout.bands) - 1) + [last.capacity_pages]
    assert pack(layout, full) is not None
    assert pack(layout, [*full[:-1], last.capacity_pages + 1]) is None


@pytest.mark.requirement("P9")
def test_more_pages_than_an_int32_counts_are_refused_with_the_figures() -> None:
    """Ids on the device are int32; a page past the last one would alias the first."""
    plan = plan_with_units(full=16)
    most = 16 * (2**31 - 1)
    assert lay_out(plan, most + 15).bands[0].page_count == 2**31 - 1
    with pytest.raises(
        PlanError, match=r"band 'full' would have 2147483648 pages of 16 bytes .* use larger pages"
    ):
        lay_out(plan, most + 16)


@pytest.mark.requirement("P9")
@pytest.mark.parametrize("arena_bytes", [-1, 0, 48])
def test_an_arena_no_larger_than_its_prefix_is_refused_with_the_figures(arena_bytes: int) -> None:
    """Nothing could ever be handed out; the text says whose sinks take the room."""
    with pytest.raises(PlanError) as caught:
        lay_out(plan_with_units(windows=(16,), full=32), arena_bytes)
    assert str(caught.value) == (
        f"an arena of {arena_bytes} bytes cannot hold its reserved prefix of 48 bytes (a sink for 'full', 'window-100') "
        "and anything behind it"
    )


@pytest.mark.requirement("P9")
def test_payload_and_unit_bytes_are_told_apart() -> None:
    """What alignment costs is reported, never hidden in the payload."""
    unit = plan_with_units(full=17).sub_pools[0].unit
    assert (unit.payload_bytes, unit.unit_bytes) == (17, 32)


@pytest.mark.requirement("A8")
def test_a_chain_without_attention_has_no_prefix() -> None:
    """A state band has no sink, so a purely recurrent model reserves nothing."""
    (band,) = lay_out(plan_with_units(state=32), 100).bands
    assert (band.origin_bytes, band.first_page, band.page_count, band.growth) == (0, 0, 3, Growth.DOWN)


def test_asking_for_a_band_that_is_not_there_names_those_that_are() -> None:
    """A misspelt band name is the caller's slip; the remedy is in the text."""
    layout = lay_out(plan_with_units(state=16, full=16), 100)
    assert layout.band("full").growth is Growth.DOWN
    with pytest.raises(KeyError, match=r"no band 'ful'; the chain has \['state', 'full'\]"):
        layout.band("ful")
