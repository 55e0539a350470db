"""Staging buffers for uploads: taken when the host fills one, back when its upload is known to be over (row K4)."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from kvtide.device.byte_spans import Buffer
from kvtide.device.modelled_streams import ModelledEvent

SMALLEST_BYTES = 256
"""Of a staging buffer."""


@attrs.define(eq=False)
class StagingSlot:
    """One buffer of the ring."""

    buffer: Buffer
    """Its bytes."""

    event: ModelledEvent | None = None
    """Behind the upload that reads it; `None` when it may be filled."""


class StagingRing:
    """Grows when every buffer is in use, and never waits."""

    def __init__(
        self, create_buffer: Callable[[str, int], Buffer], host_has_seen: Callable[[ModelledEvent], bool]
    ) -> None:
        """No buffer yet."""
        self._create_buffer = create_buffer
        self._host_has_seen = host_has_seen
        self._slots: list[StagingSlot] = []

    @property
    def buffer_count(self) -> int:
        """Buffers, in use or not."""
        return len(self._slots)

    def take(self, byte_count: int) -> StagingSlot:
        """A slot whose upload is over, of `byte_count` bytes at least; a new one if there is none."""
        for slot in self._slots:
            if slot.event is not None and self._host_has_seen(slot.event):
                slot.event = None
            if slot.event is None and len(slot.buffer.bytes) >= byte_count:
                return slot
        size = max(SMALLEST_BYTES, 1 << (byte_count - 1).bit_length())
        slot = StagingSlot(self._create_buffer(f"staging buffer {len(self._slots)}", size))
        self._slots.append(slot)
        return slot

    def return_all(self) -> None:
        """Count every upload so far as over."""
        for slot in self._slots:
            slot.event = None
