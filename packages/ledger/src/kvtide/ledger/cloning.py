"""Copies of books, for what-if questions and exhaustive search (row C13).

A clone owns its arrays and containers; events, signals, owners and the arrays that callers handed in are the same objects, so what
ends a use in the original is known to the clone too. `copy.deepcopy` would make strangers of them.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeVar

import numpy as np

Books = TypeVar("Books")

_OWN = (np.ndarray, dict, list, deque)
"""What a clone has of its own, not its original's."""


class _Shape(NamedTuple):
    """What the objects of a class look like."""

    attribute_count: int
    """Of those met so far."""

    containers: tuple[str, ...]
    """Attributes that hold containers, in some objects perhaps nothing."""

    undecided: tuple[str, ...]
    """Attributes that hold nothing yet; what holds anything else does so for ever, as its type says."""


_SHAPES: dict[type, _Shape] = {}
"""By class: to look at every attribute each time would be most of the cost, and a search makes hundreds of millions of clones."""


def clone_of(books: Books, **parts: object) -> Books:
    """An object like `books` with arrays and containers of its own, one level deep, and the attributes in `parts` as given.

    Nobody waits.
    """
    kind = type(books)
    state = books.__dict__.copy()
    shape = _SHAPES.get(kind)
    if shape is None or shape.attribute_count != len(state):
        containers = tuple(name for name, value in state.items() if isinstance(value, _OWN))
        undecided = tuple(name for name, value in state.items() if value is None)
        shape = _SHAPES[kind] = _Shape(len(state), containers, undecided)
    for name in shape.containers:
        value = state[name]
        if value is not None:
            state[name] = value.copy()
    for name in shape.undecided:
        value = state[name]
        if isinstance(value, _OWN):
            state[name] = value.copy()
    state.update(parts)
    clone = object.__new__(kind)
    clone.__dict__ = state
    return clone
