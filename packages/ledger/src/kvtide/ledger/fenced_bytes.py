"""Bytes that left a band while somebody still read them (row L4).

    band A  [ live │ live │ source of a move ]                frontier retreats
            [ live │ live ]  ░░ fenced bytes ░░               nobody's, and still read by a forward, a backup or a send
            [ live │ live ]  ░░ [ band B grows over them ]    B's page carries A's hazard

Bytes change bands, so what may still touch them is kept by byte range, once for the arena. A fence is over when its reader
is; until then each writer of those bytes meets it, as if it were a hazard of the page.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvtide.device import IntArray, UnitGrid
from kvtide.ledger.clearance_table import Hazard
from kvtide.ledger.forward_steps import ForwardSteps
from kvtide.ledger.signals import Signal


class Fence(NamedTuple):
    """One use of bytes outside every span. Who waits for it is `CLEARANCE`'s to say."""

    hazard: Hazard
    """FORWARD, COPY_READ, COPY_WRITE or NETWORK."""

    signal: Signal | None
    """What ends it; None for a forward."""

    forward: int
    """The newest forward that may read the bytes; −1 unless the hazard is FORWARD."""

    first_bytes: IntArray
    """Arena offsets at which its ranges begin."""

    end_bytes: IntArray
    """Where each ends, exclusive."""


class FencedBytes:
    """Fences of one arena, shared by its bands. It never waits, on host or stream: it says what to wait for."""

    def __init__(self, steps: ForwardSteps) -> None:
        """No fence; forwards retire as `steps` says."""
        self._steps = steps
        self._fences: list[Fence] = []
        self._ranges: tuple[IntArray, IntArray, IntArray] | None = None

    def __len__(self) -> int:
        """Fences not over. Nobody waits here."""
        if not self._fences:
            return 0
        self._drop_retired()
        return len(self._fences)

    def add(self, fence: Fence) -> None:
        """Keep a fence until its forward retires or its signal ends. Nobody waits now; the next writer will."""
        self._fences.append(fence)
        self._ranges = None

    def end(self, signal: Signal) -> None:
        """Drop the fences of a copy or transfer that is over. Nobody waits."""
        self._keep([fence for fence in self._fences if fence.signal is not signal])

    def fences(self) -> tuple[Fence, ...]:
        """The fences not over, oldest first. Nobody waits here."""
        self._drop_retired()
        return tuple(self._fences)

    def find(self, grid: UnitGrid, pages: IntArray) -> tuple[IntArray, IntArray]:
        """Every pair of a place in `pages`, pages of `grid`, and the place in `fences()` of a fence that it overlaps.

        There must be a fence. Nobody waits here.
        """
        firsts, ends, owners = self._all_ranges()
        # Pages [low, high) of the grid overlap the range; integer division rounds towards the lower page.
        low = (firsts - grid.origin_bytes) // grid.unit_bytes
        high = -((grid.origin_bytes - ends) // grid.unit_bytes)
        order = np.argsort(pages, kind="stable")
        ascending = pages[order]
        starts = np.searchsorted(ascending, low)
        counts = np.maximum(np.searchsorted(ascending, high) - starts, 0)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return order[np.repeat(starts, counts) + within], np.repeat(owners, counts)

    def _all_ranges(self) -> tuple[IntArray, IntArray, IntArray]:
        if self._ranges is None:
            fences = self._fences
            self._ranges = (
                np.concatenate([fence.first_bytes for fence in fences]),
                np.concatenate([fence.end_bytes for fence in fences]),
                np.repeat(np.arange(len(fences)), [len(fence.first_bytes) for fence in fences]),
            )
        return self._ranges

    def _drop_retired(self) -> None:
        retired = self._steps.retired_through
        # A fence without a forward names −1, which every forward has passed: it stays until its signal ends.
        self._keep([f for f in self._fences if f.signal is not None or f.forward > retired])

    def _keep(self, fences: list[Fence]) -> None:
        if len(fences) != len(self._fences):
            self._fences = fences
            self._ranges = None


def byte_ranges(grid: UnitGrid, pages: IntArray) -> tuple[IntArray, IntArray]:
    """The bytes of `pages` as ascending ranges, neighbours joined: where each begins, and where it ends."""
    pages = np.sort(pages)
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    last = np.append(starts[1:], len(pages)) - 1
    return (
        grid.origin_bytes + pages[starts] * grid.unit_bytes,
        grid.origin_bytes + (pages[last] + 1) * grid.unit_bytes,
    )
