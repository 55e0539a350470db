"""Copies between the arena and host memory that are on their way, and when each is over (rows H1, H2, C10).

    copy stream      waits for the forward and the schedule stream │ copies ──┤ finish
    schedule stream  goes on: it moves what is being read; whoever next writes there waits (`CLEARANCE`)
    forward stream   goes on; behind a copy into the arena, the next launch waits for it

That a copy has finished one rank sees alone, so nobody asks. It is over in *logical* order: at the processing of the first forward that
was launched behind its submission. That forward has waited for a copy into the arena. A copy out of it nobody has waited for: the schedule
stream is told to then, when as a rule there is nothing left to wait for. Where nothing runs, what is asked next ends them the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvtide.arena import TensorDevice
from kvtide.chain import ChainAllocator
from kvtide.device import Event, IntArray
from kvtide.ledger import Access, HostCopy


@attrs.define(eq=False)
class _OpenCopy:
    signal: HostCopy
    first_forward: int | None = None
    """The first that was launched behind it."""


class HostCopies:
    """Copies of one storage, which alone begins them. No call makes the host wait."""

    def __init__(self, device: TensorDevice, chain: ChainAllocator) -> None:
        """None."""
        self._device = device
        self._chain = chain
        self._open: list[_OpenCopy] = []

    @property
    def open_count(self) -> int:
        """Copies that are not over."""
        return len(self._open)

    def order(self) -> None:
        """Have the copy stream run what is queued next behind all that forwards and the schedule stream were told so far."""
        device = self._device
        for stream in (device.forward_stream, device.schedule_stream):
            device.wait_event(device.copy_stream, device.record_event(stream))

    def begin(self, name: str, access: Access, units: Mapping[str, IntArray]) -> Event:
        """What has just been queued on the copy stream reads or writes `units`, by band; the event behind it.

        One for all that is queued together, so that whoever waits does so once.
        """
        finish = self._device.record_event(self._device.copy_stream)
        if any(len(virtual) for virtual in units.values()):
            signal = HostCopy(name, access, finish)
            self._chain.uses.begin(signal, units)
            self._open.append(_OpenCopy(signal))
        elif access is Access.WRITE:
            # Nothing to follow, but what was brought back beside units is the next forward's too.
            self._device.wait_event(self._device.forward_stream, finish)
        return finish

    def give_up(self) -> None:
        """Queueing has failed half-way: the schedule stream does not touch what was queued before that is over."""
        device = self._device
        device.wait_event(device.schedule_stream, device.record_event(device.copy_stream))

    def forward_launched(self, forward: int) -> None:
        """Have the forward stream wait for what fills the arena: this forward may read it, and so may those behind it."""
        for copy in self._open:
            if copy.first_forward is None:
                copy.first_forward = forward
                if copy.signal.access is Access.WRITE:
                    self._device.wait_event(self._device.forward_stream, copy.signal.finish)

    def forward_processed(self, forward: int) -> None:
        """End the copies that the forward, or one before it, was launched behind."""
        if self._open:
            self._end(
                [one for one in self._open if one.first_forward is not None and one.first_forward <= forward]
            )

    def end_all(self) -> None:
        """End every copy; no forward is in flight."""
        self._end(list(self._open))

    def _end(self, copies: list[_OpenCopy]) -> None:
        for copy in copies:
            self._device.wait_event(self._device.schedule_stream, copy.signal.finish)
            self._chain.uses.end(copy.signal)
            self._open.remove(copy)
