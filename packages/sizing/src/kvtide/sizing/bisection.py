"""Bisection over questions whose answer changes once."""

from __future__ import annotations

from collections.abc import Callable


def last_that(holds: Callable[[int], bool], first: int, last: int) -> int:
    """The last integer of `[first, last]` at which `holds`, which holds at `first` and, once it fails, fails for ever."""
    while first < last:
        middle = (first + last + 1) // 2
        if holds(middle):
            first = middle
        else:
            last = middle - 1
    return first
