"""Freed pages wait for the newest forward in flight, and come back by processing or by settling (L2, L3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtide.device import Event, ImmediateEvent, ImmediateStream, IntArray
from kvtide.ledger import ForwardSteps, InvariantError, LaunchRecord, PendingPages, RecordedForward

FORWARD_STREAM = ImmediateStream("forward")


def ids(*values: int) -> IntArray:
    return np.array(values, np.int64)


def recorded(forward: int) -> RecordedForward:
    return RecordedForward(forward, ImmediateEvent(FORWARD_STREAM))


@pytest.mark.requirement("L2", "L3")
def test_processing_returns_every_batch_keyed_at_or_before_the_forward() -> None:
    """Forwards end in order: what waited for an older one is over too, what waits for a newer one is not."""
    pending = PendingPages()
    third, fifth, sixth = recorded(3), recorded(5), recorded(6)
    pending.add(ids(30, 31), third)
    pending.add(ids(50), fifth)
    pending.add(ids(60, 61, 62), sixth)
    assert pending.release_through(2).tolist() == []
    assert len(pending) == 6
    assert pending.release_through(5).tolist() == [30, 31, 50]
    assert pending.pages().tolist() == [60, 61, 62]
    assert len(pending) == 3
    assert pending.release_through(6).tolist() == [60, 61, 62]
    assert len(pending) == 0


@pytest.mark.requirement("L3")
@pytest.mark.parametrize(
    ("asked", "pages", "newest"),
    [(0, [], None), (1, [30, 31], 3), (2, [30, 31], 3), (3, [30, 31, 50, 51], 5)],
)
def test_settling_takes_whole_batches_from_the_oldest_and_names_the_event_to_wait(
    asked: int, pages: list[int], newest: int | None
) -> None:
    """A wait clears a batch whole. The oldest forward is likeliest over, so its wait costs least."""
    pending = PendingPages()
    forwards = {forward: recorded(forward) for forward in (3, 5, 6)}
    for forward, newest_forward in forwards.items():
        pending.add(ids(10 * forward, 10 * forward + 1), newest_forward)
    settled, event = pending.settle(asked)
    assert settled.tolist() == pages
    assert event is (None if newest is None else forwards[newest].event)
    assert len(pending) == 6 - len(pages)
    assert pending.pages().tolist() == [30, 31, 50, 51, 60, 61][len(pages) :]


@pytest.mark.requirement("L2", "L3")
def test_batches_that_share_one_forward_settle_together() -> None:
    """One wait clears them all; a batch left behind would be waited for again, or not be found at all."""
    pending = PendingPages()
    third, fourth = recorded(3), recorded(4)
    pending.add(ids(1), third)
    pending.add(ids(2), third)
    pending.add(ids(3), fourth)
    settled, event = pending.settle(1)
    assert settled.tolist() == [1, 2]
    assert event is third.event
    assert pending.pages().tolist() == [3]


@pytest.mark.requirement("L3")
def test_settling_leaves_the_forward_unprocessed_and_pages_freed_later_still_pend() -> None:
    """A stream's wait says nothing about later frees: the same forward may still read those pages."""
    pending = PendingPages()
    third = recorded(3)
    pending.add(ids(1), third)
    pending.settle(1)
    pending.add(ids(2), third)
    assert len(pending) == 1
    assert pending.release_through(3).tolist() == [2]


@pytest.mark.requirement("L3")
def test_asking_for_more_than_pends_settles_everything() -> None:
    """The band asks for what it lacks; the rest comes from elsewhere."""
    pending = PendingPages()
    third = recorded(3)
    pending.add(ids(1, 2), third)
    assert pending.settle(10)[0].tolist() == [1, 2]
    settled, event = pending.settle(10)
    assert settled.dtype == np.int64
    assert settled.tolist() == []
    assert event is None


@pytest.mark.requirement("L3")
def test_a_free_of_no_page_is_no_batch() -> None:
    """A step in which no window moves on frees nothing; settling must not wait a forward for that."""
    pending = PendingPages()
    pending.add(ids(), recorded(3))
    assert pending.settle(1)[1] is None


@pytest.mark.requirement("L2", "L8")
def test_pages_are_freed_under_no_forward_before_one_that_others_wait_for() -> None:
    """Batches come back from the front: one that is out of order would return late, or with a later forward's event."""
    pending = PendingPages()
    pending.add(ids(1), recorded(3))
    pending.add(ids(2), recorded(4))
    with pytest.raises(InvariantError) as caught:
        pending.add(ids(5, 6), recorded(3))
    assert caught.value.invariant == "forward.pending_in_launch_order"
    assert "2 pages are freed under forward 3, others pend behind 4" in str(caught.value)
    assert pending.pages().tolist() == [1, 2]
    pending.add(ids(), recorded(3))


@pytest.mark.requirement("C13")
def test_a_clone_of_pending_pages_and_steps_goes_its_own_way() -> None:
    """A what-if question settles and processes without a trace; events are the same objects, so waits mean the same."""
    steps, pending = ForwardSteps(), PendingPages()
    forwards = [
        steps.forward_recorded(steps.forward_launched(), ImmediateEvent(FORWARD_STREAM)) for _ in range(2)
    ]
    for place, forward in enumerate(forwards):
        pending.add(ids(place), forward)
    steps.completion_recorded(LaunchRecord(1), completion := ImmediateEvent(FORWARD_STREAM))
    other_steps, other = steps.clone(), pending.clone()
    other_steps.host_synchronised(completion)
    assert other.settle(1)[1] is forwards[0].event
    for forward in forwards:
        other_steps.forward_processed(LaunchRecord(forward.forward))
    assert other.release_through(1).tolist() == [1]
    assert (len(pending), steps.in_flight_count, steps.retired_through) == (2, 2, -1)
    with pytest.raises(InvariantError):
        steps.forward_processed(LaunchRecord(0))
    steps.wait_queued(forwards[1].event)
    assert pending.release_through(1).tolist() == [0, 1]


class PendingAgainstAList(RuleBasedStateMachine):
    """Steps and pending pages beside one list of `(forward, event, page)` a page, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = ForwardSteps()
        self.pending = PendingPages()
        self.open: LaunchRecord | None = None
        self.flying: list[tuple[LaunchRecord, Event]] = []
        self.model: list[tuple[int, Event, int]] = []
        self.frees: list[list[int]] = []
        self.next_page = 0

    @rule()
    def launch(self) -> None:
        if self.open is not None:
            with pytest.raises(InvariantError):
                self.steps.forward_launched()
            return
        self.open = self.steps.forward_launched()

    @precondition(lambda self: self.open is not None)
    @rule(aborted=st.booleans())
    def end_launch(self, aborted: bool) -> None:
        assert self.open is not None
        if aborted:
            self.steps.forward_aborted(self.open)
        else:
            event = ImmediateEvent(FORWARD_STREAM)
            self.steps.forward_recorded(self.open, event)
            self.flying.append((self.open, event))
        self.open = None

    @rule(count=st.integers(0, 3))
    def free(self, count: int) -> None:
        if self.open is not None:
            with pytest.raises(InvariantError):
                self.steps.check_pages_may_change("a free")
            return
        self.steps.check_pages_may_change("a free")
        newest = self.steps.newest_recorded
        assert (newest is None) == (not self.flying)
        if newest is None:
            return
        pages = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        self.pending.add(ids(*pages), newest)
        record, event = self.flying[-1]
        self.model.extend((record.forward, event, page) for page in pages)
        if pages:
            self.frees.append(pages)

    @precondition(lambda self: self.flying)
    @rule(place=st.integers(0, 2))
    def process(self, place: int) -> None:
        record, event = self.flying[min(place, len(self.flying) - 1)]
        self.steps.host_synchronised(event)
        if record is not self.flying[0][0]:
            with pytest.raises(InvariantError):
                self.steps.forward_processed(record)
            return
        self.flying.pop(0)
        self.steps.forward_processed(record)
        released = self.pending.release_through(record.forward).tolist()
        assert released == [page for forward, _, page in self.model if forward <= record.forward]
        self.model = [entry for entry in self.model if entry[0] > record.forward]

    @rule(count=st.integers(0, 5))
    def settle(self, count: int) -> None:
        settled, event = self.pending.settle(count)
        end = 0
        # A page more while too few, while its free is cut in two, and while its forward's wait would clear the next.
        while end < len(self.model) and (
            end < count or (end and self.model[end][0] == self.model[end - 1][0])
        ):
            end += 1
        taken, self.model = self.model[:end], self.model[end:]
        assert settled.tolist() == [page for _, _, page in taken]
        assert event is (taken[-1][1] if taken else None)
        for pages in self.frees:
            assert len(set(pages) & set(settled.tolist())) in (0, len(pages)), "a batch was cut in two"

    @invariant()
    def counts_and_order_agree(self) -> None:
        assert len(self.pending) == len(self.model)
        assert self.pending.pages().tolist() == [page for _, _, page in self.model]
        assert self.steps.in_flight_count == len(self.flying) + (self.open is not None)
        self.steps.check_idle(len(self.pending))


@pytest.mark.requirement("L1", "L2", "L3")
def test_any_run_of_frees_settlings_and_processings_returns_what_a_list_would() -> None:
    """Which pages come back, when, in what order and behind which event; and that no batch is cut in two."""
    run_state_machine_as_test(
        PendingAgainstAList, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
