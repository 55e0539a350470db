"""The life of one forward as its scheduler drives it, and what each verb may be called on.

    prepare_step → PREPARED → launch_forward → LAUNCHED → record_forward → RECORDED → forward_processed → PROCESSED → advance → DONE
                      └───────────────────────────┴── abandon → ABANDONED

A step knows its rows by generation: a row that was released and admitted anew is another request, which the step does not touch.
With overlap a row has two steps at most: one recorded and not yet advanced over, and the next. So what a step builds on is
written when it is launched, its forward sees no pages of a later one, and whatever is abandoned is a row's last.
"""

from __future__ import annotations

import enum

import attrs
import numpy as np

from kvtide.chain import Taken
from kvtide.device import Event, IntArray
from kvtide.ledger import LaunchRecord
from kvtide.storage.errors import StorageError
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_state import RowBeginnings


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
    """Tokens each row had before, those of a forward in flight among them."""

    generations: IntArray
    """Which request of each row was meant."""

    taken: Taken | None
    """What was taken for it, with the zeroing that its forward makes needless; `None` where its rows had room."""

    state: StepState = StepState.PREPARED
    """How far it has come."""

    launch: LaunchRecord | None = None
    """Its forward in the ledger, from `launch_forward` on."""

    beginnings: RowBeginnings | None = None
    """Rows handed out before its forward, some of which it resets; from `launch_forward` to `record_forward`, while they can be given back."""

    done_event: Event | None = None
    """Behind its forward on the forward stream, from `record_forward` on: what the host waits for before it processes."""

    def check_state(self, action: str, *expected: StepState) -> None:
        """Raise `StorageError` unless the step stands at one of `expected`."""
        if self.state not in expected:
            wanted = " or ".join(state.value for state in expected)
            raise StorageError(
                f"cannot {action} a step of rows {self.rows.tolist()}: it is {self.state.value}, and must be {wanted}"
            )


def check_step(
    requests: RequestTable,
    rows: IntArray,
    counts: IntArray,
    *,
    grid_tokens: int | None,
    forwards_in_flight: int,
) -> None:
    """Raise `StorageError` unless a forward over `counts[i]` more tokens of row `rows[i]` may be prepared.

    `forwards_in_flight`: steps of one row that are open at once, this one among them; what admission priced. Chunks end on the grid,
    where there is one, but for a prompt's last.
    """
    requests.check_live(rows, "prepare a step of")
    if rows.shape != counts.shape or not len(rows):
        raise StorageError(
            f"a step needs one count a row and a row at least, found {len(rows)} and {len(counts)}"
        )
    waiting = rows[requests.open_steps[rows] >= forwards_in_flight]
    if len(waiting):
        raise StorageError(
            f"cannot prepare a step of rows {waiting.tolist()}: {forwards_in_flight} of their steps, the most that may be open, "
            "were neither advanced over nor abandoned"
        )
    lost = rows[requests.state_is_lost[rows]]
    if len(lost):
        raise StorageError(
            f"cannot prepare a step of rows {lost.tolist()}: the forward of an aborted launch may have changed their states; retract "
            "them, and admit their requests again"
        )
    held = rows[requests.prepared[rows] != requests.recorded[rows]]
    if len(held):
        raise StorageError(
            f"cannot prepare a step of rows {held.tolist()}: the one before was neither recorded nor abandoned, and this one builds on it"
        )
    limits = requests.chunk_limits[rows]
    is_wrong = (counts <= 0) | (counts > limits)
    if is_wrong.any():
        chunks = " or ".join(str(limit) for limit in np.unique(limits[is_wrong]))
        raise StorageError(
            f"cannot prepare a step of rows {rows[is_wrong].tolist()}: counts must lie between 1 and the chunk of {chunks} tokens "
            "that they were admitted with"
        )
    ends = requests.prepared[rows] + counts
    if grid_tokens is not None:
        off_grid = rows[(ends < requests.prompts[rows]) & (ends % grid_tokens != 0)]
        if len(off_grid):
            raise StorageError(
                f"cannot prepare a step of rows {off_grid.tolist()}: a chunk that is not a prompt's last ends on the grid of "
                f"{grid_tokens} tokens, where its checkpoint lies"
            )
    several = rows[(counts > 1) & (ends > requests.prompts[rows])]
    if len(several):
        raise StorageError(
            f"cannot prepare a step of rows {several.tolist()}: several tokens at once past the prompt; end the "
            "chunk with it, and give each step behind it one token"
        )
    over = rows[ends > requests.limits[rows]]
    if len(over):
        raise StorageError(
            f"cannot prepare a step of rows {over.tolist()}: more tokens than they were admitted for "
            f"({requests.limits[over].tolist()})"
        )


def check_launch(requests: RequestTable, step: PreparedStep) -> None:
    """Raise `StorageError` unless the rows of a prepared step are still its requests'."""
    gone = step.rows[~requests.is_same_request(step.rows, step.generations)]
    if len(gone):
        raise StorageError(
            f"cannot launch a step of rows {step.rows.tolist()}: rows {gone.tolist()} were released since it was prepared; "
            "abandon it and prepare the others anew"
        )


def check_turn(requests: RequestTable, rows: IntArray, starts: IntArray) -> None:
    """Raise `StorageError` unless a step that begins at `starts` is the oldest open one of each of `rows`."""
    early = rows[requests.lengths[rows] != starts]
    if len(early):
        raise StorageError(
            f"cannot advance over a step of rows {early.tolist()}: an earlier one of theirs comes first"
        )


def check_checkpoints(
    requests: RequestTable,
    rows: IntArray,
    lengths: IntArray,
    grid_tokens: int | None,
    *,
    earliest: IntArray,
) -> None:
    """Raise `StorageError` unless row `rows[i]` may have its latest checkpoint at `lengths[i]`, on a grid, from `earliest[i]` on."""
    if grid_tokens is None:
        raise StorageError(
            "cannot note checkpoints: the policy keeps none on a grid, so nothing is priced that a hit would read"
        )
    if rows.shape != lengths.shape:
        raise StorageError(f"cannot note checkpoints of {len(rows)} rows at {len(lengths)} lengths")
    is_wrong = (lengths % grid_tokens != 0) | (lengths > requests.recorded[rows]) | (lengths < earliest)
    if is_wrong.any():
        raise StorageError(
            f"cannot note checkpoints of rows {rows[is_wrong].tolist()} at {lengths[is_wrong].tolist()} tokens: they lie on the "
            f"grid of {grid_tokens} tokens, no further than recorded forwards reach, {requests.recorded[rows[is_wrong]].tolist()}, and "
            f"no earlier than {earliest[is_wrong].tolist()}"
        )
