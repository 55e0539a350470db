"""What lies inside one unit: the planes of every layer, one after another (row P9).

A *page envelope* holds, for its tokens, the planes of every layer of its sub-pool; a *state slot* holds every tensor of every
state layer. Each plane starts at a multiple of 16 bytes; the unit ends padded to a multiple of 16, so page k + 1 starts
aligned too. Payload is what the model asked for; the difference to the unit is alignment, and is reported, never hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from kvtide.plan.decl import TensorDecl
from kvtide.plan.dtypes import DType

ALIGNMENT_BYTES = 16
"""Grain of planes, units and origins: the widest vector load that kernels use."""


def align_up(byte_count: int) -> int:
    """`byte_count` rounded up to the layout's grain."""
    return -(-byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@attrs.frozen(kw_only=True)
class Plane:
    """One tensor of one layer within a unit."""

    layer: int
    """Layer that reads and writes it."""

    name: str
    """Name within the layer: `key`, `value`, `latent`, `conv`, …"""

    dtype: DType
    """Element type."""

    shape: tuple[int, ...]
    """Shape within one unit: `[page_tokens, …]` for attention, the tensor's own for state."""

    offset_bytes: int
    """Start within the unit; a multiple of 16."""

    @property
    def byte_count(self) -> int:
        """Bytes of the tensor, without the padding behind it."""
        return math.prod(self.shape) * self.dtype.byte_width


@attrs.frozen(kw_only=True)
class UnitLayout:
    """The planes of one page or state slot."""

    planes: tuple[Plane, ...]
    """By offset, which is by layer and then in the geometry's order."""

    @property
    def payload_bytes(self) -> int:
        """Bytes the model asked for."""
        return sum(plane.byte_count for plane in self.planes)

    @property
    def unit_bytes(self) -> int:
        """Stride of a unit: payload and alignment; a multiple of 16."""
        last = self.planes[-1]
        return align_up(last.offset_bytes + last.byte_count)


def lay_out_unit(tensors: Iterable[tuple[int, TensorDecl]], page_tokens: int | None) -> UnitLayout:
    """Lay `(layer, tensor)` pairs one after another; `page_tokens` is `None` for a state slot."""
    planes: list[Plane] = []
    offset_bytes = 0
    for layer, tensor in tensors:
        shape = tensor.shape if page_tokens is None else (page_tokens, *tensor.shape)
        plane = Plane(
            layer=layer, name=tensor.name, dtype=tensor.dtype, shape=shape, offset_bytes=offset_bytes
        )
        planes.append(plane)
        offset_bytes = align_up(offset_bytes + plane.byte_count)
    return UnitLayout(planes=tuple(planes))
