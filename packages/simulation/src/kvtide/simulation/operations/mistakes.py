"""What a mistake needs to know, and the call that makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from kvtide.device import IntArray
from kvtide.simulation.bands import SimulatedBand
from kvtide.simulation.rank import Rank, free
from kvtide.simulation.world import World

Call: TypeAlias = Callable[[Rank], object]
"""Makes the mistake on one rank."""


class Mistake(NamedTuple):
    """Where one is made."""

    world: World
    band: SimulatedBand
    pick: int
    """Which unit."""


def free_of(band: SimulatedBand, units: IntArray) -> Call:
    """A free of these units."""
    return lambda rank: free(rank.chain, band, units)
