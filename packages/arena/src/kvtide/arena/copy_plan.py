"""In what order a list of unit copies may run when more than one runs at a time (row A6); NumPy, no bytes.

A list of pairs is *legal* when no later source is an earlier target and no target comes twice: one after another, every pair
then reads what its source held before the list began. So the whole list equals "read every source, then write every
target", and so does any part of it that runs after the part before. Two ways to run a part follow:

- a *run* of neighbouring units as one `memmove`, which is read-all-then-write-all (`copy_runs`);
- pairs at once, in any order, if in that part no target is the source of an earlier pair: then nothing that one pair
  writes is read by another. A part that cannot be cut so is read to scratch whole and written from there (`copy_segments`).
"""

from __future__ import annotations

import attrs
import numpy as np

from kvtide.device import IntArray


@attrs.frozen
class CopyRuns:
    """Maximal runs of pairs whose units are neighbours on both sides; run i is one block of bytes to one other."""

    first_sources: IntArray
    """Lowest source of each run."""

    first_targets: IntArray
    """Lowest target of each run."""

    unit_counts: IntArray
    """Units of each run."""


@attrs.frozen
class CopySegment:
    """Pairs `[first_pair, end_pair)` of a list that may run at once."""

    first_pair: int
    """Inclusive."""

    end_pair: int
    """Exclusive."""

    through_scratch: bool
    """Whether every source must be read before any target is written."""


def copy_runs(sources: IntArray, targets: IntArray) -> CopyRuns:
    """The runs of a legal list, in its order; both sides of a run rise by one, or both fall by one."""
    step = np.diff(sources)
    step[(step != np.diff(targets)) | (np.abs(step) != 1)] = 0
    before = np.concatenate([[0], step[:-1]])
    starts = np.flatnonzero((step == 0) | ((before != 0) & (step != before))) + 1
    starts = np.concatenate([[0], starts]) if len(sources) else starts
    ends = np.concatenate([starts[1:], [len(sources)]])[: len(starts)]
    return CopyRuns(
        first_sources=np.minimum(sources[starts], sources[ends - 1]),
        first_targets=np.minimum(targets[starts], targets[ends - 1]),
        unit_counts=ends - starts,
    )


def copy_segments(sources: IntArray, targets: IntArray, scratch_units: int) -> list[CopySegment]:
    """Cut a legal list into segments that run one after another: at most one for each `scratch_units` pairs, and one more.

    Each segment is the longest that needs no scratch, or, where that is shorter, as many pairs as the scratch holds. With
    less than one unit of scratch, pairs that cannot run at once run alone. Raises `ValueError` where a list that is not legal
    would leave none to run.
    """
    blocked_by = _last_reader(sources, targets)
    # Non-decreasing, and at least `first` from the first pair on that writes what a pair from `first` on reads.
    blocked_by = np.maximum.accumulate(blocked_by)
    pair_count = len(sources)
    segments = []
    first = 0
    while first < pair_count:
        end = int(np.searchsorted(blocked_by, first))
        needs_scratch = end < min(first + scratch_units, pair_count)
        if needs_scratch:
            end = min(first + scratch_units, pair_count)
        if end == first:
            raise ValueError(
                f"pair {first} writes unit {targets[first]}, which a later pair reads: order the pairs so that no later source "
                "is an earlier target"
            )
        segments.append(CopySegment(first, end, needs_scratch))
        first = end
    return segments


def _last_reader(sources: IntArray, targets: IntArray) -> IntArray:
    """For each pair, the last pair that reads what it writes, or −1 if there is none or it is itself; in a legal list that one
    comes before. A pair that copies a unit to itself hides its earlier readers: whenever it runs, they read the same bytes.
    """
    none = np.full(len(sources), -1, np.int64)
    if not len(sources) or sources.max() < targets.min() or targets.max() < sources.min():
        return none
    order = np.argsort(sources, kind="stable")
    place = np.searchsorted(sources[order], targets, side="right") - 1
    reader = order[np.maximum(place, 0)]
    found = (place >= 0) & (sources[reader] == targets) & (reader != np.arange(len(sources)))
    return np.where(found, reader, none)
