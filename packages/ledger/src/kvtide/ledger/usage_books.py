"""What a band's ledger answers by, as a value: two ledgers with equal books give equal answers from here on (row C13).

Ordinals, counts and the order of events are left out wherever no answer can tell them apart: forwards are named by their place
among those in flight, pages are sorted, what is over is gone. So states that were reached in different ways are told to be one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias

from kvtide.device import IntArray
from kvtide.ledger.clearance_table import Hazard

UsageBooks: TypeAlias = tuple[object, ...]
"""Nested tuples of integers; None for what is unknown."""

Namer: TypeAlias = Callable[[Hashable], int]
"""A small number for each signal and owner, the same in every band."""


def sorted_pages(pages: IntArray | None) -> tuple[int, ...] | None:
    """Pages as a value; None for unknown ones. Nobody waits."""
    return None if pages is None else tuple(sorted(pages.tolist()))


def claim_books(
    owned: Iterable[tuple[Hashable, tuple[IntArray, ...]]], name: Namer
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """What each owner claims, as often as it does, as a value. Nobody waits."""
    return tuple(
        (name(owner), tuple(sorted(page for pages in claimed for page in pages.tolist())))
        for owner, claimed in owned
    )


def fence_books(
    fences: Iterable[tuple[Hazard, Hashable | None, int, int, IntArray, IntArray]],
    places: dict[int, int],
    name: Namer,
) -> UsageBooks:
    """Fences not over, as a value, in the order of their bytes. Nobody waits."""
    return tuple(
        sorted(
            (
                tuple(firsts.tolist()),
                tuple(ends.tolist()),
                int(hazard),
                -1 if signal is None else name(signal),
                places.get(forward, -1),
                band,
            )
            for hazard, signal, forward, band, firsts, ends in fences
        )
    )
