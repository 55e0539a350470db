"""The stand-in for a GPU's late streams keeps the promises of the real ones that a check of order rests on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtide.arena import KVArena
from kvtide.device import UnitGrid

from .late_streams import CLOCK_HZ, WORK_SECONDS, TimedDevice

GRID = UnitGrid(0, 16)
LATE_SECONDS = 8e6 / CLOCK_HZ


@pytest.fixture
def device() -> TimedDevice:
    """Sixteen units of ones."""
    made = TimedDevice(KVArena.allocate(256))
    made.arena.bytes.fill_(1)
    return made


def written(device: TimedDevice) -> list[int]:
    """Units that are not ones any more."""
    return torch.nonzero((device.arena.bytes.view(16, 16) != 1).any(1)).ravel().tolist()


def let_the_host_call(device: TimedDevice) -> None:
    """Its calls about other streams take time."""
    for _ in range(50):
        device.queue(device.forward_stream, 0, lambda: None)


def ask(device: TimedDevice) -> None:
    """Ask for the event behind what was queued until the answer is yes."""
    event = device.record_event(device.schedule_stream)
    assert not device.query_event(event)
    let_the_host_call(device)
    assert device.query_event(event)


def wait(device: TimedDevice) -> None:
    """Wait for the event behind what was queued."""
    device.wait_on_host(device.record_event(device.schedule_stream))


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("come_to_know", [ask, wait])
def test_what_the_host_knows_to_be_over_has_taken_effect(
    come_to_know: Callable[[TimedDevice], None], device: TimedDevice
) -> None:
    """Whoever saw the end of a copy may read what it filled, with no wait after the answer."""
    device.queue(device.schedule_stream, LATE_SECONDS, lambda: None)
    device.zero_units(device.schedule_stream, GRID, np.array([3]))
    assert written(device) == []
    come_to_know(device)
    assert written(device) == [3]


@pytest.mark.requirement("X1")
def test_a_call_takes_ids_as_they_are_when_it_is_made(device: TimedDevice) -> None:
    """A device that ships copies them to staging at once: whoever called may reuse the array."""
    ids, sources, targets = np.array([3]), np.array([3]), np.array([5])
    device.zero_units(device.schedule_stream, GRID, ids)
    device.copy_units(device.schedule_stream, GRID, sources, targets)
    ids[:], sources[:], targets[:] = 7, 8, 9
    wait(device)
    assert written(device) == [3, 5]


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_is_behind_what_it_waits_for_and_nothing_else(waits: bool, device: TimedDevice) -> None:
    """Late streams that were in order anyhow would hide every missing wait."""
    device.queue(device.schedule_stream, LATE_SECONDS, lambda: None)
    device.zero_units(device.schedule_stream, GRID, np.array([3]))
    if waits:
        device.wait_event(device.forward_stream, device.record_event(device.schedule_stream))
    found: list[list[int]] = []
    device.queue(device.forward_stream, WORK_SECONDS, lambda: found.append(written(device)))
    device.wait_on_host(device.record_event(device.forward_stream))
    assert found == [[3] if waits else []]


@pytest.mark.requirement("X1")
def test_time_that_passes_in_the_middle_of_an_effect_is_refused(device: TimedDevice) -> None:
    """Effects that came in between would be out of order."""
    device.queue(device.schedule_stream, WORK_SECONDS, lambda: wait(device))
    with pytest.raises(AssertionError, match="lets no time pass"):
        wait(device)
