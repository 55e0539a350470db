"""The seam to the device (decision D2, row V1): everything the allocator asks of it, and nothing else.

The allocator decides on the host and tells the device what to do, in stream order. It never reads device memory and never
waits for the device on the host inside an operation; what it needs ordered, it orders with events.

An implementation owns one arena of bytes and any number of *mirrors*: int32 tables whose truth lies on the host and whose
copies kernels read (decision D1).

The host's maps run ahead of the device: a page that the host has moved, zeroed or handed out is so on the device only once the
schedule stream gets there. Forwards are ordered behind it by their launch. Whoever copies pages on a stream of its own, to a
host pool or to a peer, waits for the schedule stream's position at submission besides the forward stream's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
"""Ids on the host: one-dimensional int64."""


@attrs.frozen
class UnitGrid:
    """Where a band's units lie: unit k is the bytes `[origin_bytes + k × unit_bytes, +unit_bytes)` of the arena."""

    origin_bytes: int
    """Arena offset of unit 0; a multiple of 16."""

    unit_bytes: int
    """Stride; a multiple of 16."""

    def unit_count(self, arena_bytes: int) -> int:
        """Units that lie wholly inside an arena of `arena_bytes`."""
        return (arena_bytes - self.origin_bytes) // self.unit_bytes

    def check_units(self, arena_bytes: int, units: IntArray) -> None:
        """Raise `IndexError` for a unit outside the arena: a negative one, say a masked row, would wrap to the far end."""
        if not len(units):
            return
        lowest, highest, count = int(units.min()), int(units.max()), self.unit_count(arena_bytes)
        if lowest < 0 or highest >= count:
            raise IndexError(
                f"units run from {lowest} to {highest}, an arena of {arena_bytes} bytes holds [0, {count}) from byte "
                f"{self.origin_bytes} at {self.unit_bytes} bytes each"
            )

    def check_pairs(self, arena_bytes: int, sources: IntArray, targets: IntArray) -> None:
        """Raise what `Device.copy_units` does: `ValueError` for lists of different lengths, `IndexError` as `check_units`."""
        if len(sources) != len(targets):
            raise ValueError(f"cannot copy {len(sources)} sources to {len(targets)} targets")
        self.check_units(arena_bytes, sources)
        self.check_units(arena_bytes, targets)


class Stream(Protocol):
    """A queue of device work that runs in order."""

    @property
    def name(self) -> str:
        """For logs and reports."""


class Event(Protocol):
    """A point in one stream, recorded once and never reused."""

    @property
    def stream(self) -> Stream:
        """The stream it was recorded on."""


class Mirror(Protocol):
    """The device's copy of one int32 table of the host. Writes are staged here and land with `Device.upload`."""

    @property
    def length(self) -> int:
        """Entries."""

    def stage(self, indices: IntArray, values: IntArray) -> None:
        """Note that the table holds `values` at `indices` from the next upload on; a later note on an entry wins.

        Both are copied. Raises `IndexError` for an index outside the table, `ValueError` for lists of different lengths.
        """


class Device(Protocol):
    """One arena, its mirrors, and the streams that order work on them."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena."""

    @property
    def schedule_stream(self) -> Stream:
        """Where the allocator's own work runs: zeroing, moves, uploads."""

    @property
    def forward_stream(self) -> Stream:
        """Where forwards run."""

    def record_event(self, stream: Stream) -> Event:
        """A fresh event behind everything queued on `stream` so far."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """`stream` runs nothing queued from now on before `event`; the host does not wait."""

    def query_event(self, event: Event) -> bool:
        """Whether `event` has been reached. May save a wait, must never change a decision (D5)."""

    def wait_on_host(self, event: Event) -> None:
        """The host waits until `event` has been reached. Never called inside an allocator operation (V3)."""

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """Copy unit `sources[i]` to `targets[i]` for each i in order, on `stream`.

        The caller orders the pairs so that no later source is an earlier target, and names no target twice. Raises, with
        nothing copied, `ValueError` for lists of different lengths, `IndexError` for a unit outside the arena.
        """

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """Fill whole units with zero bytes, on `stream`; raises `IndexError` for a unit outside the arena."""

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """Tables of the given lengths, zero-filled; called once, before the first upload, else `RuntimeError`."""

    def upload(self, stream: Stream) -> int:
        """Write every staged entry of every mirror in one batch, on `stream`; returns how many entries it wrote."""
