"""Pages past 2^34 bytes (row A3): an offset that is 32 bits wide anywhere, counted in bytes or in words of eight, wraps before.

Bytes are written through the device and the programs and looked for in the raw region by Python's own integers; at the end the
rest of the arena must be as empty as it was.
"""

import attrs
import numpy as np
import torch

from gpu_place import Place
from kvtide.arena import (
    KVArena,
    RoutedKVCache,
    TensorDevice,
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
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    lay_out,
    plan_kv_storage,
)

PAGE_TOKENS = 16
PART_BYTES = 1 << 30
"""What is looked through at once."""


def layout_past(power: int, more_bytes: int) -> ArenaLayout:
    """State, a window and full attention, of types of one and two bytes, over an arena past 2 to `power`."""
    full = MHAGeometry(2, 24, 40, DType.FLOAT8_E4M3)
    state = StateGeometry((TensorDecl("conv", (33, 3), DType.BFLOAT16),))
    layers = [
        KVLayerDecl(0, (KVPart(full, FullLifetime()), KVPart(state, StateLifetime()))),
        KVLayerDecl(1, (KVPart(MLAGeometry(72, 9, DType.BFLOAT16), WindowLifetime(64)),)),
    ]
    return lay_out(plan_kv_storage(layers, page_tokens=PAGE_TOKENS), (1 << power) + more_bytes)


@attrs.define(eq=False)
class Far:
    """An arena of zeros, its device, and where in it to look."""

    place: Place
    layout: ArenaLayout
    powers: tuple[int, ...]
    """Of two, in bytes; pages around them are used, and each band's last."""
    arena: KVArena
    device: TensorDevice
    draw: np.random.Generator

    def noise(self, byte_count: int) -> torch.Tensor:
        """Bytes of which none is zero."""
        return torch.from_numpy(self.draw.integers(1, 256, byte_count, np.uint8))

    def pages(self, band: BandLayout) -> IntArray:
        """Three around each power, and the last, rising."""
        crossings = [((1 << power) - band.origin_bytes) // band.unit_bytes for power in self.powers]
        around = [page + step for page in crossings for step in (-1, 0, 1)]
        assert band.page_count - 1 > around[-1] + 1, "the arena ends too soon"
        return np.array([*around, band.page_count - 1])

    def unit(self, band: BandLayout, page: int) -> torch.Tensor:
        """The raw bytes of a page."""
        return self.arena.bytes[band.start_byte(page) : band.start_byte(page + 1)]

    def check(self, band: BandLayout, pages: IntArray, expected: list[torch.Tensor], what: str) -> None:
        """Raise `AssertionError` unless the raw pages hold these bytes."""
        self.place.synchronize()
        for page, content in zip(pages.tolist(), expected, strict=True):
            found = self.unit(band, page).cpu()
            assert torch.equal(found, content), f"band {band.name!r}: page {page} was not {what}"

    def units(self, band: BandLayout) -> None:
        """Copy pages there, move some over themselves, zero them."""
        grid, stream = UnitGrid(band.origin_bytes, band.unit_bytes), self.device.schedule_stream
        pages = self.pages(band)
        low = np.arange(len(pages)) + band.first_page + 10
        contents = [self.noise(band.unit_bytes) for _ in pages]
        for page, content in zip(low.tolist(), contents, strict=True):
            self.unit(band, page).copy_(content)
        self.place.synchronize()
        self.device.copy_units(stream, grid, low, pages)
        self.check(band, pages, contents, "copied")
        # The three around the last power, each over the next.
        block = pages[-4:-1][::-1]
        self.device.copy_units(stream, grid, block, block + 1)
        self.check(band, block + 1, contents[-4:-1][::-1], "moved over its neighbour")
        used = np.concatenate([low, pages, block[:1] + 1])
        self.device.zero_units(stream, grid, used)
        self.check(band, used, [torch.zeros(band.unit_bytes, dtype=torch.uint8)] * len(used), "zeroed")

    def tokens(self, band: BandLayout, planes: dict[str, torch.Tensor]) -> None:
        """Write the first and the last token of pages there, gather them, clear them."""
        pages = self.pages(band)
        slots = token_slots(
            torch.from_numpy(pages).repeat_interleave(2),
            torch.tensor([0, PAGE_TOKENS - 1]).repeat(len(pages)),
            PAGE_TOKENS,
        )
        there = slots.to(self.place.memory)
        for plane in band.planes:
            token_bytes = plane.byte_count // PAGE_TOKENS
            raw = self.noise(len(slots) * token_bytes).view(len(slots), token_bytes)
            values = raw.view(torch_dtype(plane.dtype)).reshape(len(slots), *plane.shape[1:])
            write_tokens(planes[plane.name], there, values.to(self.place.memory))
            for slot, expected in zip(slots.tolist(), raw, strict=True):
                start = band.start_byte(slot // PAGE_TOKENS) + plane.offset_bytes
                start += slot % PAGE_TOKENS * token_bytes
                found = self.arena.bytes[start : start + token_bytes].cpu()
                assert torch.equal(found, expected), (
                    f"band {band.name!r}: slot {slot} was not written to byte {start}"
                )
            gathered = gather_tokens(planes[plane.name], there).cpu().reshape(len(slots), -1)
            assert torch.equal(gathered.view(torch.uint8), raw), (
                f"band {band.name!r}: other bytes were gathered"
            )
        for page in pages.tolist():
            self.unit(band, page).zero_()
        self.place.synchronize()


def far_pages(place: Place) -> str:
    """Copy, zero, write and gather pages there; what was done, in words."""
    powers = (31, 32, 33, 34) if place.is_gpu else (19, 20)
    layout = layout_past(powers[-1], (1 << powers[0]) // 8 + 7)
    arena = KVArena.allocate(layout.arena_bytes, place.memory)
    arena.bytes.zero_()
    far = Far(place, layout, powers, arena, place.device(arena), np.random.default_rng(6))
    routed = RoutedKVCache(arena, layout)
    for band in layout.bands:
        far.units(band)
    for layer in (0, 1):
        view = routed.attention(layer)
        assert view is not None
        far.tokens(layout.band(view.band), dict(view.planes))
    starts = range(0, layout.arena_bytes, PART_BYTES)
    stray = sum(int(arena.bytes[start : start + PART_BYTES].count_nonzero()) for start in starts)
    assert stray == 0, f"{stray} bytes were written elsewhere"
    pages = sum(len(far.pages(band)) for band in layout.bands)
    return (
        f"{pages} pages of an arena of {layout.arena_bytes / 2**30:.2f} GiB, byte for byte, and no other byte"
    )
