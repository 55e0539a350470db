"""Streams and events of a device whose every call is complete when it returns: there is no order left to make."""

from __future__ import annotations

import attrs

from kvtide.device.protocols import Event, Stream


@attrs.frozen
class ImmediateStream:
    """A stream whose work is done when the call that queued it returns."""

    name: str
    """For logs."""


@attrs.frozen(eq=False)
class ImmediateEvent:
    """An event that was reached when it was recorded; equal to itself only, like any event."""

    stream: Stream
    """Where it was recorded."""


class ImmediateStreams:
    """The ordering half of `Device`; a device over NumPy or host tensors adds the bytes."""

    def __init__(self) -> None:
        """Two streams, by name only."""
        self.schedule_stream = ImmediateStream("schedule")
        self.forward_stream = ImmediateStream("forward")

    def record_event(self, stream: Stream) -> ImmediateEvent:
        """See `Device.record_event`."""
        return ImmediateEvent(stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Nothing to wait for: the event has been reached."""

    def query_event(self, event: Event) -> bool:
        """Always true."""
        return True

    def wait_on_host(self, event: Event) -> None:
        """Nothing to wait for: the event has been reached."""
