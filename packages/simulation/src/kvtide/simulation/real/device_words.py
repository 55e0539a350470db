"""Bytes of a device where the simulation's work expects NumPy's: the same expressions, queued on a stream.

    the work says                                    queued is
    units[reads]                                     a gather
    np.array_equal(expected, found)                  a comparison, whose result is looked at later; the answer is yes meanwhile
    units[writes] = np.where(mask, numbers, …)       a choice and a scatter
    buffer.bytes.view(np.uint64)[:] = …              a copy to pinned host memory

So a forward, a copy or a transfer is the same function on the modelled device and on a real one. What the host sends along travels
through the device's own staging. Words are 64 bits, unsigned on the host; the device has them as signed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np


class Queue(Protocol):
    """Where the work of the moment runs."""

    def here(self) -> AbstractContextManager[object]:
        """Inside, what torch is told is queued there."""

    def sent(self, values: np.ndarray[Any, Any]) -> Any:
        """A copy of an array on the device, as 64-bit integers; a tensor."""

    def compare(self, found: Any, expected: Any) -> None:
        """Note on the device, without waiting, how many entries of two tensors differ."""


class DeviceWords:
    """A tensor of the device that is indexed, filled, joined and compared as an array is; it works on the queue's stream."""

    def __init__(self, queue: Queue, tensor: Any) -> None:
        """Of a torch tensor."""
        self._queue, self.tensor = queue, tensor

    def __len__(self) -> int:
        """Along the first axis."""
        return len(self.tensor)

    def __getitem__(self, places: Any) -> DeviceWords:
        """A copy of the entries at an array of places, or a view of a slice."""
        with self._queue.here():
            if isinstance(places, np.ndarray):
                return DeviceWords(self._queue, self.tensor.index_select(0, self._queue.sent(places)))
            return DeviceWords(self._queue, self.tensor[places])

    def __setitem__(self, places: Any, values: Any) -> None:
        """Fill the entries at an array of places, all of them, or one."""
        with self._queue.here():
            if isinstance(places, np.ndarray):
                if len(places):
                    self.tensor.index_copy_(0, self._queue.sent(places), self._tensor(values))
            elif places == slice(None):
                self.tensor.copy_(self._tensor(values), non_blocking=True)
            else:
                self.tensor[places].fill_(int(values))

    def ravel(self) -> DeviceWords:
        """In one row."""
        return DeviceWords(self._queue, self.tensor.reshape(-1))

    def __array_function__(
        self, function: Callable[..., Any], _types: Iterable[type], args: Sequence[Any], _named: Any
    ) -> Any:
        """NumPy asks here when one of a function's arguments is of a device."""
        with self._queue.here():
            if function is np.array_equal:
                self._queue.compare(*map(self._tensor, args))
                return True
            if function is np.where:
                condition, yes, no = map(self._tensor, args)
                return DeviceWords(self._queue, yes.where(condition != 0, no))
            if function is np.concatenate:
                return DeviceWords(self._queue, self._joined([self._tensor(part) for part in args[0]]))
        return NotImplemented

    @staticmethod
    def _joined(tensors: Sequence[Any]) -> Any:
        whole = tensors[0].new_empty(sum(map(len, tensors)))
        first = 0
        for tensor in tensors:
            whole[first : first + len(tensor)].copy_(tensor)
            first += len(tensor)
        return whole

    def _tensor(self, values: Any) -> Any:
        return values.tensor if isinstance(values, DeviceWords) else self._queue.sent(np.asarray(values))


class HostMemory:
    """Pinned host memory that copies of the device fill: a host pool, a peer's memory."""

    def __init__(self, queue: Queue, pinned: Any) -> None:
        """Over a tensor of the host, 64-bit words."""
        self._queue, self._pinned = queue, pinned

    @property
    def bytes(self) -> HostMemory:
        """Itself: what `Buffer` calls its bytes."""
        return self

    def __len__(self) -> int:
        """Bytes."""
        return 8 * len(self._pinned)

    def view(self, _dtype: object) -> DeviceWords:
        """As 64-bit words, to be filled by the device."""
        return DeviceWords(self._queue, self._pinned)

    def span(self, start_byte: int, end_byte: int) -> tuple[HostMemory, int, int]:
        """Bytes `[start_byte, end_byte)`, to be read on the host."""
        return self, start_byte, end_byte

    def read(self, start_byte: int, end_byte: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A copy of bytes; the caller has waited for whatever fills them."""
        copied: np.ndarray[Any, np.dtype[np.uint8]] = self._pinned.numpy().view(np.uint8)
        return copied[start_byte:end_byte].copy()
