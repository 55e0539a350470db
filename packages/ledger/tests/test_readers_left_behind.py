"""A page that its band grows over again: its place in the books is new, its reader is not (L4, L5, A5, T4)."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.device import ImmediateEvent, ImmediateStream, IntArray, UnitGrid
from kvtide.ledger import (
    CLEARANCE,
    Access,
    Clear,
    Consumer,
    FencedBytes,
    ForwardSteps,
    Hazard,
    LaunchRecord,
    NetworkTransfer,
    PageUsage,
    choose_holes,
    clearance,
)

STREAM = ImmediateStream("any")
QUEUE_NOTHING = [
    consumer for consumer in Consumer if CLEARANCE[consumer][Hazard.FORWARD] is not Clear.STREAM_WAIT
]


def ids(*pages: int) -> IntArray:
    return np.array(pages, np.int64)


def forward(steps: ForwardSteps, usage: PageUsage) -> int:
    recorded = steps.forward_recorded(steps.forward_launched(), ImmediateEvent(STREAM))
    usage.record_forward_writes(recorded, ids())
    return recorded.forward


def grown_over() -> tuple[ForwardSteps, PageUsage]:
    """Page 3 was vacated under forward 0, given back, and grown over by somebody who queued no wait."""
    steps = ForwardSteps()
    usage = PageUsage(steps, 8, grid=UnitGrid(0, 32), fences=FencedBytes(steps))
    forward(steps, usage)
    usage.vacate(ids(3))
    usage.fence(ids(3))
    return steps, usage


@pytest.mark.requirement("L4", "L5", "A5")
@pytest.mark.parametrize("taker", QUEUE_NOTHING)
@pytest.mark.parametrize("next_writer", Consumer)
def test_who_grows_over_a_page_without_a_wait_leaves_its_reader_to_the_next_writer(
    taker: Consumer, next_writer: Consumer
) -> None:
    """The launch is aborted, the load submitted later, the zero debt paid: forward 0 reads on through all of it."""
    steps = ForwardSteps()
    usage = PageUsage(steps, 8)
    forward(steps, usage)
    usage.vacate(ids(3))
    assert clearance(taker, usage, ids(3)).stream_waits == ()
    before = clearance(next_writer, usage, ids(2, 3))
    usage.fence(ids(3))
    after = clearance(next_writer, usage, ids(2, 3))
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [True] * 5
    assert (3 in after.free_to_go) == (CLEARANCE[next_writer][Hazard.FORWARD] is Clear.NONE)
    assert choose_holes(Consumer.ZERO, usage, ids(3, 2), 2).pages.tolist() == [2, 3]
    assert usage.vacated_pages().tolist() == []
    assert usage.open_uses() == ()
    steps.wait_queued(steps.recorded(0).event)
    assert clearance(next_writer, usage, ids(2, 3)).free_to_go.tolist() == [2, 3]
    assert usage.is_clear


@pytest.mark.requirement("T4")
def test_a_receive_that_asks_again_before_it_publishes_is_told_of_the_same_forward() -> None:
    """A changed move epoch takes a new gate: it must stand behind the retirement as the first would have."""
    steps, usage = grown_over()
    assert clearance(Consumer.NETWORK_RECEIVE, usage, ids(3)).publish_after == 0
    steps.wait_queued(steps.recorded(0).event)
    assert clearance(Consumer.NETWORK_RECEIVE, usage, ids(3)).publish_after == -1


@pytest.mark.requirement("L4")
def test_the_reader_of_a_page_grown_over_binds_a_neighbour_when_the_page_leaves_its_band_again() -> None:
    """Freed again and given back, its bytes are a neighbour's, and forward 0 has still not retired."""
    steps, usage = grown_over()
    neighbour = PageUsage(steps, 4, grid=UnitGrid(16, 64), fences=usage.fences)
    usage.fence(ids(3))
    for band, page in ((usage, 3), (neighbour, 1)):
        assert clearance(Consumer.ZERO, band, ids(page)).stream_waits == (steps.recorded(0).event,)
    steps.wait_queued(steps.recorded(0).event)
    assert usage.is_clear
    assert neighbour.is_clear


@pytest.mark.requirement("L4")
def test_a_page_grown_over_and_vacated_again_waits_for_its_newest_reader() -> None:
    """Both read it: the older forward before the first move, the newer before the second."""
    steps, usage = grown_over()
    forward(steps, usage)
    usage.vacate(ids(3))
    steps.wait_queued(steps.recorded(0).event)
    assert usage.take_ready_vacated().tolist() == []
    assert clearance(Consumer.ZERO, usage, ids(3)).stream_waits == (steps.recorded(1).event,)


@pytest.mark.requirement("L4")
def test_pages_that_leave_the_span_leave_the_batches_that_hold_the_others_in_order() -> None:
    """Batches forget those who left only now and then; what comes back, and when, is as if they did at once."""
    steps = ForwardSteps()
    usage = PageUsage(steps, 4096)
    sends = [NetworkTransfer(f"send {n}", Access.READ) for n in range(2)]
    usage.record(sends[0], np.arange(2000, 2500))
    for page in range(2000, 2500):
        usage.vacate(ids(page))
    forward(steps, usage)
    for page in range(1000):
        usage.vacate(ids(page))
    usage.fence(ids(*range(0, 1000, 2), *range(2000, 2500, 2)))
    usage.fence(ids(*range(1, 900, 2)))
    assert usage._vacated._listed_count <= 2 * len(usage._vacated) + 64, (
        "entries of pages that left are bounded"
    )
    kept = [*range(901, 1000, 2), *range(2001, 2500, 2)]
    assert usage.vacated_pages().tolist() == kept
    steps.host_synchronised(steps.recorded(0).event)
    steps.forward_processed(LaunchRecord(0))
    assert usage.take_ready_vacated().tolist() == kept[:50]
    usage.end(sends[0])
    assert usage.take_ready_vacated().tolist() == kept[50:]
    usage.check_idle()
