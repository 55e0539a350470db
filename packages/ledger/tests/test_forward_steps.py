"""Forwards go from launched to recorded to processed, and whoever leaves that path is stopped, always (L1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtide.device import Event, ImmediateEvent, ImmediateStream
from kvtide.ledger import ForwardSteps, InvariantError, LaunchRecord, RecordedForward

FORWARD_STREAM = ImmediateStream("forward")


def fresh_event() -> Event:
    return ImmediateEvent(FORWARD_STREAM)


def in_flight(count: int) -> tuple[ForwardSteps, list[LaunchRecord]]:
    """Steps with `count` recorded forwards."""
    steps = ForwardSteps()
    records = []
    for _ in range(count):
        records.append(steps.forward_launched())
        steps.forward_recorded(records[-1], fresh_event())
    return steps, records


def synchronise(steps: ForwardSteps) -> None:
    """The host waits for the newest forward in flight, which covers those before it."""
    assert steps.newest_recorded is not None
    steps.host_synchronised(steps.newest_recorded.event)


def in_flight_of(steps: ForwardSteps) -> tuple[RecordedForward | None, int]:
    return steps.newest_recorded, steps.in_flight_count


def broken(action: Callable[[], object]) -> tuple[str, str]:
    """The id of the invariant that `action` breaks, and the error's text."""
    with pytest.raises(InvariantError) as caught:
        action()
    assert str(caught.value).startswith(f"[{caught.value.invariant}] ")
    assert "(likely cause: " in str(caught.value)
    return caught.value.invariant, str(caught.value)


@pytest.mark.requirement("L1")
def test_forwards_pass_from_launch_to_processing_in_launch_order() -> None:
    """The ordinary path with one forward of overlap: N + 1 is launched before N is processed."""
    steps = ForwardSteps()
    assert in_flight_of(steps) == (None, 0)
    first = steps.forward_launched()
    assert in_flight_of(steps) == (None, 1)
    first_event = fresh_event()
    steps.forward_recorded(first, first_event)
    assert steps.newest_recorded is not None
    assert steps.newest_recorded.forward == first.forward
    assert steps.newest_recorded.event is first_event

    second = steps.forward_launched()
    assert second.forward > first.forward
    assert steps.newest_recorded.forward == first.forward
    second_event = fresh_event()
    steps.forward_recorded(second, second_event)
    assert steps.newest_recorded.event is second_event
    assert steps.in_flight_count == 2
    steps.host_synchronised(first_event)
    steps.forward_processed(first)
    assert steps.newest_recorded.event is second_event
    steps.host_synchronised(second_event)
    steps.forward_processed(second)
    assert in_flight_of(steps) == (None, 0)


@pytest.mark.requirement("L1")
def test_no_page_changes_between_a_launch_and_its_recording() -> None:
    """The forward reads the page tables by then, and no event lies behind it that a freed page could wait for."""
    steps, _ = in_flight(1)
    steps.check_pages_may_change("a free")
    record = steps.forward_launched()
    invariant, text = broken(lambda: steps.check_pages_may_change("a free"))
    assert invariant == "forward.record_before_pages"
    assert f"a free between the launch of forward {record.forward} and its recording" in text
    steps.forward_recorded(record, fresh_event())
    steps.check_pages_may_change("a free")


@pytest.mark.requirement("L1")
def test_an_aborted_launch_leaves_nothing_behind() -> None:
    """It queued no work: pages may change again, nothing waits for it, and its ordinal is not used twice."""
    steps, (first,) = in_flight(1)
    aborted = steps.forward_launched()
    steps.forward_aborted(aborted)
    steps.check_pages_may_change("a take")
    assert steps.in_flight_count == 1
    assert steps.newest_recorded is not None
    assert steps.newest_recorded.forward == first.forward
    assert steps.forward_launched().forward > aborted.forward


@pytest.mark.requirement("L1")
def test_a_launch_waits_for_the_recording_of_the_one_before() -> None:
    """A step that ended without its hook would leave a forward that no page can wait for."""
    steps = ForwardSteps()
    record = steps.forward_launched()
    assert broken(steps.forward_launched)[0] == "forward.record_before_launch"
    steps.forward_recorded(record, fresh_event())
    steps.forward_launched()


@pytest.mark.requirement("L1")
@pytest.mark.parametrize("end", ["recorded", "aborted"])
@pytest.mark.parametrize("slip", ["nothing open", "twice", "the one before", "after its abortion"])
def test_only_the_open_launch_is_recorded_or_aborted(end: str, slip: str) -> None:
    """A record of the wrong launch would key freed pages by a forward that does not cover them."""
    steps, (record,) = in_flight(1)
    match slip:
        case "nothing open":
            record = LaunchRecord(7)
        case "the one before":
            steps.forward_launched()
        case "after its abortion":
            record = steps.forward_launched()
            steps.forward_aborted(record)
    before = in_flight_of(steps)
    if end == "recorded":
        invariant, text = broken(lambda: steps.forward_recorded(record, fresh_event()))
    else:
        invariant, text = broken(lambda: steps.forward_aborted(record))
    assert invariant == "forward.record_is_open"
    assert f"forward {record.forward} is {end}" in text
    assert in_flight_of(steps) == before


@pytest.mark.requirement("L1")
def test_each_forward_records_a_fresh_event() -> None:
    """An event that is recorded again no longer covers the forward that recorded it first. The launch stays open."""
    steps, (first,) = in_flight(1)
    assert steps.newest_recorded is not None
    used = steps.newest_recorded.event
    record = steps.forward_launched()
    assert broken(lambda: steps.forward_recorded(record, used))[0] == "forward.fresh_event"
    assert broken(lambda: steps.check_pages_may_change("a take"))[0] == "forward.record_before_pages"
    steps.forward_recorded(record, fresh_event())
    synchronise(steps)
    steps.forward_processed(first)
    steps.forward_processed(record)


@pytest.mark.requirement("L1")
@pytest.mark.parametrize(
    "slip", ["out of order", "twice", "before it is recorded", "aborted", "never launched"]
)
def test_recorded_forwards_are_processed_once_and_in_launch_order(slip: str) -> None:
    """Processing returns pages of every forward before it: out of order it would return pages still written."""
    steps, (oldest, newer) = in_flight(2)
    synchronise(steps)
    match slip:
        case "out of order":
            record = newer
        case "twice":
            steps.forward_processed(oldest)
            record = oldest
        case "before it is recorded":
            steps.forward_processed(oldest)
            steps.forward_processed(newer)
            record = steps.forward_launched()
        case "aborted":
            record = steps.forward_launched()
            steps.forward_aborted(record)
        case _:
            record = LaunchRecord(9)
    before = in_flight_of(steps)
    invariant, text = broken(lambda: steps.forward_processed(record))
    assert invariant == "forward.processed_in_launch_order"
    assert f"forward {record.forward} is processed, the oldest in flight is " in text
    assert in_flight_of(steps) == before


@pytest.mark.requirement("L1")
def test_with_nothing_in_flight_nothing_is_pending() -> None:
    """A page that pends behind no forward would never come back."""
    steps, (record,) = in_flight(1)
    steps.check_idle(3)
    synchronise(steps)
    steps.forward_processed(record)
    steps.check_idle(0)
    invariant, text = broken(lambda: steps.check_idle(3))
    assert invariant == "forward.idle_has_no_pending"
    assert "3 pages pend" in text
    steps.forward_launched()
    assert broken(lambda: steps.check_idle(3))[0] == "forward.idle_has_no_pending"


@pytest.mark.requirement("L1")
@pytest.mark.parametrize("seen", ["nothing", "an older forward", "another event"])
def test_a_forward_is_processed_only_after_a_host_wait_that_covers_it(seen: str) -> None:
    """Its pages return on that promise alone: no stream waits for it after this. Nothing changes before."""
    steps, (oldest, newer) = in_flight(2)
    if seen == "another event":
        steps.host_synchronised(fresh_event())
        oldest_or_newer = oldest
    elif seen == "an older forward":
        steps.host_synchronised(steps.recorded(oldest.forward).event)
        steps.forward_processed(oldest)
        oldest_or_newer = newer
    else:
        oldest_or_newer = oldest
    before = (in_flight_of(steps), steps.retired_through)
    invariant, text = broken(lambda: steps.forward_processed(oldest_or_newer))
    assert invariant == "forward.processed_after_completion"
    assert f"forward {oldest_or_newer.forward} is processed, the host has waited for forwards up to " in text
    assert (in_flight_of(steps), steps.retired_through) == before
    synchronise(steps)
    steps.forward_processed(oldest_or_newer)


@pytest.mark.requirement("L1")
def test_a_host_wait_for_a_completion_behind_the_event_covers_the_forward_and_those_before() -> None:
    """A scheduler waits for the result's copy, not for the forward; the copy lies behind it."""
    steps, (first, second, third) = in_flight(3)
    result_copied = fresh_event()
    steps.completion_recorded(second, result_copied)
    assert broken(lambda: steps.forward_processed(first))[0] == "forward.processed_after_completion"
    steps.host_synchronised(result_copied)
    steps.forward_processed(first)
    steps.forward_processed(second)
    assert steps._completions == [], "a completion is noted for every forward, and kept for none that is over"
    assert broken(lambda: steps.forward_processed(third))[0] == "forward.processed_after_completion"
    invariant, text = broken(lambda: steps.completion_recorded(second, fresh_event()))
    assert invariant == "forward.use_names_one_in_flight"
    assert f"a use names forward {second.forward}, in flight are [{third.forward}]" in text


@pytest.mark.requirement("L1")
@pytest.mark.parametrize(
    "used", ["an older forward's", "its own", "an older completion", "its own completion"]
)
@pytest.mark.parametrize("role", ["a completion", "a forward's event"])
def test_an_event_that_was_noted_is_noted_for_nothing_else(used: str, role: str) -> None:
    """The host's wait for its first recording would be taken for one that covers what it was recorded for again."""
    steps, (first, second) = in_flight(2)
    completions = fresh_event(), fresh_event()
    steps.completion_recorded(first, completions[0])
    steps.completion_recorded(second, completions[1])
    event = {
        "an older forward's": steps.recorded(first.forward).event,
        "its own": steps.recorded(second.forward).event,
        "an older completion": completions[0],
        "its own completion": completions[1],
    }[used]
    if role == "a completion":
        invariant, text = broken(lambda: steps.completion_recorded(second, event))
    else:
        third = steps.forward_launched()
        invariant, text = broken(lambda: steps.forward_recorded(third, event))
    assert invariant == "forward.fresh_event"
    assert f"an event that forward {first.forward if 'older' in used else second.forward}, in flight" in text


@pytest.mark.requirement("L1")
def test_an_event_of_a_forward_that_is_over_may_be_recorded_again() -> None:
    """Engines pool their events. A completion that was kept past its forward would stand in the way, and in memory."""
    steps = ForwardSteps()
    event, completion = fresh_event(), fresh_event()
    for _ in range(5):
        record = steps.forward_launched()
        steps.forward_recorded(record, event)
        steps.completion_recorded(record, completion)
        assert broken(lambda: steps.forward_processed(record))[0] == "forward.processed_after_completion"  # noqa: B023
        steps.host_synchronised(completion)
        steps.forward_processed(record)


@pytest.mark.requirement("L6")
def test_a_forward_retires_when_processed_or_when_the_schedule_stream_waits_for_it_with_all_before_it() -> (
    None
):
    """Forwards run in order on one stream, so the newest that is waited for covers the rest. It stays unprocessed."""
    steps, (first, second, third) = in_flight(3)
    assert steps.retired_through == -1
    assert steps.newest_unretired == steps.newest_recorded
    steps.wait_queued(steps.recorded(second.forward).event)
    assert steps.retired_through == second.forward
    assert steps.in_flight_count == 3
    assert steps.newest_unretired == steps.newest_recorded
    synchronise(steps)
    steps.forward_processed(first)
    assert steps.retired_through == second.forward, "what has retired stays so"
    steps.wait_queued(fresh_event())
    assert steps.retired_through == second.forward, "an event of no forward retires none"
    steps.wait_queued(steps.recorded(third.forward).event)
    assert steps.newest_unretired is None
    assert steps.newest_recorded is not None, "pages freed from now on still wait for its processing"
    assert broken(lambda: steps.recorded(first.forward))[0] == "forward.use_names_one_in_flight"


@pytest.mark.requirement("L7")
def test_a_step_without_a_forward_is_never_waited_for() -> None:
    """It has no event: a page freed meanwhile waits for the last forward that has one, or for nothing at all."""
    steps, (forward,) = in_flight(1)
    prebuilt = steps.forward_launched()
    steps.forward_aborted(prebuilt)
    assert steps.newest_recorded is not None
    assert steps.newest_recorded.forward == forward.forward
    synchronise(steps)
    steps.forward_processed(forward)
    assert steps.newest_recorded is None
