"""Unit copies that run at once or as blocks give what they give one by one (A6): every legal list of a small band."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtide.arena.copy_plan import copy_runs, copy_segments
from kvtide.device import IntArray

UNIT_COUNT = 5


def legal_lists() -> list[tuple[IntArray, IntArray]]:
    """Every legal list over five units of up to three pairs."""
    return [
        (np.array(sources, np.int64), np.array(targets, np.int64))
        for count in range(4)
        for targets in permutations(range(UNIT_COUNT), count)
        for sources in np.ndindex(*[UNIT_COUNT] * count)
        if not any(target in sources[at + 1 :] for at, target in enumerate(targets))
    ]


LEGAL_LISTS = legal_lists()


def one_by_one(sources: IntArray, targets: IntArray, unit_count: int = UNIT_COUNT) -> list[int]:
    units = list(range(unit_count))
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        units[target] = units[source]
    return units


@pytest.mark.requirement("A6")
@pytest.mark.parametrize("scratch_units", [0, 1, 2, 3])
def test_segments_of_every_small_legal_list_may_run_in_any_order_within(scratch_units: int) -> None:
    """A GPU runs the pairs of a launch in any order, so each segment is run in every order; through scratch, reads first."""
    assert len(LEGAL_LISTS) > 3000
    for sources, targets in LEGAL_LISTS:
        results = [list(range(UNIT_COUNT))]
        covered = 0
        for segment in copy_segments(sources, targets, scratch_units):
            assert segment.first_pair == covered < segment.end_pair
            covered = segment.end_pair
            pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))[segment.first_pair : covered]
            if segment.through_scratch:
                assert 1 < len(pairs) <= scratch_units
                read = [[units[source] for source, _ in pairs] for units in results]
                for units, values in zip(results, read, strict=True):
                    for (_, target), value in zip(pairs, values, strict=True):
                        units[target] = value
                continue
            results = [run(units, order) for units in results for order in permutations(pairs)]
        assert covered == len(sources)
        assert {tuple(units) for units in results} == {tuple(one_by_one(sources, targets))}


def run(units: list[int], pairs: tuple[tuple[int, int], ...]) -> list[int]:
    units = units.copy()
    for source, target in pairs:
        units[target] = units[source]
    return units


@st.composite
def legal_list(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A legal list of up to 20 pairs over few units, so that many hold one another up."""
    sources: list[int] = []
    targets: list[int] = []
    for target in draw(st.lists(st.integers(0, 24), unique=True, max_size=20)):
        sources.append(draw(st.sampled_from([unit for unit in range(25) if unit not in targets])))
        targets.append(target)
    return sources, targets


@pytest.mark.requirement("A6")
@settings(max_examples=300, deadline=None)
@given(pairs=legal_list(), scratch_units=st.integers(0, 6))
# One hazard early in a long list, where a search that halves it looks last.
@example(pairs=([20, 21, *range(10)], [22, 20, *range(10, 20)]), scratch_units=0)
@example(pairs=([20, 21, *range(10)], [22, 20, *range(10, 20)]), scratch_units=6)
def test_no_pair_of_a_segment_writes_what_another_reads(
    pairs: tuple[list[int], list[int]], scratch_units: int
) -> None:
    """Longer lists, whose hazards lie anywhere; and none is cut where it need not be."""
    sources, targets = pairs
    for segment in copy_segments(np.array(sources, np.int64), np.array(targets, np.int64), scratch_units):
        at = range(segment.first_pair, segment.end_pair)
        # A unit copied to itself changes nothing for whoever else reads it.
        hazards = [(i, j) for i in at for j in at if sources[i] == targets[j] and sources[j] != targets[j]]
        assert bool(hazards) == segment.through_scratch
        if not hazards and segment.end_pair < len(sources):
            assert any(sources[i] == targets[segment.end_pair] for i in at)


@pytest.mark.requirement("A6")
@settings(deadline=None)
@given(
    shift=st.integers(1, 40), length=st.integers(1, 200), scratch_units=st.integers(1, 50), up=st.booleans()
)
def test_a_block_moves_over_itself_in_few_segments(
    shift: int, length: int, scratch_units: int, up: bool
) -> None:
    """A float that makes room for one page moves many; a segment a page would be a launch a page."""
    sources = np.arange(length) + shift
    targets = np.arange(length)
    if up:
        sources, targets = targets[::-1], sources[::-1]
    segments = copy_segments(sources, targets, scratch_units)
    assert len(segments) <= length / max(scratch_units, shift) + 1
    assert any(segment.through_scratch for segment in segments) == (shift < min(scratch_units, length))


@pytest.mark.requirement("A6")
def test_runs_of_every_small_legal_list_are_blocks_of_bytes() -> None:
    """A block is copied as if through a temporary copy, in the list's order."""
    for sources, targets in LEGAL_LISTS:
        runs = copy_runs(sources, targets)
        assert runs.unit_counts.sum() == len(sources)
        units = np.arange(UNIT_COUNT)
        for source, target, count in zip(
            runs.first_sources, runs.first_targets, runs.unit_counts, strict=True
        ):
            units[target : target + count] = units[source : source + count].copy()
        assert units.tolist() == one_by_one(sources, targets)


@pytest.mark.requirement("A6")
def test_neighbours_are_one_run_whichever_way_they_are_listed() -> None:
    """What compaction and relocation list: blocks that rise or fall, and holes between."""
    cases: list[tuple[list[int], list[int], list[tuple[int, int, int]]]] = [
        ([5, 6, 7], [0, 1, 2], [(5, 0, 3)]),
        ([7, 6, 5], [9, 8, 7], [(5, 7, 3)]),
        ([5, 6, 9, 8, 7], [0, 1, 4, 3, 2], [(5, 0, 2), (7, 2, 3)]),
        ([5, 6, 7], [0, 2, 3], [(5, 0, 1), (6, 2, 2)]),
        ([5, 6], [1, 0], [(5, 1, 1), (6, 0, 1)]),
        ([], [], []),
    ]
    for sources, targets, expected in cases:
        runs = copy_runs(np.array(sources, np.int64), np.array(targets, np.int64))
        found = zip(
            runs.first_sources.tolist(), runs.first_targets.tolist(), runs.unit_counts.tolist(), strict=True
        )
        assert list(found) == expected


def test_a_list_that_is_not_legal_ends_in_an_error() -> None:
    """Without scratch there is no order of these two that reads before it writes; a host that looks for one never returns."""
    with pytest.raises(ValueError, match="pair 0 writes unit 0, which a later pair reads"):
        copy_segments(np.array([1, 0]), np.array([0, 2]), 0)
