"""Bytes that work may touch: buffers, and spans of them as reads and writes are declared."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from kvtide.device.protocols import IntArray, UnitGrid

ByteArray = npt.NDArray[np.uint8]
"""Bytes on the host."""


@attrs.frozen(eq=False)
class Buffer:
    """A run of bytes with a name: the arena, the mirrors, a staging buffer, a host pool."""

    name: str
    """For reports: "the arena"."""

    bytes: ByteArray = attrs.field(repr=False)
    """The bytes as they are now. Reading them here asks nobody: it is for a test's own assertions."""

    name_bytes: Callable[[int, int], str] | None = attrs.field(default=None, repr=False)
    """What `[start_byte, end_byte)` means to a reader; `None` if they are just bytes."""

    def span(self, start_byte: int = 0, end_byte: int | None = None) -> ByteSpan:
        """Bytes `[start_byte, end_byte)`, to the buffer's end by default; `IndexError` for bytes outside it."""
        end_byte = len(self.bytes) if end_byte is None else end_byte
        if not 0 <= start_byte <= end_byte <= len(self.bytes):
            raise IndexError(
                f"bytes [{start_byte}, {end_byte}) do not lie in {self.name}, which has {len(self.bytes)}"
            )
        return ByteSpan(self, start_byte, end_byte)

    def units(self, grid: UnitGrid, units: IntArray) -> tuple[ByteSpan, ...]:
        """Spans of these units of a grid, neighbours joined, ascending; `IndexError` for a unit outside the buffer."""
        grid.check_units(len(self.bytes), units)
        return tuple(
            ByteSpan(
                self,
                grid.origin_bytes + first * grid.unit_bytes,
                grid.origin_bytes + end * grid.unit_bytes,
                grid,
            )
            for first, end in runs(units)
        )


@attrs.frozen
class ByteSpan:
    """Bytes `[start_byte, end_byte)` of one buffer; made by `Buffer.span` and `Buffer.units`."""

    buffer: Buffer
    """Whose bytes."""

    start_byte: int
    """Inclusive."""

    end_byte: int
    """Exclusive."""

    grid: UnitGrid | None = None
    """Whose units a report calls them; `None` if they are just bytes."""

    @property
    def byte_count(self) -> int:
        """Bytes in the span."""
        return self.end_byte - self.start_byte

    def covers(self, other: ByteSpan) -> bool:
        """Whether `other` lies wholly inside."""
        return (
            self.buffer is other.buffer
            and self.start_byte <= other.start_byte
            and other.end_byte <= self.end_byte
        )


def runs(ids: IntArray) -> list[tuple[int, int]]:
    """Ids as half-open runs, ascending, each id once."""
    if not len(ids):
        return []
    ordered = np.unique(ids)
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts = ordered[np.concatenate(([0], breaks + 1))]
    ends = ordered[np.concatenate((breaks, [len(ordered) - 1]))] + 1
    return list(zip(firsts.tolist(), ends.tolist(), strict=True))
