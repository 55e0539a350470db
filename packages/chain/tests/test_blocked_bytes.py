"""Runs of bytes that are left alone, against bytes looked at one by one (C4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvtide.chain.blocked_bytes import BlockedBytes, blocked_bytes

BYTES = 9


def every_pattern() -> Iterator[tuple[set[int], BlockedBytes]]:
    """Each set of a few bytes, and its runs."""
    for pattern in itertools.product((False, True), repeat=BYTES):
        held = set(itertools.compress(range(BYTES), pattern))
        blocked = blocked_bytes(
            [(byte, byte + 1) for byte in sorted(held, key=lambda byte: byte * 5 % BYTES)]
        )
        assert (blocked is None) == (not held)
        if blocked is not None:
            yield held, blocked


@pytest.mark.requirement("C4")
def test_runs_are_ascending_and_apart_and_cover_what_was_given() -> None:
    """Extents come as fences come: in any order, overlapping, touching, one inside another, empty."""
    for held, blocked in every_pattern():
        covered = {byte for first, end in zip(*blocked, strict=True) for byte in range(first, end)}
        assert covered == held
        assert all(end < first for end, first in zip(blocked.ends, blocked.firsts[1:], strict=False))
    assert blocked_bytes([(20, 30), (25, 40), (21, 22), (50, 50), (60, 70), (45, 46)]) == (
        [20, 45, 60],
        [40, 46, 70],
    )
    assert blocked_bytes([(50, 50)]) is None


@pytest.mark.requirement("C4")
def test_spans_and_gaps_are_measured_as_bytes_looked_at_one_by_one() -> None:
    """What touches a run does not overlap it."""
    for held, blocked in every_pattern():
        for first, end in itertools.combinations(range(BYTES + 1), 2):
            assert blocked.overlap(first, end) == (not held.isdisjoint(range(first, end)))
        for byte in range(BYTES + 1):
            if {byte - 1, byte} <= held:
                continue  # within a run, where no span ends
            assert blocked.first_from(byte, 99) == min((at for at in held if at >= byte), default=99)
            assert blocked.end_before(byte, -1) == max((at + 1 for at in held if at < byte), default=-1)


@pytest.mark.requirement("C4")
@pytest.mark.parametrize(("unit", "origin"), [(1, 0), (2, 0), (2, 1), (3, -1)])
@pytest.mark.parametrize("packed", [1, 2, 3])
def test_the_nearest_clear_block_is_found(unit: int, origin: int, packed: int) -> None:
    """Upward and downward, on any grid."""
    for held, blocked in every_pattern():
        clear = [
            page
            for page in range(-9, 19)
            if held.isdisjoint(range(origin + page * unit, origin + (page + packed) * unit))
        ]
        for page in range(9):
            assert blocked.clear_above(page, packed, unit, origin) == min(at for at in clear if at >= page)
            assert blocked.clear_below(page, packed, unit, origin) == max(at for at in clear if at <= page)
