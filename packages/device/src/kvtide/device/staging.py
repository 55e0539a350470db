"""Staged writes to mirrors, shared by the devices: many notes on the host, one batch to the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtide.device.protocols import IntArray


class StagedMirror:
    """One table's window onto the flat buffer that holds every mirror of a device."""

    def __init__(self, staging: MirrorStaging, offset: int, length: int) -> None:
        self._staging = staging
        self.offset = offset
        """First entry in the flat buffer."""
        self._length = length

    @property
    def length(self) -> int:
        """Entries of this table."""
        return self._length

    def stage(self, indices: IntArray, values: IntArray) -> None:
        """See `Mirror.stage`."""
        if len(indices) != len(values):
            raise ValueError(f"cannot stage {len(values)} values at {len(indices)} indices")
        if not len(indices):
            return
        if indices.min() < 0 or indices.max() >= self._length:
            # In the flat buffer it would be an entry of a neighbouring table.
            raise IndexError(
                f"cannot stage indices {indices.min()} to {indices.max()} of a table with {self._length} entries"
            )
        self._staging.add(indices + self.offset, values)


class MirrorStaging:
    """Notes since the last upload, for all tables of one device together."""

    def __init__(self) -> None:
        self._indices: list[IntArray] = []
        self._values: list[npt.NDArray[np.int32]] = []
        self._laid_out = False

    def lay_out(self, lengths: Mapping[str, int]) -> dict[str, StagedMirror]:
        """Place tables side by side in one flat buffer, in the order given; once, since tables have fixed addresses."""
        if self._laid_out:
            raise RuntimeError("this device has its mirrors already: create them all in one call")
        self._laid_out = True
        mirrors = {}
        offset = 0
        for name, length in lengths.items():
            mirrors[name] = StagedMirror(self, offset, length)
            offset += length
        return mirrors

    def add(self, indices: IntArray, values: IntArray) -> None:
        """Note `values` at `indices` of the flat buffer; both are copied, so the caller may go on using them."""
        self._indices.append(indices.astype(np.int64))
        self._values.append(values.astype(np.int32))

    def drain(self) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """Everything noted since the last call, each entry once with its last value."""
        if not self._indices:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        indices = np.concatenate(self._indices)
        values = np.concatenate(self._values)
        self._indices.clear()
        self._values.clear()
        # `np.unique` keeps the first of equal entries, so the reversed notes leave each entry's last value.
        entries, last_note = np.unique(indices[::-1], return_index=True)
        return entries, values[::-1][last_note]
