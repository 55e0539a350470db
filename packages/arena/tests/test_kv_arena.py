"""What `KVArena` takes for a region and what it refuses, and how `RoutedKVCache` leads from a layer to its views."""

from __future__ import annotations

import pytest
import torch

from kvtide.arena import KVArena, RoutedKVCache, host_layout, torch_dtype
from kvtide.plan import (
    ArenaLayout,
    BandLayout,
    CompressedGeometry,
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
    lay_out,
    plan_kv_storage,
)


def hybrid_layout(arena_bytes: int = 4000) -> ArenaLayout:
    """Layer 0 with attention and state, 1 with a window alone, 2 with nothing, 3 with state alone."""
    state = KVPart(
        StateGeometry(
            (TensorDecl("conv", (4, 3), DType.BFLOAT16), TensorDecl("recurrent", (), DType.FLOAT32))
        ),
        StateLifetime(),
    )
    layers = [
        KVLayerDecl(0, (KVPart(MHAGeometry(2, 4, 6, DType.BFLOAT16), FullLifetime()), state)),
        KVLayerDecl(1, (KVPart(MLAGeometry(7, 2, DType.FLOAT32), WindowLifetime(8)),)),
        KVLayerDecl(2, ()),
        KVLayerDecl(3, (state,)),
    ]
    return lay_out(plan_kv_storage(layers, page_tokens=2), arena_bytes)


@pytest.mark.requirement("A1")
def test_a_new_arena_has_the_bytes_asked_for_and_an_aligned_base() -> None:
    """Planes are 16-byte aligned only as far as the base is."""
    arena = KVArena.allocate(1001)
    assert (arena.byte_count, arena.bytes.dtype, arena.bytes.device.type) == (1001, torch.uint8, "cpu")
    assert arena.bytes.data_ptr() % 16 == 0


@pytest.mark.requirement("A1")
@pytest.mark.parametrize(
    ("region", "found"),
    [
        (torch.zeros(64, dtype=torch.int8), r"torch\.int8 \[64\]"),
        (torch.zeros(4, 16, dtype=torch.uint8), r"torch\.uint8 \[4, 16\]"),
        (torch.zeros(128, dtype=torch.uint8)[::2], r"torch\.uint8 \[64\]"),
    ],
    ids=["another type", "two dimensions", "every second byte"],
)
def test_a_region_that_is_no_run_of_bytes_is_refused(region: torch.Tensor, found: str) -> None:
    """Views compute addresses from the region's base: any other tensor would be read at the wrong places."""
    with pytest.raises(ValueError, match=f"a contiguous one-dimensional uint8 tensor, found {found}"):
        KVArena(region)


@pytest.mark.requirement("A1", "P9")
@pytest.mark.parametrize("shift", [1, 8, 15])
def test_a_region_with_a_misaligned_base_is_refused(shift: int) -> None:
    """Offsets that are multiples of 16 would then be addresses that are not, and vector loads would fault."""
    whole = torch.zeros(128, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"base address {whole.data_ptr() + shift:#x} is no multiple of 16"):
        KVArena(whole[shift:])
    assert KVArena(whole[16:]).byte_count == 112


@pytest.mark.requirement("A2")
def test_a_band_laid_out_over_a_larger_arena_is_refused_with_the_figures() -> None:
    """In a region that is part of a larger tensor, such a view would reach the bytes behind the arena unnoticed."""
    layout = hybrid_layout(4000)
    region = torch.zeros(8000, dtype=torch.uint8)
    RoutedKVCache(KVArena(region[:4000]), layout)
    band = layout.band("state")
    end_byte = band.start_byte(band.page_count)
    assert KVArena(region[:end_byte]).plane(band, band.planes[0]).shape[0] == band.page_count
    with pytest.raises(
        ValueError, match=f"band 'state' ends at byte {end_byte}, the arena has {end_byte - 1}"
    ):
        KVArena(region[: end_byte - 1]).plane(band, band.planes[0])


@pytest.mark.requirement("A1")
@pytest.mark.parametrize("dtype", DType)
def test_every_declared_type_is_a_torch_type_of_the_same_width(dtype: DType) -> None:
    """The planner knows no torch: a width that differed would shift every plane behind it."""
    assert torch_dtype(dtype).itemsize == dtype.byte_width
    assert str(torch_dtype(dtype)) == f"torch.{dtype.value}"


@pytest.mark.requirement("A4")
def test_a_layer_with_attention_and_state_has_a_view_of_each() -> None:
    """Falcon-H1 runs both in every layer: two bands, two id spaces, one layer."""
    layout = hybrid_layout()
    routed = RoutedKVCache(KVArena.allocate(4000), layout)
    attention, state = routed.attention(0), routed.state(0)
    assert attention is not None
    assert state is not None
    assert (attention.band, attention.page_tokens) == ("full", 2)
    assert (state.band, state.page_tokens) == ("state", None)
    pages, slots = layout.band("full").page_count, layout.band("state").page_count
    assert {name: list(plane.shape) for name, plane in attention.planes.items()} == {
        "key": [pages, 2, 2, 4],
        "value": [pages, 2, 2, 6],
    }
    assert {name: (list(plane.shape), plane.dtype) for name, plane in state.planes.items()} == {
        "conv": ([slots, 4, 3], torch.bfloat16),
        "recurrent": ([slots], torch.float32),
    }


@pytest.mark.requirement("A4")
def test_a_layer_has_no_view_of_what_it_does_not_store() -> None:
    """Asking is how an adapter learns what a layer is; one that stores nothing is no error."""
    routed = RoutedKVCache(KVArena.allocate(4000), hybrid_layout())
    window = routed.attention(1)
    assert window is not None
    assert (window.band, list(window.planes)) == ("window-8", ["latent"])
    assert routed.state(1) is None
    assert (routed.attention(2), routed.state(2)) == (None, None)
    assert routed.attention(3) is None
    assert routed.state(3) is not None
    assert (routed.attention(99), routed.state(99)) == (None, None)


@pytest.mark.requirement("A2", "A4")
def test_views_of_two_layers_in_one_band_share_its_pages_and_no_byte() -> None:
    """One id serves every layer of a band; the layers' bytes stay apart."""
    arena = KVArena(torch.zeros(4000, dtype=torch.uint8))
    routed = RoutedKVCache(arena, hybrid_layout())
    first, second = routed.state(0), routed.state(3)
    assert first is not None
    assert second is not None
    first.planes["recurrent"][5] = 1.5
    second.planes["recurrent"][5] = -2.5
    assert first.planes["recurrent"][5] == 1.5
    assert arena.bytes.count_nonzero() == 4


@pytest.mark.requirement("A4", "P6")
def test_a_layer_finds_its_window_its_chain_and_its_state_and_one_that_shares_finds_anothers() -> None:
    """One layer may keep three kinds; a layer that stores none reads another's, which is the same memory."""
    chain = KVPart(CompressedGeometry(MLAGeometry(6, 0, DType.BFLOAT16), 2), FullLifetime())
    window = KVPart(MHAGeometry(1, 2, 2, DType.BFLOAT16), WindowLifetime(8))
    state = KVPart(StateGeometry((TensorDecl("recurrent", (3,), DType.FLOAT32),)), StateLifetime())
    layers = [
        KVLayerDecl(0, (window, chain, state)),
        KVLayerDecl(1, (), shares_layer=0),
        KVLayerDecl(2, (chain,)),
    ]
    plan = plan_kv_storage(layers, page_tokens=4)
    layout = lay_out(plan, 4000)
    cache = RoutedKVCache(KVArena.allocate(4000), layout, plan.shared_layers)
    found = [[(view.band, view.tokens_per_entry) for view in cache.views(layer)] for layer in range(4)]
    assert found == [
        [("window-8", 1), ("full", 2), ("state", 1)],
        [("window-8", 1), ("full", 2)],
        [("full", 2)],
        [],
    ]
    assert (cache.attention(2), cache.state(1)) == (None, None)
    shared, own = cache.compressed(1), cache.compressed(0)
    assert shared is not None
    assert own is not None
    assert shared.planes["latent"].data_ptr() == own.planes["latent"].data_ptr()
    assert list(own.planes["latent"].shape[1:]) == [2, 6]


@pytest.mark.requirement("A4")
@pytest.mark.parametrize("band", hybrid_layout().bands, ids=lambda band: band.name)
def test_a_page_copied_as_one_block_reads_alike_on_the_host(band: BandLayout) -> None:
    """A backup and a load each copy a page's bytes; the host's views must find the same planes in them."""
    device_layout = hybrid_layout()
    device = KVArena(torch.randint(0, 256, (device_layout.arena_bytes,), dtype=torch.uint8))
    layout = host_layout(band, 3)
    host = KVArena(torch.zeros(layout.arena_bytes, dtype=torch.uint8))
    assert layout.arena_bytes == 3 * band.unit_bytes
    assert layout.band(band.name).capacity_pages == 3
    assert not layout.band(band.name).has_sink
    page = band.page_count - 1
    copied = device.bytes[band.start_byte(page) : band.start_byte(page + 1)]
    host.bytes[layout.band(band.name).start_byte(2) :] = copied
    routed, mirrored = RoutedKVCache(device, device_layout), RoutedKVCache(host, layout)
    for layer in {plane.layer for plane in band.planes}:
        (view,) = mirrored.views(layer)
        (original,) = [each for each in routed.views(layer) if each.band == band.name]
        assert (view.band, view.page_tokens) == (band.name, band.page_tokens)
        assert view.planes.keys() == original.planes.keys()
        for name, plane in view.planes.items():
            assert plane.shape == (3, *original.planes[name].shape[1:])
            held, copy = (
                values.reshape(-1).view(torch.uint8) for values in (original.planes[name][page], plane[2])
            )
            assert copy.equal(held)
            assert plane[:2].count_nonzero() == 0


@pytest.mark.requirement("A4")
def test_a_host_pool_of_fewer_than_no_pages_is_refused() -> None:
    """It would wrap into a huge region, or none."""
    with pytest.raises(ValueError, match="a host pool of band 'full' cannot have -1 pages"):
        host_layout(hybrid_layout().band("full"), -1)
