"""The life of a forward, as the allocator sees it: launched → recorded → processed (row L1), and when it retires (row L6).

A scheduler that overlaps launches forward N + 1 before it has looked at the result of N. In between, N may still read and
write pages that its requests have given back. `ForwardSteps` knows which forwards those are:

- *launched*: the scheduler has begun to launch it. Until it is recorded there is no event that a page freed now could wait
  for, so no page may be freed, taken or moved.
- *recorded*: an event lies behind it on its stream. A page freed now waits for the newest recorded forward.
- *processed*: the host has waited for a completion that covers the event. It and every forward before it are over.

A recorded forward *retires* when it is processed, or when the schedule stream has been told to wait for its event: from then
on whatever the schedule stream writes comes behind it. Forwards run in launch order on one stream, so whatever retires a
forward retires those before it.

Progress is logical (D5): nothing here asks whether an event has fired. A step without a forward calls nothing here, and is
never what a page waits for; an engine that processes every forward before its next allocation need record none (row L7).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvtide.device import Event
from kvtide.ledger.cloning import clone_of
from kvtide.ledger.errors import InvariantError


class LaunchRecord(NamedTuple):
    """One launched forward; its step carries it from launch to processing. Nobody waits for it: it has no event yet."""

    forward: int
    """Ordinal of the launch, rising."""


class RecordedForward(NamedTuple):
    """A forward in flight that pages can wait for: a stream waits for `event`; the host only to process it."""

    forward: int
    """Ordinal of the launch."""

    event: Event
    """Behind the forward on its stream; fresh for each."""


class ForwardSteps:
    """Forwards in flight, in launch order. The storage calls the transitions, bands read.

    Nothing in it waits, neither the host nor a stream: callers tell it which waits they have made.
    """

    def __init__(self) -> None:
        self.retired_through = -1
        """Newest forward that has retired, every earlier one with it; −1 for none. Only the methods below write it."""
        self._launched_count = 0
        self._open: LaunchRecord | None = None
        self._recorded: deque[RecordedForward] = deque()
        self._completions: list[tuple[Event, int]] = []
        self._synchronised_through = -1

    def clone(self) -> ForwardSteps:
        """The same forwards in flight, which go their own way; events are shared (row C13). Nobody waits."""
        return clone_of(self)

    # ── questions ──

    @property
    def newest_recorded(self) -> RecordedForward | None:
        """The newest forward that is recorded and unprocessed; what a page freed now waits for. Nobody waits here."""
        return self._recorded[-1] if self._recorded else None

    @property
    def newest_unretired(self) -> RecordedForward | None:
        """The newest recorded forward unless it has retired; what may still read a page moved now. Nobody waits here."""
        newest = self.newest_recorded
        return newest if newest is not None and newest.forward > self.retired_through else None

    @property
    def in_flight_count(self) -> int:
        """Forwards launched or recorded, and not processed. Nobody waits here."""
        return len(self._recorded) + (self._open is not None)

    def places(self) -> dict[int, int]:
        """Ordinal of each recorded and unprocessed forward → its place among them, from 0 for the oldest. Nobody waits here."""
        return {recorded.forward: place for place, recorded in enumerate(self._recorded)}

    def recorded(self, forward: int) -> RecordedForward:
        """The forward in flight with that ordinal; raises `InvariantError` if there is none. Nobody waits here."""
        for recorded in self._recorded:
            if recorded.forward == forward:
                return recorded
        raise InvariantError(
            "forward.use_names_one_in_flight",
            f"a use names forward {forward}, in flight are {[each.forward for each in self._recorded]}",
            "a use was recorded under a forward that was already processed, or never recorded",
        )

    # ── transitions ──

    def forward_launched(self) -> LaunchRecord:
        """Open a launch; raises `InvariantError` while another waits to be recorded. Neither host nor stream waits."""
        if self._open is not None:
            raise InvariantError(
                "forward.record_before_launch",
                f"a forward is launched while forward {self._open.forward} is not recorded",
                "a step ended without forward_recorded or forward_aborted",
            )
        self._open = LaunchRecord(self._launched_count)
        self._launched_count += 1
        return self._open

    def forward_recorded(self, record: LaunchRecord, event: Event) -> RecordedForward:
        """Close the launch with an event behind it, which a stream may wait for from now on; nobody waits here.

        Raises `InvariantError` for any but the open launch or a used event.
        """
        self._check_open(record, "recorded")
        self._check_fresh(event, f"forward {record.forward} records")
        self._open = None
        newest = RecordedForward(record.forward, event)
        self._recorded.append(newest)
        return newest

    def completion_recorded(self, record: LaunchRecord, completion: Event) -> None:
        """Note an event that lies behind the forward's own, say of its result's copy: a host wait for it covers the forward.

        Raises `InvariantError` unless the forward is recorded and unprocessed, and for an event that was noted before: recorded
        anew for a later forward, it would let an earlier wait pass for one that covers it. Nobody waits here.
        """
        forward = self.recorded(record.forward).forward
        self._check_fresh(completion, f"the completion of forward {forward} is")
        self._completions.append((completion, forward))

    def forward_aborted(self, record: LaunchRecord) -> None:
        """Close a launch that queued no work; raises `InvariantError` for any but the open launch. Nobody waits."""
        self._check_open(record, "aborted")
        self._open = None

    def host_synchronised(self, event: Event) -> None:
        """Note that the host has waited for `event`, here or in the engine; this call does not wait.

        If it is a forward's own event, or a completion noted for it, that forward and every earlier one may be processed.
        Any other event says nothing about forwards and is let pass.
        """
        for recorded in self._recorded:
            if recorded.event is event:
                self._synchronised_through = max(self._synchronised_through, recorded.forward)
                return
        for completion, forward in self._completions:
            if completion is event:
                self._synchronised_through = max(self._synchronised_through, forward)

    def wait_queued(self, event: Event) -> None:
        """Note that the schedule stream waits for `event` before anything queued from now on; the host does not wait.

        The forward whose event it is retires, and every earlier one; it stays unprocessed, so pages freed later still pend.
        """
        for recorded in self._recorded:
            if recorded.event is event:
                self.retired_through = max(self.retired_through, recorded.forward)
                return

    def forward_processed(self, record: LaunchRecord) -> None:
        """End the oldest forward in flight, which the host has waited for before; this call does not wait.

        Raises `InvariantError` out of launch order, and before `host_synchronised` named a completion that covers it.
        """
        oldest = self._recorded[0].forward if self._recorded else None
        if oldest != record.forward:
            raise InvariantError(
                "forward.processed_in_launch_order",
                f"forward {record.forward} is processed, the oldest in flight is {oldest}",
                "results were processed out of order, twice, or before they were recorded",
            )
        if self._synchronised_through < record.forward:
            raise InvariantError(
                "forward.processed_after_completion",
                f"forward {record.forward} is processed, the host has waited for forwards up to {self._synchronised_through}",
                "the result was read without a host wait, or the wait was not told to host_synchronised",
            )
        self._recorded.popleft()
        self.retired_through = max(self.retired_through, record.forward)
        if self._completions:
            self._completions = [entry for entry in self._completions if entry[1] > record.forward]

    # ── checks, always on ──

    def check_pages_may_change(self, action: str) -> None:
        """Raise `InvariantError` while a launch is open: `action` would touch pages without an event to wait for.

        `action` is a free, a take or a move. Nobody waits here.
        """
        if self._open is not None:
            raise InvariantError(
                "forward.record_before_pages",
                f"{action} between the launch of forward {self._open.forward} and its recording",
                "the scheduler frees or takes pages between launch_forward and record_forward",
            )

    def check_idle(self, pending_pages: int) -> None:
        """Raise `InvariantError` when nothing is in flight and pages still pend. Nobody waits here."""
        if not self._recorded and pending_pages:
            raise InvariantError(
                "forward.idle_has_no_pending",
                f"{pending_pages} pages pend with no forward in flight",
                "a batch was keyed by a forward that had been processed",
            )

    def check_processed(self, forward: int) -> None:
        """Raise `InvariantError` while `forward` or one before it is recorded and unprocessed. Nobody waits here."""
        if self._recorded and self._recorded[0].forward <= forward:
            raise InvariantError(
                "forward.pending_returns_after_processing",
                f"pages that wait for forward {forward} are to return, and {self._recorded[0].forward} is not processed",
                "the chain was told before ForwardSteps was",
            )

    def _check_fresh(self, event: Event, whose: str) -> None:
        noted = [(each.event, each.forward) for each in self._recorded] + self._completions
        for known, forward in noted:
            if known is event:
                raise InvariantError(
                    "forward.fresh_event",
                    f"{whose} an event that forward {forward}, in flight, recorded",
                    "an event was reused; record a fresh one for each forward and each completion",
                )

    def _check_open(self, record: LaunchRecord, how: str) -> None:
        if self._open != record:
            raise InvariantError(
                "forward.record_is_open",
                f"forward {record.forward} is {how}, the open launch is {self._open and self._open.forward}",
                "a step was recorded twice, or after a later launch",
            )
