"""What the walk of `gpu_check.py` would see on a GPU, on one that exists in time alone: no fault where there is none, and each
that there is.
"""

from __future__ import annotations

from itertools import count

import pytest

from gpu_graph import REQUESTS, decode_under_moves
from gpu_host import host_does_not_wait
from gpu_late import Fault
from gpu_place import Place
from gpu_walk import walk, walk_with_fault
from kvtide.device import Stream

from .late_streams import TimedDevice, TimedPlace


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_with_every_wait_reads_what_was_written(seed: int) -> None:
    """With late streams on both sides; a walk that cried wolf would be switched off."""
    assert "units moved" in walk(TimedPlace(), 100, seed)


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE])
def test_a_walk_notices_each_wait_that_is_left_out(fault: Fault) -> None:
    """A check of streams that cannot fail proves nothing of them."""
    assert "caught by seed" in walk_with_fault(TimedPlace(), 100, fault)


def test_a_walk_whose_streams_are_never_late_notices_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the delays that show a missing wait: so they are long, and this is what shorter ones would hide."""
    monkeypatch.setattr("gpu_walk.LATE_CYCLES", 0)
    monkeypatch.setattr("gpu_late.LATE_CYCLES", 0)
    with pytest.raises(AssertionError, match="not caught"):
        walk_with_fault(TimedPlace(), 60, Fault.BARRIER)


def test_a_host_that_waits_in_a_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would show it but time: every byte is right."""
    assert "5 calls returned while the stream slept" in host_does_not_wait(TimedPlace())

    def waits(device: TimedDevice, stream: Stream) -> int:
        count = upload(device, stream)
        device.wait_on_host(device.record_event(stream))
        return count

    upload = TimedDevice.upload
    monkeypatch.setattr(TimedDevice, "upload", waits)
    with pytest.raises(AssertionError, match="the host waited in an upload"):
        host_does_not_wait(TimedPlace())


def test_first_calls_that_make_something_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled or allocated in service stalls it once, where nobody looks."""
    counts = count()
    monkeypatch.setattr(TimedPlace, "footprint", lambda place, device: {"staging buffers": next(counts)})
    with pytest.raises(AssertionError, match=r"the first calls made something: .* 0} before, .* 1} after"):
        host_does_not_wait(TimedPlace())


@pytest.mark.requirement("K13", "A8")
def test_the_graphs_step_would_notice_padding_that_is_somebodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows name the sink and −1 (K13): with another id in their place, outputs differ."""
    monkeypatch.setattr("gpu_graph.PADDING", (-1, 0, 0, REQUESTS))
    with pytest.raises(AssertionError, match="outputs differ from those without pages"):
        decode_under_moves(Place(is_gpu=False), 30, 1)
