"""Bytes that no band may come to hold: quarantined ones, and with transfers fixed those that a send still reads (row C4)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class BlockedBytes(NamedTuple):
    """Runs of bytes, ascending and apart. Every question is a bisection, and a walk over the runs that are in the way."""

    firsts: list[int]
    """Where each begins."""

    ends: list[int]
    """Where each ends, exclusive."""

    def overlap(self, first_byte: int, end_byte: int) -> bool:
        """Whether any byte of `[first_byte, end_byte)`, which is not empty, is blocked."""
        run = bisect_right(self.ends, first_byte)
        return run < len(self.firsts) and self.firsts[run] < end_byte

    def first_from(self, byte: int, otherwise: int) -> int:
        """Where the first run begins that ends behind `byte`; `otherwise` where there is none."""
        run = bisect_right(self.ends, byte)
        return self.firsts[run] if run < len(self.firsts) else otherwise

    def end_before(self, byte: int, otherwise: int) -> int:
        """Where the last run ends that begins before `byte`; `otherwise` where there is none."""
        run = bisect_left(self.firsts, byte)
        return self.ends[run - 1] if run else otherwise

    def clear_above(self, page: int, packed: int, unit: int, origin: int) -> int:
        """The first page, `page` or the next higher, of a block of `packed` units that holds no blocked byte."""
        for run in range(bisect_right(self.ends, origin + page * unit), len(self.firsts)):
            if self.firsts[run] >= origin + (page + packed) * unit:
                break
            page = -((origin - self.ends[run]) // unit)
        return page

    def clear_below(self, page: int, packed: int, unit: int, origin: int) -> int:
        """The same, `page` or the next lower."""
        for run in range(bisect_left(self.firsts, origin + (page + packed) * unit) - 1, -1, -1):
            if self.ends[run] <= origin + page * unit:
                break
            page = (self.firsts[run] - origin) // unit - packed
        return page


def blocked_bytes(extents: Sequence[tuple[int, int]]) -> BlockedBytes | None:
    """What half-open `extents` cover together, or `None` where that is nothing."""
    firsts, ends = merged(extents) if extents else ([], [])
    return BlockedBytes(firsts, ends) if firsts else None


def merged(extents: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Where the runs begin and where they end that half-open `extents` cover together, ascending and apart."""
    firsts: list[int] = []
    ends: list[int] = []
    for first, end in sorted(extents):
        if ends and first <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        elif first < end:
            firsts.append(first)
            ends.append(end)
    return firsts, ends
