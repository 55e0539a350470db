"""What lies inside one unit: the planes of every layer, one after another (row P9).

A *page envelope* holds, for its tokens, the planes of every layer of its sub-pool; a *state slot* holds every tensor of every
state layer. Each plane starts at a multiple of 16 bytes; the unit ends padded to a multiple of 16, so page k + 1 starts
aligned too. Payload is what the model asked for; the difference to the unit is alignment, and is reported, never hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from kvtide.plan.dtypes import DType
from kvtide.plan.errors import PlanError
from kvtide.plan.geometry import TensorDecl

ALIGNMENT_BYTES = 16
"""Grain of planes, units and origins: the widest vector load that kernels use."""

MOVE_SCRATCH_BYTES = 1 << 20
"""Most bytes that a CPU device holds beside arena and mirrors while it moves units; charged to its budget, spent in
`kvtide.arena`."""

GPU_SCRATCH_BYTES = 33 << 20
"""The same of a GPU: 1 MiB for ids on their way, and 32 through which a band passes that moves over itself.

Each filling is two launches, tens of microseconds of the host whatever it holds. To read and write 32 MiB takes a GPU of 4 TB/s
16 µs, so the launches keep up; with 1 MiB it would wait for them nearly all the time.
"""


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
    """Shape within one unit: `[entries, …]` for attention, an entry a token or a stride of them; the tensor's own for state."""

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
    """Lay `(layer, tensor)` pairs one after another; `page_tokens` is `None` for a state slot.

    Raises `PlanError` where a page is no multiple of a tensor's stride, and for two planes of one name in a layer.
    """
    planes: list[Plane] = []
    taken: dict[tuple[int, str], DType] = {}
    offset_bytes = 0
    for layer, tensor in tensors:
        other = taken.setdefault((layer, tensor.name), tensor.dtype)
        if len(taken) == len(planes):
            found = "twice" if other is tensor.dtype else f"as {other.value} and as {tensor.dtype.value}"
            raise PlanError(
                f"layer {layer} declares plane {tensor.name!r} {found}: a plane has one tensor of one dtype"
            )
        plane = Plane(
            layer=layer,
            name=tensor.name,
            dtype=tensor.dtype,
            shape=_unit_shape(layer, tensor, page_tokens),
            offset_bytes=offset_bytes,
        )
        planes.append(plane)
        offset_bytes = align_up(offset_bytes + plane.byte_count)
    return UnitLayout(planes=tuple(planes))


def _unit_shape(layer: int, tensor: TensorDecl, page_tokens: int | None) -> tuple[int, ...]:
    if page_tokens is None:
        return tensor.shape
    if page_tokens % tensor.tokens_per_entry:
        raise PlanError(
            f"page_tokens = {page_tokens} is no multiple of {tensor.tokens_per_entry}, the tokens that one entry of layer "
            f"{layer} stands for"
        )
    return (page_tokens // tensor.tokens_per_entry, *tensor.shape)
