"""Why a request is not admitted, or a step not prepared, as values (row K5)."""

from __future__ import annotations

import enum

import attrs

from kvtide.chain import Refusal


class WillFree(enum.Enum):
    """What gives memory or a row back without anybody's help: the only reasons to wait."""

    REQUESTS = "requests in service"
    """They have rows, those admitted a moment ago among them, and run to their ends."""

    FORWARD = "a forward in flight"
    """Processing it ends what it keeps."""

    HOST_COPY = "a host copy in flight"
    """Its end lets go of what it reads or fills."""


@attrs.frozen(kw_only=True)
class AdmissionRefusal(Refusal):
    """Requests that are not admitted now: they wait, or are turned away."""

    waits_for: tuple[WillFree, ...]
    """What is going to free what they need; empty where nothing will."""

    @property
    def is_final(self) -> bool:
        """Whether they are to be turned away: waiting would be for ever."""
        return not self.waits_for


@attrs.frozen(kw_only=True)
class PromiseRefusal(Refusal):
    """A step of requests that were promised a share of their output, have reached its end, and find no room for another.

    Retract some of `overcommitted`, the newest first, until the step is prepared; a row of `rows` among them leaves the step. No row
    that was promised its whole output need go: if a request is the only one left, its own share fits.
    """

    rows: tuple[int, ...]
    """Rows of the step that need another share."""

    overcommitted: tuple[int, ...]
    """Rows in use that were promised less than their whole output, the newest first."""
