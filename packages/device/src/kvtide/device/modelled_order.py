"""The ordering half of the modelled device: streams, events, when queued work runs, and who may wait.

What orders: entries of one stream; `wait_event`; and the host, which orders what it waited for (or saw by a query that said
yes) before everything it does and queues afterwards. Nothing here knows of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtide.device.modelled_streams import Entry, ModelledEvent, ModelledStream, SeededSchedule, StreamQueues
from kvtide.device.protocols import Event, Stream
from kvtide.device.races import HostMayNotWaitError
from kvtide.device.vector_clocks import Clock, Timelines, entry, join


class ModelledOrder:
    """Two streams and more; a device over watched bytes adds the work."""

    def __init__(self, *, seed: int | None, random_queries: bool) -> None:
        """The streams "schedule" and "forward"; arguments as of `ModelledDevice`."""
        if random_queries and seed is None:
            raise ValueError("random_queries needs a seed to draw the answers from")
        self._timelines = Timelines()
        self._queues = StreamQueues()
        self._schedule = None if seed is None else SeededSchedule(seed)
        self._random_queries = random_queries
        self._operations: list[tuple[str, str | None]] = []
        self._transfers: list[tuple[ModelledStream, ModelledEvent]] = []
        self.schedule_stream = self.create_stream("schedule")
        self.forward_stream = self.create_stream("forward")

    def create_stream(self, name: str) -> ModelledStream:
        """One more stream: a copy stream, a side stream."""
        stream = ModelledStream(name, self._timelines.open())
        self._queues.streams.append(stream)
        return stream

    # ── order ──

    def record_event(self, stream: Stream) -> ModelledEvent:
        """See `Device.record_event`."""
        own = self._own(stream)
        self._let_time_pass()
        clock = self._timelines.now(own.timeline, own.clock)
        return ModelledEvent(own, own.queued_count, clock)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See `Device.wait_event`."""
        own, reached = self._own(stream), _modelled(event)
        self._let_time_pass()
        own.clock = join(own.clock, reached.clock)
        own.wait_count += 1
        self._queues.queue(own, Entry(event=reached))

    def query_event(self, event: Event) -> bool:
        """See `Device.query_event`: whether it has been reached, or see `random_queries`. A yes counts as seen by the host."""
        reached = _modelled(event)
        self._let_time_pass()
        if self._random_queries and self._schedule is not None and not self.host_has_seen(reached):
            if self._schedule.random.random() < 0.5:
                return False
            self._queues.run_until(reached)
        if not self._queues.is_reached(reached):
            return False
        self._host_sees(reached.clock)
        return True

    def wait_on_host(self, event: Event) -> None:
        """See `Device.wait_on_host`: runs what the event needs. Raises `HostMayNotWaitError` inside `no_host_waits`."""
        reached = _modelled(event)
        self._refuse(f"wait for stream {reached.stream.name!r}", reached.stream.name)
        self._let_time_pass()
        self._queues.run_until(reached)
        self._host_sees(reached.clock)

    def synchronize(self) -> None:
        """The host waits for everything queued so far."""
        self._refuse("wait for every stream")
        self.run_all()
        for stream in list(self._queues.streams):
            self._host_sees(self._timelines.now(stream.timeline, stream.clock))

    def host_has_seen(self, event: Event) -> bool:
        """Whether the host has waited for `event`, or for something behind it; runs nothing and asks no device."""
        reached = _modelled(event)
        timeline = reached.stream.timeline
        return entry(reached.clock, timeline) <= entry(self._timelines.host_clock, timeline)

    @contextmanager
    def no_host_waits(self, operation: str, *, except_on: str | None = None) -> Iterator[None]:
        """Inside, device reads and host waits raise `HostMayNotWaitError`, which names `operation` (row V3).

        `except_on` names the one stream that the host may wait for all the same: "network" for transfers. Queries, uploads
        and whatever is queued are no waits. Scopes nest; each must agree.
        """
        self._operations.append((operation, except_on))
        try:
            yield
        finally:
            self._operations.pop()

    # ── time ──

    def ready_streams(self) -> list[ModelledStream]:
        """Streams, and transfers, whose next work can run now."""
        return self._queues.ready()

    def run_next(self, stream: Stream) -> bool:
        """Run the next work of a stream; false when there is none, or it waits for an event."""
        return self._queues.run_next(self._own(stream))

    def run_until(self, event: Event) -> None:
        """Run what `event` needs and nothing else; the host learns nothing of it."""
        self._queues.run_until(_modelled(event))

    def run_all(self) -> None:
        """Run everything queued, one work of each ready stream in turn."""
        while ready := self._queues.ready():
            for stream in ready:
                self._queues.run_next(stream)

    # ── for the device ──

    def _open_transfer(self, engine: str) -> ModelledStream:
        """A stream of its own for one transfer, behind only what the host has seen."""
        stream = ModelledStream(engine, self._timelines.open(), self._timelines.host_clock)
        self._queues.streams.append(stream)
        return stream

    def _end_transfer(self, stream: ModelledStream) -> ModelledEvent:
        """The end of a transfer whose work has been queued; its stream goes once the host has seen it."""
        event = self.record_event(stream)
        self._transfers.append((stream, event))
        return event

    def _host_sees(self, clock: Clock) -> None:
        self._timelines.host_sees(clock)
        for stream, end in self._transfers[:]:
            if self.host_has_seen(end):
                self._transfers.remove((stream, end))
                self._queues.streams.remove(stream)
                self._timelines.close(stream.timeline)

    def _let_time_pass(self) -> None:
        """With a seed, some work runs before each call."""
        if self._schedule is not None:
            self._schedule.pass_time(self._queues)

    def _refuse(self, action: str, stream_name: str | None = None) -> None:
        """Raise inside a scope that forbids `action`."""
        for operation, except_on in self._operations:
            if stream_name is None or stream_name != except_on:
                raise HostMayNotWaitError(
                    f"{operation} may not {action}: inside it the host reads no device memory and waits for no stream"
                    + ("" if except_on is None else f" but {except_on!r}")
                )

    def _own(self, stream: Stream) -> ModelledStream:
        if not isinstance(stream, ModelledStream):
            raise TypeError(
                f"stream {stream.name!r} is not one of this device: use its streams, or create_stream"
            )
        return stream


def _modelled(event: Event) -> ModelledEvent:
    if not isinstance(event, ModelledEvent):
        raise TypeError(f"an event of stream {event.stream.name!r} was recorded on another kind of device")
    return event
