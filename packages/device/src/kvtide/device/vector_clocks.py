"""Who happens before whom: one clock entry a timeline (the classic vector clocks of Fidge and Mattern).

A *timeline* is whatever does its work in order: the host, a stream, one transfer. Every piece of work has a tick on its
timeline and a clock that says, for each timeline, up to which tick everything lies behind it. What the host queues lies behind
everything the host has seen, so the host's clock is part of every clock.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

Clock: TypeAlias = tuple[int, ...]
"""By timeline, the newest tick that lies behind; an entry beyond the end is 0."""

HOST = 0
"""The host's timeline."""


@attrs.frozen(eq=False, slots=True)
class Work:
    """One thing that somebody did or was told to do: a kernel, a copy, a transfer, an access by the host."""

    name: str
    """For reports."""

    timeline: int
    """Where it stands in order."""

    tick: int
    """Its place there, rising."""

    clock: Clock
    """What lies behind it; the entry of its own timeline means nothing."""

    def happens_before(self, other: Work) -> bool:
        """Whether whatever the timing, this is over when `other` begins."""
        if self.timeline == other.timeline:
            return self.tick < other.tick
        return self.tick <= entry(other.clock, self.timeline)


def entry(clock: Clock, timeline: int) -> int:
    """The tick of `timeline` in `clock`."""
    return clock[timeline] if timeline < len(clock) else 0


def join(first: Clock, second: Clock) -> Clock:
    """A clock behind which lies whatever lies behind one of the two."""
    if len(first) < len(second):
        first, second = second, first
    return tuple(map(max, first, second)) + first[len(second) :]


def with_entry(clock: Clock, timeline: int, tick: int) -> Clock:
    """`clock` with one entry raised to `tick`."""
    padding = (0,) * (timeline + 1 - len(clock))
    entries = list(clock + padding)
    entries[timeline] = max(entries[timeline], tick)
    return tuple(entries)


class Timelines:
    """Every timeline of one device, and what the host has seen."""

    def __init__(self) -> None:
        """The host alone."""
        self._ticks = [0]
        self._idle: list[int] = []
        self.host_clock: Clock = (0,)
        """What the host has seen the end of, and its own newest tick."""

    def open(self) -> int:
        """A timeline for a stream or a transfer; one that was closed before if there is one."""
        if self._idle:
            return self._idle.pop()
        self._ticks.append(0)
        return len(self._ticks) - 1

    def close(self, timeline: int) -> None:
        """Give back a timeline of which the host has seen everything.

        Whoever continues it begins behind what the host has seen, so the order of its ticks stays true.
        """
        assert self._ticks[timeline] <= entry(self.host_clock, timeline), "the host has not seen its end"
        self._idle.append(timeline)

    def work(self, name: str, timeline: int, clock: Clock) -> Work:
        """The next work of a timeline."""
        self._ticks[timeline] += 1
        return Work(name, timeline, self._ticks[timeline], clock)

    def host_work(self, name: str) -> Work:
        """An access by the host, now: behind all it has seen, before all it will queue."""
        work = self.work(name, HOST, self.host_clock)
        self.host_clock = with_entry(self.host_clock, HOST, work.tick)
        return work

    def now(self, timeline: int, clock: Clock) -> Clock:
        """`clock` with everything queued on its timeline so far behind it."""
        return with_entry(clock, timeline, self._ticks[timeline])

    def host_sees(self, clock: Clock) -> None:
        """The host has waited for something behind which `clock` lies."""
        self.host_clock = join(self.host_clock, clock)
