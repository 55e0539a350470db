"""Who touched which bytes, exactly and quickly.

The bytes of a buffer are cut into segments whose bytes have one history, and the cuts lie only where accesses began or ended:

    bytes     0          48          80                128
              [ zeroing  | move, read |  read, read     |  …
    history   by timeline and kind, in order, as an object that segments may share

An access is compared with each timeline's newest first and goes on only while it is unordered, so the common case costs one
comparison a timeline. An access is forgotten once nothing that can still come is unordered with it. Segments
with one history share it as one object, and an access looks at each object once, so its cost follows the histories it meets,
hardly the segments.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TypeAlias

import attrs

from kvtide.device.protocols import UnitGrid
from kvtide.device.vector_clocks import Clock, Work


@attrs.frozen(eq=False, slots=True)
class Access:
    """One work's reads, or its writes, through one grid."""

    work: Work
    """Who."""

    is_write: bool
    """Whether it changes the bytes."""

    grid: UnitGrid | None = None
    """How it names them; `None` by bytes."""

    is_late: bool = False
    """Noted when the work ran instead of when it was queued; what comes after it may have been noted already."""


@attrs.frozen
class Collision:
    """Bytes that a new access shares with an earlier noted one, unordered, one of them writing."""

    other: Access
    """The access noted before."""

    start_byte: int
    """Inclusive."""

    end_byte: int
    """Exclusive."""


_Segment: TypeAlias = dict[int, tuple[Access, ...]]
"""Accesses, oldest first, by key: timeline × 4 + 2 if late + 1 if a write. Never changed once made, so segments share it."""


class ByteHistory:
    """The accesses to one buffer that something may still be unordered with."""

    def __init__(self, byte_count: int) -> None:
        """No access yet to `byte_count` bytes."""
        self._byte_count = byte_count
        self._starts = [0]
        self._segments: list[_Segment] = [{}]

    def note(self, step: AccessStep, start_byte: int, end_byte: int) -> list[Collision]:
        """Add an access to `[start_byte, end_byte)` and return what it collides with, in byte order."""
        if start_byte >= end_byte:
            return []
        starts, segments = self._starts, self._segments
        first = bisect_right(starts, start_byte) - 1
        end = bisect_left(starts, end_byte)
        last_end = starts[end] if end < len(starts) else self._byte_count
        new_starts: list[int] = []
        new_segments: list[_Segment] = []
        collisions: list[Collision] = []
        if starts[first] < start_byte:
            new_starts.append(starts[first])
            new_segments.append(segments[first])
        newest: _Segment | None = None
        for index in range(first, end):
            after, others = step.after(segments[index])
            if others:
                segment_start = max(starts[index], start_byte)
                segment_end = min(starts[index + 1] if index + 1 < end else last_end, end_byte)
                collisions += [Collision(other, segment_start, segment_end) for other in others]
            # Neighbours of one history are one segment again.
            if after is not newest:
                newest = after
                new_starts.append(starts[index] if index > first else start_byte)
                new_segments.append(after)
        if end_byte < last_end:
            new_starts.append(end_byte)
            new_segments.append(segments[end - 1])
        starts[first:end] = new_starts
        segments[first:end] = new_segments
        return collisions


class AccessStep:
    """What one access does to histories; the same to all of its bytes, whichever buffer they lie in."""

    def __init__(self, access: Access, floor: Clock) -> None:
        """`floor` is a clock that lies behind every access still to come, late ones too: whatever it covers is forgotten."""
        self.access = access
        self._floor = floor
        self._key = access.work.timeline * 4 + access.is_late * 2 + access.is_write
        self._known: dict[int, tuple[_Segment, _Segment, list[Access]]] = {}
        """By id of a history: itself, so that the id stays its own, what follows it, and what collides."""
        self._made: dict[frozenset[tuple[int, tuple[Access, ...]]], tuple[_Segment, list[Access]]] = {}
        """By what a history still holds, so that histories that have come to hold the same are one again."""

    def after(self, segment: _Segment) -> tuple[_Segment, list[Access]]:
        """The history that follows `segment`, and the accesses in it that this one is unordered with."""
        known = self._known.get(id(segment))
        if known is None:
            alive = _alive(segment, self._floor)
            held = frozenset(alive.items())
            made = self._made.get(held)
            if made is None:
                others = _unordered(alive, self.access)
                alive[self._key] = (*alive.get(self._key, ()), self.access)
                made = self._made[held] = alive, others
            known = self._known[id(segment)] = segment, *made
        return known[1], known[2]


def _alive(segment: _Segment, floor: Clock) -> _Segment:
    """A copy of `segment` without what is forgotten."""
    alive: _Segment = {}
    known = len(floor)
    for key, accesses in segment.items():
        seen = floor[key >> 2] if key >> 2 < known else 0
        if accesses[0].work.tick > seen:
            alive[key] = accesses
        elif accesses[-1].work.tick > seen:
            alive[key] = tuple(access for access in accesses if access.work.tick > seen)
    return alive


def _unordered(segment: _Segment, access: Access) -> list[Access]:
    """What `access` is unordered with, of which one writes."""
    found: list[Access] = []
    work, clock = access.work, access.work.clock
    known = len(clock)
    for key, accesses in segment.items():
        timeline = key >> 2
        if timeline == work.timeline or not (access.is_write or key & 1):
            continue
        seen = clock[timeline] if timeline < known else 0
        for other in reversed(accesses):
            if other.work.tick <= seen:
                break
            if not (access.is_late and work.happens_before(other.work)):
                found.append(other)
    return found
