"""The one region of device bytes (rows A1, A2, A3)."""

from __future__ import annotations

import math

import torch

from kvtide.plan import ALIGNMENT_BYTES, BandLayout, DType, Plane


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch type of the same name."""
    found = getattr(torch, dtype.value)
    assert isinstance(found, torch.dtype)
    return found


class KVArena:
    """`arena_bytes` of `uint8` that hold every band; typed views over it copy nothing and stay right for its life.

    The bytes are not initialised: whoever hands a page out zeroes it first (row A5).
    """

    def __init__(self, region: torch.Tensor) -> None:
        """Wrap `region [arena_bytes]`, uint8 and contiguous.

        Raises `ValueError` for another shape or dtype, or a base address that is no multiple of 16: planes would then be
        unaligned though their offsets are not.
        """
        if region.dtype != torch.uint8 or region.ndim != 1 or not region.is_contiguous():
            raise ValueError(
                f"an arena is a contiguous one-dimensional uint8 tensor, found {region.dtype} {list(region.shape)}"
            )
        if region.data_ptr() % ALIGNMENT_BYTES:
            raise ValueError(
                f"the arena's base address {region.data_ptr():#x} is no multiple of {ALIGNMENT_BYTES}; planes would be unaligned"
            )
        self.bytes = region
        """The region, `[arena_bytes]` uint8."""

    @classmethod
    def allocate(cls, arena_bytes: int, device: torch.device | str = "cpu") -> KVArena:
        """A new region on `device`, uninitialised: on a CPU, memory is taken as pages are written."""
        return cls(torch.empty(arena_bytes, dtype=torch.uint8, device=device))

    @property
    def byte_count(self) -> int:
        """Bytes of the region."""
        return self.bytes.numel()

    def plane(self, band: BandLayout, plane: Plane) -> torch.Tensor:
        """`plane` of every page of `band`: `[page_count, *plane.shape]`, a view with 64-bit strides.

        Index k is page k wherever the band stands; pages below `first_page` (the sink apart) are other bands' sinks. Raises
        `ValueError` for a band laid out over a larger arena.
        """
        if band.start_byte(band.page_count) > self.byte_count:
            raise ValueError(
                f"band {band.name!r} ends at byte {band.start_byte(band.page_count)}, the arena has {self.byte_count}"
            )
        width = plane.dtype.byte_width
        typed = self.bytes[: self.byte_count // width * width].view(torch_dtype(plane.dtype))
        strides = [math.prod(plane.shape[axis + 1 :]) for axis in range(len(plane.shape))]
        return typed.as_strided(
            (band.page_count, *plane.shape),
            (band.unit_bytes // width, *strides),
            # `as_strided` counts from the start of the storage, of which the region may be a part.
            typed.storage_offset() + (band.origin_bytes + plane.offset_bytes) // width,
        )
