"""Host bytes on their way to a GPU: pinned buffers, taken when filled, back when their work is over (rows K4, A7).

    host arrays ──> pinned bytes ──copy on the stream──> bytes of the GPU ──> the program that reads them ──> event

A buffer is filled again once its event has been reached. The ring grows when every buffer is on its way, and never waits. Work
of one stream ends in the order it was queued, so buffers queue up by stream and size, those never used in front: if the first
is not free, none is. There are few sizes, so that what was made for one call serves the next.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

SECTION_BYTES = 16
"""Each array starts at a multiple of this."""

Staged = npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""What can be sent: ids and table entries."""


class Reached(Protocol):
    """What a staging buffer asks of an event."""

    def query(self) -> bool:
        """Whether the work before it is over; does not wait."""


class EventStream(Hashable, Protocol):
    """What the ring asks of a stream."""

    def record_event(self) -> Reached:
        """An event behind everything queued so far."""


@attrs.define(eq=False)
class StagingBuffer:
    """One buffer of the ring."""

    pinned: torch.Tensor
    """Host bytes, pinned, uint8."""

    event: Reached | None = None
    """Behind the work that reads the buffer; `None` if none ever did."""

    @property
    def is_free(self) -> bool:
        """Whether it may be filled."""
        return self.event is None or self.event.query()

    def send_to(self, target: torch.Tensor, arrays: Sequence[Staged]) -> list[torch.Tensor]:
        """Fill, and queue one copy to `target`, uint8 and 16-byte aligned, on torch's current stream; the arrays as views of it."""
        for section, array in zip(_sections(self.pinned, arrays), arrays, strict=True):
            section.numpy()[...] = array
        size = staged_bytes(arrays)
        target[:size].copy_(self.pinned[:size], non_blocking=True)
        return _sections(target, arrays)


class StagingRing:
    """See the module's docstring."""

    def __init__(self, create_pinned: Callable[[int], torch.Tensor], sizes: Sequence[int]) -> None:
        """No buffer yet; `create_pinned` makes bytes for some, of the first of the rising `sizes` that is enough.

        What none is enough for takes the next power of two.
        """
        self._create_pinned = create_pinned
        self._sizes = sizes
        self._queues: defaultdict[tuple[EventStream, int], deque[StagingBuffer]] = defaultdict(deque)
        self.buffer_count = 0
        """Buffers, on their way or not."""

    def reserve(self, stream: EventStream, byte_count: int, buffer_count: int) -> None:
        """Have so many buffers more for `stream`, so that it allocates nothing while fewer of their size are on their way."""
        size = self._size(byte_count)
        self._queues[stream, size].extendleft(self._new(size, buffer_count))

    @contextmanager
    def buffer(self, stream: EventStream, byte_count: int) -> Iterator[StagingBuffer]:
        """A free buffer of at least `byte_count` bytes, for work queued on `stream` inside; back behind it, done or failed."""
        size = self._size(byte_count)
        queue = self._queues[stream, size]
        buffer = queue.popleft() if queue and queue[0].is_free else self._new(size, 1)[0]
        try:
            yield buffer
        finally:
            buffer.event = stream.record_event()
            queue.append(buffer)

    def _size(self, byte_count: int) -> int:
        return next((size for size in self._sizes if size >= byte_count), 1 << (byte_count - 1).bit_length())

    def _new(self, size: int, buffer_count: int) -> list[StagingBuffer]:
        self.buffer_count += buffer_count
        # At once: each allocation of pinned memory may stall the GPU.
        return [
            StagingBuffer(pinned)
            for pinned in self._create_pinned(size * buffer_count).view(-1, size).unbind()
        ]


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
