"""The life of a forward, as the allocator sees it: launched → recorded → processed (row L1).

A scheduler that overlaps launches forward N + 1 before it has looked at the result of N. In between, N may still read and
write pages that its requests have given back. `ForwardSteps` knows which forwards those are:

- *launched*: the scheduler has begun to launch it. Until it is recorded there is no event that a page freed now could wait
  for, so no page may be freed, taken or moved.
- *recorded*: an event lies behind it on its stream. A page freed now waits for the newest recorded forward.
- *processed*: the scheduler has seen a completion that covers the event. It and every forward before it are over.

Progress is logical (D5): nothing here asks whether an event has fired.
"""

from __future__ import annotations

from collections import deque

import attrs

from kvtide.device import Event
from kvtide.ledger.errors import InvariantError


@attrs.frozen
class LaunchRecord:
    """One launched forward; its step carries it from launch to processing."""

    forward: int
    """Ordinal of the launch, rising."""


@attrs.frozen
class RecordedForward:
    """A forward in flight that pages can wait for."""

    forward: int
    """Ordinal of the launch."""

    event: Event
    """Behind the forward on its stream; fresh for each."""


class ForwardSteps:
    """Forwards in flight, in launch order. The storage calls the transitions; bands read."""

    def __init__(self) -> None:
        self._launched_count = 0
        self._open: LaunchRecord | None = None
        self._recorded: deque[RecordedForward] = deque()

    @property
    def newest_recorded(self) -> RecordedForward | None:
        """The newest forward that is recorded and unprocessed; what a page freed now waits for."""
        return self._recorded[-1] if self._recorded else None

    @property
    def in_flight_count(self) -> int:
        """Forwards launched or recorded, and not processed."""
        return len(self._recorded) + (self._open is not None)

    def forward_launched(self) -> LaunchRecord:
        """Open a launch; raises `InvariantError` while another waits to be recorded."""
        if self._open is not None:
            raise InvariantError(
                "forward.record_before_launch",
                f"a forward is launched while forward {self._open.forward} is not recorded",
                "a step ended without forward_recorded or forward_aborted",
            )
        self._open = LaunchRecord(self._launched_count)
        self._launched_count += 1
        return self._open

    def forward_recorded(self, record: LaunchRecord, event: Event) -> None:
        """Close the launch with an event behind it; raises `InvariantError` for any but the open launch or a used event."""
        self._check_open(record, "recorded")
        if any(event is recorded.event for recorded in self._recorded):
            raise InvariantError(
                "forward.fresh_event",
                f"forward {record.forward} records an event that an earlier forward in flight recorded",
                "an event was reused; record a fresh one for each forward",
            )
        self._open = None
        self._recorded.append(RecordedForward(record.forward, event))

    def forward_aborted(self, record: LaunchRecord) -> None:
        """Close a launch that queued no work; raises `InvariantError` for any but the open launch."""
        self._check_open(record, "aborted")
        self._open = None

    def forward_processed(self, record: LaunchRecord) -> None:
        """End the oldest forward in flight; raises `InvariantError` out of launch order."""
        oldest = self._recorded[0].forward if self._recorded else None
        if oldest != record.forward:
            raise InvariantError(
                "forward.processed_in_launch_order",
                f"forward {record.forward} is processed, the oldest in flight is {oldest}",
                "results were processed out of order, twice, or before they were recorded",
            )
        self._recorded.popleft()

    def check_pages_may_change(self, action: str) -> None:
        """Raise `InvariantError` while a launch is open: `action` would touch pages without an event to wait for."""
        if self._open is not None:
            raise InvariantError(
                "forward.record_before_pages",
                f"{action} between the launch of forward {self._open.forward} and its recording",
                "the scheduler frees or takes pages between launch_forward and record_forward",
            )

    def check_idle(self, pending_pages: int) -> None:
        """Raise `InvariantError` when nothing is in flight and pages still pend."""
        if not self._recorded and pending_pages:
            raise InvariantError(
                "forward.idle_has_no_pending",
                f"{pending_pages} pages pend with no forward in flight",
                "a batch was keyed by a forward that had been processed",
            )

    def _check_open(self, record: LaunchRecord, how: str) -> None:
        if self._open != record:
            raise InvariantError(
                "forward.record_is_open",
                f"forward {record.forward} is {how}, the open launch is {self._open and self._open.forward}",
                "a step was recorded twice, or after a later launch",
            )
