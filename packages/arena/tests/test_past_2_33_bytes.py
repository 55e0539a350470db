"""Arenas larger than 2^33 bytes are addressed exactly to the last page (A3).

The arena is a sparse mapping: memory is taken for the few pages that are written, so the test runs on a laptop. Every band
has its last page beyond 2^33 bytes, and pages at 2^31 and 2^32 where a 32-bit offset would turn negative or start again.
"""

from __future__ import annotations

import mmap
import resource
import sys
from collections.abc import Iterator

import attrs
import numpy as np
import pytest
import torch

from kvtide.arena import (
    CPUDevice,
    KVArena,
    RoutedKVCache,
    gather_tokens,
    token_slots,
    torch_dtype,
    write_tokens,
)
from kvtide.device import IntArray, UnitGrid
from kvtide.plan import (
    ArenaLayout,
    BandLayout,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MHAGeometry,
    MLAGeometry,
    Plane,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    lay_out,
    plan_kv_storage,
)

ARENA_BYTES = 2**33 + 2**20 + 7
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
RESIDENT_LIMIT_BYTES = 256 * 2**20

KINDS = ["state", "window-64", "full"]


def layout() -> ArenaLayout:
    """State of 4-byte, a latent window of 2-byte and full attention of 1-byte elements, in units of a few kilobytes."""
    state = StateGeometry(
        (TensorDecl("conv", (33, 3), DType.BFLOAT16), TensorDecl("recurrent", (5, 9, 13), DType.FLOAT32))
    )
    layers = [
        KVLayerDecl(
            0,
            (
                KVPart(state, StateLifetime()),
                KVPart(MHAGeometry(2, 24, 40, DType.FLOAT8_E4M3), FullLifetime()),
            ),
        ),
        KVLayerDecl(1, (KVPart(MLAGeometry(72, 9, DType.BFLOAT16), WindowLifetime(64)),)),
        KVLayerDecl(2, (KVPart(MHAGeometry(1, 21, 5, DType.INT8), FullLifetime()),)),
    ]
    return lay_out(plan_kv_storage(layers, page_tokens=16), ARENA_BYTES)


@attrs.frozen(eq=False)
class Sparse:
    """An arena past 2^33 bytes, all zero, and its device."""

    layout: ArenaLayout
    device: CPUDevice
    routed: RoutedKVCache

    def raw(self, start: int, byte_count: int) -> torch.Tensor:
        """Bytes of the region, by Python's own integers."""
        return self.device.arena.bytes[start : start + byte_count]

    def unit(self, band: BandLayout, page: int) -> torch.Tensor:
        return self.raw(band.origin_bytes + page * band.unit_bytes, band.unit_bytes)

    def view(self, band: BandLayout, plane: Plane) -> torch.Tensor:
        view = (
            self.routed.state(plane.layer) if band.page_tokens is None else self.routed.attention(plane.layer)
        )
        assert view is not None
        return view.planes[plane.name]


@pytest.fixture
def sparse() -> Iterator[Sparse]:
    """Fresh for each test; fails if memory was ever taken for more than the pages written."""
    before = most_resident_bytes()
    region = mmap.mmap(-1, ARENA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    arena = KVArena(torch.frombuffer(region, dtype=torch.uint8))
    over = layout()
    yield Sparse(over, CPUDevice(arena), RoutedKVCache(arena, over))
    assert most_resident_bytes() - before < RESIDENT_LIMIT_BYTES


def most_resident_bytes() -> int:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def far_pages(band: BandLayout) -> list[int]:
    """The last page, and those around 2^31, 2^32 and 2^33 bytes."""
    last = band.page_count - 1
    assert band.origin_bytes + last * band.unit_bytes >= 2**33
    crossings = [(2**power - band.origin_bytes) // band.unit_bytes for power in (31, 32, 33)]
    return sorted(
        {page for crossing in crossings for page in (crossing - 1, crossing, crossing + 1)} | {last}
    )


def noise(byte_count: int, *seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(1, 256, byte_count, np.uint8))


def ids(pages: list[int]) -> IntArray:
    return np.array(pages, np.int64)


@pytest.mark.requirement("A2", "A3", "P9")
@pytest.mark.parametrize("kind", KINDS)
def test_pages_beyond_2_33_bytes_are_written_through_views_where_the_layout_says(
    sparse: Sparse, kind: str
) -> None:
    """A stride or an offset of 32 bits anywhere between a view and its bytes would land in another request's page."""
    band = sparse.layout.band(kind)
    for page in far_pages(band):
        for place, plane in enumerate(band.planes):
            written = noise(plane.byte_count, page, place)
            sparse.view(band, plane)[page] = written.view(torch_dtype(plane.dtype)).reshape(plane.shape)
        for place, plane in enumerate(band.planes):
            start = band.origin_bytes + page * band.unit_bytes + plane.offset_bytes
            assert torch.equal(sparse.raw(start, plane.byte_count), noise(plane.byte_count, page, place))
    for page in (0, 1, band.first_page, far_pages(band)[0] - 1):
        assert not sparse.unit(band, page).any(), "an offset wrapped to the arena's start"


@pytest.mark.requirement("A3", "A6")
@pytest.mark.parametrize("kind", KINDS)
def test_units_beyond_2_33_bytes_are_zeroed_and_copied(sparse: Sparse, kind: str) -> None:
    """Moves and zeroing index units, not bytes: their product with the unit must not be cut to 32 bits either."""
    band = sparse.layout.band(kind)
    grid = UnitGrid(band.origin_bytes, band.unit_bytes)
    stream = sparse.device.schedule_stream
    pages = far_pages(band)
    low = list(range(band.first_page + 10, band.first_page + 10 + len(pages)))
    for page in low:
        sparse.unit(band, page)[:] = noise(band.unit_bytes, page)

    sparse.device.copy_units(stream, grid, ids(low), ids(pages))
    for source, page in zip(low, pages, strict=True):
        assert torch.equal(sparse.unit(band, page), noise(band.unit_bytes, source))
    sparse.device.copy_units(stream, grid, ids(pages[-2:]), ids([low[0], pages[0]]))
    assert torch.equal(sparse.unit(band, low[0]), noise(band.unit_bytes, low[-2]))
    assert torch.equal(sparse.unit(band, pages[0]), noise(band.unit_bytes, low[-1]))

    sparse.device.zero_units(stream, grid, ids(pages[1::2]))
    for place, page in enumerate(pages):
        assert bool(sparse.unit(band, page).any()) == (place % 2 == 0)
    for page in low[1:]:
        assert torch.equal(sparse.unit(band, page), noise(band.unit_bytes, page))


@pytest.mark.requirement("A3", "A6")
@pytest.mark.parametrize("kind", ["window-64", "full"])
def test_tokens_beyond_2_33_bytes_are_written_and_gathered_by_slot(sparse: Sparse, kind: str) -> None:
    """The write of a forward goes through slots; the bytes are looked for in the raw region, token by token."""
    band = sparse.layout.band(kind)
    pages = torch.tensor(far_pages(band)).repeat_interleave(2)
    offsets = torch.tensor([0, 15]).repeat(len(far_pages(band)))
    slots = token_slots(pages, offsets, 16)
    for plane in band.planes:
        token_bytes = plane.byte_count // 16
        written = noise(len(slots) * token_bytes, plane.offset_bytes).reshape(len(slots), token_bytes)
        values = written.view(torch_dtype(plane.dtype)).reshape(len(slots), *plane.shape[1:])
        view = sparse.view(band, plane)
        write_tokens(view, slots, values)
        for place, (page, offset) in enumerate(zip(pages.tolist(), offsets.tolist(), strict=True)):
            start = band.origin_bytes + page * band.unit_bytes + plane.offset_bytes + offset * token_bytes
            assert torch.equal(sparse.raw(start, token_bytes), written[place])
        gathered = gather_tokens(view, slots).reshape(len(slots), -1)
        assert torch.equal(gathered.view(torch.uint8), written)


@pytest.mark.requirement("A3")
def test_kernels_with_32_bit_offsets_are_refused_with_the_figures(sparse: Sparse) -> None:
    """They would wrap unnoticed, to bytes of other requests, once the pages behind their reach are handed out."""
    with pytest.raises(
        ValueError,
        match=r"kernels with 32-bit offsets cannot address plane 'key' of layer 0 in band 'full': of its \d+ pages of \d+ bytes, "
        r"element 2147483647, the last they reach, lies behind \d+: use kernels with 64-bit offsets",
    ):
        RoutedKVCache(
            sparse.device.arena, attrs.evolve(sparse.layout, bands=sparse.layout.bands[2:]), offset_bits=32
        )


@pytest.mark.requirement("A3")
@pytest.mark.parametrize("offset_bits", [9, 10])
@pytest.mark.parametrize(
    ("dtype", "key_dim", "value_dim"),
    # Of the latter two one ends at the very last element within reach, one at the first beyond.
    [
        (DType.INT8, 5, 3),
        (DType.BFLOAT16, 5, 3),
        (DType.FLOAT32, 5, 3),
        (DType.INT8, 16, 32),
        (DType.INT8, 1, 16),
    ],
)
def test_kernels_are_refused_exactly_beyond_their_reach(
    offset_bits: int, dtype: DType, key_dim: int, value_dim: int
) -> None:
    """A byte less would refuse what runs; a page more would wrap. The reach is asked of torch's own addresses."""
    layers = [KVLayerDecl(0, (KVPart(MHAGeometry(1, key_dim, value_dim, dtype), FullLifetime()),))]
    plan = plan_kv_storage(layers, page_tokens=1)
    accepted, reached = [], []
    for arena_bytes in range(100, 8 * 2**offset_bits, 16):
        over = lay_out(plan, arena_bytes)
        arena = KVArena.allocate(arena_bytes)
        band = over.bands[0]
        offsets = [
            arena.plane(band, plane)[-1].data_ptr() - arena.plane(band, plane).data_ptr() + plane.byte_count
            for plane in band.planes
        ]
        reached.append(max(offsets) // dtype.byte_width - 1 < 2 ** (offset_bits - 1))
        try:
            RoutedKVCache(arena, over, offset_bits=offset_bits)
        except ValueError as error:
            accepted.append(False)
            pages = int(str(error).split("lies behind ")[1].split(":")[0])
            smaller = attrs.evolve(band, page_count=pages)
            RoutedKVCache(arena, attrs.evolve(over, bands=(smaller,)), offset_bits=offset_bits)
            larger = attrs.evolve(over, bands=(attrs.evolve(band, page_count=pages + 1),))
            with pytest.raises(ValueError, match="cannot address"):
                RoutedKVCache(arena, larger, offset_bits=offset_bits)
        else:
            accepted.append(True)
    assert accepted == reached
    assert 0 < sum(accepted) < len(accepted)
