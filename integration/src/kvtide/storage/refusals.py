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
    """Requests that are not admitted now: all of them wait, some are to be turned away, or fewer are to be asked for at once."""

    waits_for: tuple[WillFree, ...]
    """What is going to free what they need; empty where waiting would be for ever."""

    turned_away: tuple[int, ...] = ()
    """Which of them can never be admitted, by their place in what was asked; the others may be asked for again."""

    first_that_fit: int | None = None
    """Where each could be served and never all at once: how many of them, from the first on, may be asked for together."""

    @property
    def is_final(self) -> bool:
        """Whether those of `turned_away` are to be turned away. Of a request that was asked for by itself: it is."""
        return bool(self.turned_away)


@attrs.frozen(kw_only=True)
class PromiseRefusal(Refusal):
    """A step of requests that were promised a share of their output, have reached its end, and find no room for another.

    Retract some of `overcommitted`, the newest first, until the step is prepared; a row of `rows` among them leaves the step. No row
    that was promised its whole output need go: if a request is the only one left, its own share fits, unless units have been
    fixed or quarantined since it was admitted. Then it may be retracted and wait until they are let go, or end where it is.
    """

    rows: tuple[int, ...]
    """Rows of the step that need another share."""

    overcommitted: tuple[int, ...]
    """Rows in use that were promised less than their whole output, the newest first."""
