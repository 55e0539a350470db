"""A device of NumPy bytes that does at once what it is told.

It runs the shipped allocator without torch: for tests of an allocator's decisions, for capacity tools, and, with
`byte_work=False`, for arenas far larger than the machine's memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtide.device.immediate import ImmediateStreams
from kvtide.device.protocols import IntArray, Mirror, Stream, UnitGrid
from kvtide.device.staging import MirrorStaging


class NumpyDevice(ImmediateStreams):
    """See the module's docstring; implements `kvtide.device.Device`."""

    def __init__(self, arena_bytes: int, *, byte_work: bool = True) -> None:
        """An arena of `arena_bytes`, filled with 0xFF (a NaN in every float type), or none without `byte_work`."""
        super().__init__()
        self.arena_bytes = arena_bytes
        self.arena: npt.NDArray[np.uint8] = np.full(arena_bytes if byte_work else 0, 0xFF, np.uint8)
        """The bytes; empty without `byte_work`."""
        self.tables: dict[str, npt.NDArray[np.int32]] = {}
        """What has been uploaded, by mirror name."""
        self._byte_work = byte_work
        self._staging = MirrorStaging()
        self._flat = np.zeros(0, np.int32)

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """See `Device.copy_units`."""
        grid.check_pairs(self.arena_bytes, sources, targets)
        if self._byte_work:
            units = self.units(grid)
            units[targets] = units[sources]

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """See `Device.zero_units`."""
        grid.check_units(self.arena_bytes, units)
        if self._byte_work:
            self.units(grid)[units] = 0

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """See `Device.create_mirrors`."""
        mirrors = self._staging.lay_out(lengths)
        self._flat = np.zeros(sum(lengths.values()), np.int32)
        self.tables = {
            name: self._flat[mirror.offset : mirror.offset + mirror.length]
            for name, mirror in mirrors.items()
        }
        return dict(mirrors)

    def upload(self, stream: Stream) -> int:
        """See `Device.upload`."""
        indices, values = self._staging.drain()
        self._flat[indices] = values
        return len(indices)

    def units(self, grid: UnitGrid) -> npt.NDArray[np.uint8]:
        """The arena as `[unit_count, unit_bytes]` on `grid`; a view."""
        count = grid.unit_count(self.arena_bytes)
        end_byte = grid.origin_bytes + count * grid.unit_bytes
        return self.arena[grid.origin_bytes : end_byte].reshape(count, grid.unit_bytes)
