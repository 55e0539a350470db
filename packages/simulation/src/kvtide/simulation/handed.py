"""What a take handed out on every rank, how it came about, and what an allocator has done by then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import attrs

from kvtide.chain import Taken
from kvtide.device import IntArray

IN_PLACE, SETTLED, MOVED = HOW = ("in place", "settled", "moved")
"""What a take may need, from the least."""


@attrs.frozen(eq=False)
class Handed:
    """What a take handed out, by band."""

    taken: tuple[Taken, ...]
    """One a rank."""

    units: Mapping[str, IntArray]
    """Band → virtual units bound."""

    promised: Mapping[str, IntArray]
    """Band → those of them that the taking forward is to write whole."""

    how: str
    """What it took, one of `HOW`."""

    @property
    def pages(self) -> IntArray:
        """New virtual pages."""
        return self.taken[0].pages

    @property
    def state_slots(self) -> IntArray:
        """New virtual state slots."""
        return self.taken[0].state_slots


class Figures(NamedTuple):
    """What one rank's allocator has done since the start."""

    moved: int
    """Units moved."""

    zeroed: int
    """Units zeroed on hand-out."""

    settles: int
    """Waits queued for pending units that a take needed."""
