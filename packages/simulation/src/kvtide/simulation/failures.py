"""What the simulation checks, as data, and the failure that a check ends a run with."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from kvtide.device import HostMayNotWaitError, UnorderedAccessError
from kvtide.ledger import InvariantError

CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "lost_write": "Every live unit holds what its last writer wrote, or zeros where nobody wrote since it was taken.",
        "cross_dtype_bytes": "No forward finds bytes of another band, or of no band at all, in a unit that it reads.",
        "unordered_overlap": "No two unordered accesses touch the same bytes when one of them writes them.",
        "host_read_after_wait": "No allocator operation reads device memory or makes the host wait.",
        "stale_mirror": "A forward's metadata phase, and the host at rest, find in the mirrors what the host's tables said at launch.",
        "rank_divergence": "All ranks decide alike: ids, refusals, figures, places in the arena.",
        "wrong_binding": "A virtual unit is bound, and its id taken, exactly while somebody holds it.",
        "byte_accounting": "Every byte has at most one owner, every unit is counted once.",
        "capacity_answer": "A capacity question, the take it asks about, what a refusal or the chain's uses say of room, and an exhaustive placement agree.",
        "changed_by_refusal": "What was refused, or was an error, changed nothing and queued nothing.",
        "needless_wait": "A flush made for gain waits for no forward in flight, a relief for no transfer that a layout goes around, and what has been waited for has retired.",
        "disturbed_use": "Fixed units stay where they are, and nobody else gets bytes that a use keeps from others.",
        "misuse_accepted": "A call that names what it may not name raises `ChainError`, at launch `InvariantError`.",
        "ledger_leak": "At rest the ledger keeps no record of work that ended; with nothing held the arena is empty.",
        "undeclared_outcome": "An operation says only what it has declared that it may say.",
        "unexpected_error": "A legal call raises nothing.",
    }
)
"""Every check by name, and what holds while it is silent."""


class CheckFailedError(AssertionError):
    """A check found something; ends the run."""

    def __init__(self, check: str, message: str) -> None:
        """`check` is a key of `CHECKS`."""
        super().__init__(message)
        self.check = check
        """Which."""


@attrs.frozen(kw_only=True)
class Failure:
    """Where a run ended."""

    check: str
    """Key of `CHECKS`."""

    action_index: int
    """Place of the action during which it was found; the number of actions for what the end of the run found."""

    message: str
    """What was found, in words."""

    cause: str = ""
    """What tells it from other failures of its check: the invariant that was broken, or what was raised and where."""

    def is_like(self, other: Failure) -> bool:
        """Whether the same check failed for the same cause."""
        return (self.check, self.cause) == (other.check, other.cause)

    def __str__(self) -> str:
        return f"{self.check} at action {self.action_index}: {self.message}"

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return attrs.asdict(self)


def failure_of(error: Exception, action_index: int) -> Failure:
    """Which check an exception belongs to, whoever raised it."""
    message = str(error) or type(error).__name__
    cause = error.invariant if isinstance(error, InvariantError) else ""
    match error:
        case CheckFailedError():
            check = error.check
        case UnorderedAccessError():
            check = "unordered_overlap"
        case HostMayNotWaitError():
            check = "host_read_after_wait"
        case InvariantError() if error.invariant.endswith(("idle_has_no_use", "idle_has_no_pending")):
            check = "ledger_leak"
        case InvariantError() if error.invariant.endswith(("units_counted_once", "bytes_conserved")):
            check = "byte_accounting"
        case _:
            check, message = "unexpected_error", f"{type(error).__name__}: {message}"
            cause = cause or f"{type(error).__name__} in {_raised_in(error)}"
    return Failure(check=check, action_index=action_index, message=message, cause=cause)


def _raised_in(error: Exception) -> str:
    """The innermost function of ours that an exception came out of: below it, libraries differ from version to version."""
    place = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if not place or module.partition(".")[0] == "kvtide":
            place = f"{module}.{frame.f_code.co_name}"
    return place
