"""How an action's numbers choose among what there is: counted round, or bit by bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from kvtide.device import IntArray

T = TypeVar("T")

_BITS = 16

ALL = (1 << _BITS) - 1
"""Every bit."""


def draw_bits(rng: random.Random, count: int = _BITS) -> int:
    """A number whose bits choose among `count` things: one, about half, or all of them."""
    return rng.choice((1 << rng.randrange(min(count, _BITS)), rng.getrandbits(_BITS), ALL))


def one_of(things: Sequence[T], number: int) -> T:
    """Thing `number`, counted round; there must be one."""
    return things[number % len(things)]


def some_of(things: Sequence[T], bits: int) -> list[T]:
    """Those whose bit is set, bits counted round."""
    return [thing for place, thing in enumerate(things) if bits >> place % _BITS & 1]


def some_places(count: int, bits: int) -> IntArray:
    """Places below `count` whose bit is set, bits counted round."""
    return np.array([place for place in range(count) if bits >> place % _BITS & 1], np.int64)
