"""The life of one forward as its scheduler drives it, and what each verb may be called on.

    prepare_step → PREPARED → launch_forward → LAUNCHED → record_forward → RECORDED → forward_processed → PROCESSED → advance → DONE
                      └───────────────────────────┴── abandon → ABANDONED

A step knows its rows by generation: a row that was released and admitted anew is another request, which the step does not touch.
"""

from __future__ import annotations

import enum

import attrs

from kvtide.chain import Taken
from kvtide.device import Event, IntArray
from kvtide.ledger import LaunchRecord
from kvtide.storage.errors import StorageError


class StepState(enum.Enum):
    """Where a step stands; the value is what it says of itself in errors."""

    PREPARED = "prepared"
    LAUNCHED = "launched"
    RECORDED = "recorded"
    PROCESSED = "processed"
    DONE = "advanced over"
    ABANDONED = "abandoned"


@attrs.define(eq=False)
class PreparedStep:
    """One forward's rows and tokens. The storage moves it along; schedulers read."""

    rows: IntArray
    """Rows of the forward."""

    counts: IntArray
    """New tokens of each row."""

    starts: IntArray
    """Tokens each row had before."""

    generations: IntArray
    """Which request of each row was meant."""

    taken: Taken | None
    """What was taken for it, with the zeroing that its forward makes needless; `None` where its rows had room."""

    state: StepState = StepState.PREPARED
    """How far it has come."""

    launch: LaunchRecord | None = None
    """Its forward in the ledger, from `launch_forward` on."""

    done_event: Event | None = None
    """Behind its forward on the forward stream, from `record_forward` on."""

    def check_state(self, action: str, *expected: StepState) -> None:
        """Raise `StorageError` unless the step stands at one of `expected`."""
        if self.state not in expected:
            wanted = " or ".join(state.value for state in expected)
            raise StorageError(
                f"cannot {action} a step of rows {self.rows.tolist()}: it is {self.state.value}, and must be {wanted}"
            )
