"""What the modelled device says when something is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class RacingAccess:
    """One side of a race, in words."""

    actor: str
    """Name of the work: "forward 12", "move"."""

    is_write: bool
    """Whether it writes the bytes."""

    place: str | None
    """The bytes as this side knows them: "band 'window-128' pages [4, 7)"; `None` if they are just bytes."""


@attrs.frozen
class Race:
    """Bytes that two works touch, one of them writing, with nothing that orders the two."""

    first: RacingAccess
    """Noted first; which of the two runs first nobody knows, and that is the fault."""

    second: RacingAccess
    """The access that found the race."""

    buffer: str
    """Whose bytes."""

    start_byte: int
    """Inclusive."""

    end_byte: int
    """Exclusive."""

    def __str__(self) -> str:
        """One line: who does what to which bytes, unordered with whom."""
        where = f"bytes [{self.start_byte}, {self.end_byte}) of {self.buffer}"
        actor = (
            self.second.actor if self.second.place is None else f"{self.second.actor} of {self.second.place}"
        )
        return (
            f"{actor} {'writes' if self.second.is_write else 'reads'} {where} unordered with {self.first.actor} "
            f"{'writing' if self.first.is_write else 'reading'} {self.first.place or 'them'}"
        )


class UnorderedAccessError(AssertionError):
    """A missing wait: raised by the call that queued, or ran, the second of two unordered accesses."""

    def __init__(self, races: Sequence[Race]) -> None:
        super().__init__("\n".join(map(str, races)))
        self.races = tuple(races)
        """Everything that one call found."""


class UndeclaredAccessError(AssertionError):
    """Work touched bytes that it had not declared: a mistake in the test, which would hide races."""


class HostMayNotWaitError(AssertionError):
    """A device read or a host wait inside an operation that does neither (row V3)."""
