"""A staging buffer is filled again once the GPU has read it, and never before (K4): uploads that run late, streams that stall."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.arena.pinned_staging import StagingRing

SIZES = (64, 256)


@attrs.define(eq=False)
class LateEvent:
    is_reached: bool = False

    def query(self) -> bool:
        return self.is_reached


class LateStream:
    """Does what was queued when it is told to, in order."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], object] | LateEvent] = deque()

    def record_event(self) -> LateEvent:
        event = LateEvent()
        self.work.append(event)
        return event

    def run_next(self) -> None:
        """Up to the next event: one upload."""
        while self.work:
            work = self.work.popleft()
            if isinstance(work, LateEvent):
                work.is_reached = True
                return
            work()

    @property
    def on_their_way(self) -> int:
        return sum(isinstance(work, LateEvent) for work in self.work)


@pytest.mark.requirement("K4")
@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["upload", "run", "fail"]), st.integers(0, 1), st.integers(1, 40)),
        max_size=60,
    )
)
def test_no_upload_finds_anothers_bytes_and_no_buffer_is_made_while_one_is_free(
    steps: list[tuple[str, int, int]],
) -> None:
    """An upload that read the next one's ids would write them to another table's entries; a ring that forgot free buffers would
    pin the host's memory.
    """
    ring = StagingRing(lambda size: torch.zeros(size, dtype=torch.uint8), SIZES)
    streams = [LateStream(), LateStream()]
    arrived: list[tuple[list[int], list[int]]] = []
    most = {(place, size): 0 for place in (0, 1) for size in (64, 256, 512)}
    flying: dict[tuple[int, int], int] = dict.fromkeys(most, 0)
    ends: list[deque[tuple[int, int]]] = [deque(), deque()]
    for number, (what, place, count) in enumerate(steps):
        stream = streams[place]
        if what == "run":
            if ends[place]:
                flying[ends[place].popleft()] -= 1
            stream.run_next()
            continue
        values = np.full(count, number, np.int64)
        key = (place, next(size for size in (64, 256, 512) if size >= 8 * count))
        flying[key] += 1
        most[key] = max(most[key], flying[key])
        ends[place].append(key)
        with suppress(ZeroDivisionError), ring.buffer(stream, values.nbytes) as buffer:
            assert len(buffer.pinned) >= values.nbytes
            buffer.pinned[: values.nbytes] = torch.from_numpy(values.view(np.uint8))
            stream.work.append(
                lambda buffer=buffer, values=values: arrived.append(
                    (buffer.pinned[: values.nbytes].view(torch.int64).tolist(), values.tolist())
                )
            )
            assert what != "fail" or 1 / 0
        assert ring.buffer_count == sum(most.values())
    for stream in streams:
        while stream.on_their_way:
            stream.run_next()
    assert all(found == sent for found, sent in arrived)


@pytest.mark.requirement("A7")
def test_reserved_buffers_are_used_before_any_is_made() -> None:
    """Pinning memory in service stalls the GPU."""
    ring = StagingRing(lambda size: torch.zeros(size, dtype=torch.uint8), SIZES)
    stream, other = LateStream(), LateStream()
    ring.reserve(stream, 10, 3)
    for expected in (3, 3, 3, 4):
        with ring.buffer(stream, 10):
            pass
        assert ring.buffer_count == expected
    with ring.buffer(other, 10):
        pass
    assert ring.buffer_count == 5
    # Behind four on their way.
    ring.reserve(stream, 64, 2)
    for expected in (7, 7, 8):
        with ring.buffer(stream, 10):
            pass
        assert ring.buffer_count == expected


@pytest.mark.requirement("K4")
def test_reserved_buffers_share_no_byte() -> None:
    """They are cut from one piece."""
    ring = StagingRing(lambda size: torch.zeros(size, dtype=torch.uint8), SIZES)
    stream = LateStream()
    ring.reserve(stream, 200, 3)
    starts = []
    for _ in range(3):
        with ring.buffer(stream, 200) as buffer:
            assert len(buffer.pinned) == 256
            starts.append(buffer.pinned.data_ptr())
    assert np.diff(sorted(starts)).min() >= 256
