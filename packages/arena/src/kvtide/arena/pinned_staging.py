"""Host bytes on their way to a GPU: pinned buffers, taken when filled, back when their work is over (rows K4, A7).

    host arrays ──> pinned bytes ──copy on the stream──> landing bytes ──> the program that reads them ──> event

A buffer is filled again once its event has been reached. The ring grows when every buffer is on its way, and never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

SMALLEST_BYTES = 1 << 16
"""Of a staging buffer."""

SECTION_BYTES = 16
"""Each array starts at a multiple of this."""

Staged = npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""What can be sent: ids and table entries."""


class Reached(Protocol):
    """What a staging buffer asks of an event."""

    def query(self) -> bool:
        """Whether the work before it is over; does not wait."""


@attrs.define(eq=False)
class StagingBuffer:
    """One buffer of the ring, and where it lands."""

    pinned: torch.Tensor
    """Host bytes, pinned, uint8."""

    landing: torch.Tensor
    """As many bytes on the device."""

    event: Reached | None = None
    """Behind the work that reads the buffer; `None` when it may be filled."""

    def send(self, arrays: Sequence[Staged]) -> list[torch.Tensor]:
        """Fill, and queue one copy on torch's current stream; the arrays on the device, as views of `landing`.

        They hold until the buffer is taken again; `event` is the caller's to set, behind whatever reads them.
        """
        return self.send_to(self.landing, arrays)

    def send_to(self, target: torch.Tensor, arrays: Sequence[Staged]) -> list[torch.Tensor]:
        """As `send`, to bytes of the device that the caller chose, uint8 and 16-byte aligned."""
        for section, array in zip(_sections(self.pinned, arrays), arrays, strict=True):
            section.numpy()[...] = array
        size = staged_bytes(arrays)
        target[:size].copy_(self.pinned[:size], non_blocking=True)
        return _sections(target, arrays)


class StagingRing:
    """See the module's docstring."""

    def __init__(self, create_buffer: Callable[[int], StagingBuffer]) -> None:
        """No buffer yet; `create_buffer` makes one of so many bytes."""
        self._create_buffer = create_buffer
        self._buffers: list[StagingBuffer] = []

    @property
    def buffer_count(self) -> int:
        """Buffers, on their way or not."""
        return len(self._buffers)

    def reserve(self, buffer_count: int, byte_count: int) -> None:
        """Have at least so many buffers of so many bytes each, so that a take allocates nothing while fewer are out."""
        fitting = sum(len(buffer.pinned) >= byte_count for buffer in self._buffers)
        for _ in range(buffer_count - fitting):
            self._grow(byte_count)

    def take(self, byte_count: int) -> StagingBuffer:
        """The smallest buffer of `byte_count` bytes or more whose work is over; a new one if there is none."""
        for buffer in self._buffers:
            if buffer.event is not None and buffer.event.query():
                buffer.event = None
        idle = [each for each in self._buffers if each.event is None and len(each.pinned) >= byte_count]
        return min(idle, key=lambda each: len(each.pinned)) if idle else self._grow(byte_count)

    def _grow(self, byte_count: int) -> StagingBuffer:
        buffer = self._create_buffer(max(SMALLEST_BYTES, 1 << (byte_count - 1).bit_length()))
        self._buffers.append(buffer)
        return buffer


def staged_bytes(arrays: Sequence[Staged]) -> int:
    """Bytes of staging that these arrays take."""
    return sum(-(-array.nbytes // SECTION_BYTES) * SECTION_BYTES for array in arrays)


def _sections(region: torch.Tensor, arrays: Sequence[Staged]) -> list[torch.Tensor]:
    """Where each array lies in `region`, with its shape and type."""
    sections = []
    for place, array in enumerate(arrays):
        start = staged_bytes(arrays[:place])
        dtype = torch.int64 if array.dtype == np.int64 else torch.int32
        sections.append(region[start : start + array.nbytes].view(dtype).view(array.shape))
    return sections
