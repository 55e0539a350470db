"""Streams whose work runs when somebody says so, and the seeded schedules that may say it.

A stream is a queue of work and of waits for events. Its first entry can run when it is work, or a wait whose event has been
reached. Events are recorded before they are waited for, so whatever order the streams advance in, all of them end.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import attrs

from kvtide.device.vector_clocks import Clock, Work


@attrs.define(eq=False)
class ModelledStream:
    """A queue of work in order; made by `ModelledDevice.create_stream`. Only its device changes it."""

    name: str
    """For reports."""

    timeline: int
    """Its place in clocks."""

    clock: Clock = ()
    """What lies behind work that is queued next, apart from the stream itself and the host."""

    queued_count: int = 0
    """Entries ever queued."""

    wait_count: int = 0
    """Waits among them."""

    done_count: int = 0
    """Entries run."""

    entries: deque[Entry] = attrs.field(factory=deque, repr=False)
    """What has not run yet."""


@attrs.frozen(eq=False)
class ModelledEvent:
    """A point in one stream; equal to itself only."""

    stream: ModelledStream
    """Where it was recorded."""

    position: int
    """Entries of the stream before it."""

    clock: Clock
    """What lies behind it."""


@attrs.frozen(eq=False)
class Entry:
    """One place in a stream's queue: work, or a wait."""

    work: Work | None = None
    """Who runs."""

    run: Callable[[], None] | None = None
    """What it does to bytes, if anything."""

    event: ModelledEvent | None = None
    """What a wait waits for."""


class StreamQueues:
    """The streams of one device, and how they advance."""

    def __init__(self) -> None:
        """No stream yet."""
        self.streams: list[ModelledStream] = []
        """In the order they were made."""

    def queue(self, stream: ModelledStream, entry: Entry) -> None:
        """Add an entry behind everything queued on `stream`."""
        stream.entries.append(entry)
        stream.queued_count += 1

    def is_reached(self, event: ModelledEvent) -> bool:
        """Whether everything before `event` has run."""
        if event.stream.done_count < event.position:
            self._pass_waits(event.stream)
        return event.stream.done_count >= event.position

    def ready(self) -> list[ModelledStream]:
        """Streams whose next entry is work that can run now."""
        for stream in self.streams:
            self._pass_waits(stream)
        return [stream for stream in self.streams if stream.entries and stream.entries[0].event is None]

    def run_next(self, stream: ModelledStream) -> bool:
        """Run the next work of `stream`; false when it has none, or waits."""
        self._pass_waits(stream)
        if not stream.entries or stream.entries[0].event is not None:
            return False
        entry = stream.entries.popleft()
        stream.done_count += 1
        if entry.run is not None:
            entry.run()
        return True

    def run_until(self, event: ModelledEvent) -> None:
        """Run what `event` needs, and nothing else."""
        goals = [event]
        while goals:
            goal = goals[-1]
            if self.is_reached(goal):
                goals.pop()
                continue
            blocked_by = goal.stream.entries[0].event
            if blocked_by is not None:
                goals.append(blocked_by)
            else:
                self.run_next(goal.stream)

    def _pass_waits(self, stream: ModelledStream) -> None:
        """Take the waits that are over from the front of `stream`."""
        while stream.entries:
            first = stream.entries[0]
            if first.event is None or not self.is_reached(first.event):
                return
            # Asking may have led back here, through waits of other streams, and taken it already.
            if stream.entries and stream.entries[0] is first:
                stream.entries.popleft()
                stream.done_count += 1


class SeededSchedule:
    """Lets work run between the host's calls, drawn from a seed: some seeds starve a stream, some run everything at once."""

    def __init__(self, seed: int) -> None:
        """The same seed and the same calls give the same interleaving."""
        self.random = random.Random(seed)  # noqa: S311 - repeatable on purpose
        """For every choice that the seed decides."""
        self._pace = self.random.choice((0.05, 0.3, 0.6, 0.9))
        self._speeds: dict[int, float] = {}

    def pass_time(self, queues: StreamQueues) -> None:
        """Run some of what is ready, perhaps nothing."""
        while self.random.random() < self._pace:
            ready = queues.ready()
            if not ready:
                return
            speeds = [self._speed(stream) for stream in ready]
            queues.run_next(self.random.choices(ready, speeds)[0])

    def _speed(self, stream: ModelledStream) -> float:
        """How readily a stream runs beside the others."""
        if stream.timeline not in self._speeds:
            self._speeds[stream.timeline] = self.random.choice((0.02, 0.3, 1.0))
        return self._speeds[stream.timeline]
