"""The modelled device's mirrors: one flat buffer of watched bytes, written by uploads from watched staging."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvtide.device.byte_spans import Buffer, ByteSpan, runs
from kvtide.device.protocols import Mirror
from kvtide.device.running_work import RunningWork
from kvtide.device.staging import MirrorStaging

ENTRY_BYTES = 4


@attrs.frozen(eq=False)
class UploadBatch:
    """What one upload brings."""

    staged: npt.NDArray[np.int32]
    """Pairs of flat entry and value, `[entry_count, 2]`: the bytes of a staging buffer."""

    targets: tuple[ByteSpan, ...]
    """Where the values go."""


class WatchedMirrors:
    """Tables side by side in one buffer, at fixed places."""

    def __init__(self) -> None:
        """None yet."""
        self._buffer = Buffer("the mirrors", np.zeros(0, np.uint8))
        self._offsets: dict[str, tuple[int, int]] = {}
        self._notes = MirrorStaging()

    def create(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """See `Device.create_mirrors`."""
        mirrors = self._notes.lay_out(lengths)
        flat = np.zeros(ENTRY_BYTES * sum(lengths.values()), np.uint8)
        self._buffer = Buffer("the mirrors", flat, self._name_entries)
        self._offsets = {name: (mirror.offset, mirror.length) for name, mirror in mirrors.items()}
        return dict(mirrors)

    def tables(self) -> dict[str, npt.NDArray[np.int32]]:
        """Views of the bytes as they are now."""
        flat = self._flat()
        return {name: flat[offset : offset + length] for name, (offset, length) in self._offsets.items()}

    def span(self, name: str, first_entry: int, end_entry: int | None) -> ByteSpan:
        """Entries of one table."""
        offset, length = self._offsets[name]
        end_entry = length if end_entry is None else end_entry
        if not 0 <= first_entry <= end_entry <= length:
            raise IndexError(
                f"entries [{first_entry}, {end_entry}) do not lie in mirror {name!r}, which has {length}"
            )
        return self._buffer.span((offset + first_entry) * ENTRY_BYTES, (offset + end_entry) * ENTRY_BYTES)

    def drain(self) -> UploadBatch | None:
        """Everything staged since the last call."""
        entries, values = self._notes.drain()
        if not len(entries):
            return None
        return UploadBatch(
            np.stack([entries.astype(np.int32), values], axis=1),
            tuple(self._buffer.span(ENTRY_BYTES * first, ENTRY_BYTES * end) for first, end in runs(entries)),
        )

    def writer(self, source: ByteSpan) -> Callable[[RunningWork], None]:
        """Work that brings the pairs that lie at `source` when it runs."""

        def write(work: RunningWork) -> None:
            pairs = work.read(source).view(np.int32).reshape(-1, 2)
            self._flat()[pairs[:, 0]] = pairs[:, 1]

        return write

    def _flat(self) -> npt.NDArray[np.int32]:
        return self._buffer.bytes.view(np.int32)

    def _name_entries(self, start_byte: int, end_byte: int) -> str:
        """Bytes of the buffer in words."""
        parts = []
        for name, (offset, length) in self._offsets.items():
            first = max(start_byte // ENTRY_BYTES, offset)
            end = min(-(-end_byte // ENTRY_BYTES), offset + length)
            if first < end:
                parts.append(f"mirror {name!r} entries [{first - offset}, {end - offset})")
        return " and ".join(parts)
