"""Every sequence of operations on tiny arenas, breadth first, on clones of the allocator that ships (row X4).

`exhaust` searches one of `SHAPES`; `repeat` does a sequence again. What a state is, and what of it is left out of the form that
makes two states one, stands in `small_world` and in ADR 9.
"""

from kvtide.simulation.exhaustive.search import Exhausted, exhaust, repeat
from kvtide.simulation.exhaustive.shapes import SHAPES, Shape, Take
from kvtide.simulation.exhaustive.small_actions import Action, described

__all__ = ["SHAPES", "Action", "Exhausted", "Shape", "Take", "described", "exhaust", "repeat"]
