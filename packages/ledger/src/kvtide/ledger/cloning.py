"""Copies of books, for what-if questions and exhaustive search (row C13).

A clone owns its arrays and containers; events, signals, owners and the arrays that callers handed in are the same objects, so what
ends a use in the original is known to the clone too. `copy.deepcopy` would make strangers of them.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import numpy as np

Books = TypeVar("Books")


class _OwnTypes(dict[type, bool]):
    """Of each type met, whether a clone has a value of its own: a lookup where `isinstance` would be most of the cost."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, np.ndarray | dict | list | deque)
        return self[kind]


_OWN = _OwnTypes()


def clone_of(books: Books, **parts: object) -> Books:
    """An object like `books` with arrays and containers of its own, one level deep, and the attributes in `parts` as given.

    Nobody waits.
    """
    clone = object.__new__(type(books))
    # One dictionary at once: an exhaustive search makes hundreds of millions of these.
    state = {**vars(books), **parts}
    for name, value in state.items():
        if _OWN[type(value)] and name not in parts:
            state[name] = value.copy()
    clone.__dict__ = state
    return clone
