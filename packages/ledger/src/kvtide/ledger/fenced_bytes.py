"""Bytes that left a band while somebody still read them (row L4).

    band A  [ live │ live │ source of a move ]                frontier retreats
            [ live │ live ]  ░░ fenced bytes ░░               nobody's, and still read by a forward, a backup or a send
            [ live │ live ]  ░░ [ band B grows over them ]    B's page carries A's hazard

Bytes change bands, so what may still touch them is kept by byte range, once for the arena. A fence is over when its reader
is; until then each writer of those bytes meets it, as if it were a hazard of the page. Each band ends its own: a transfer may
have records in several, and is over in each in its own turn.

A question passes over all ranges in a few NumPy calls, and in Python over the fences that it meets. What a fence over leaves
behind is dropped later, in one go, so opening and ending one costs O(its ranges) over time.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray, UnitGrid
from kvtide.ledger.clearance_table import Hazard
from kvtide.ledger.cloning import clone_of
from kvtide.ledger.forward_steps import ForwardSteps
from kvtide.ledger.signals import HostCopy, NetworkTransfer, Signal

_NO_FORWARD = -1
_OVER = -1
_FEW = 64  # fences that are over, beyond as many as are open, before the arrays are made anew
_NO_PLACES: IntArray = np.empty(0, np.int64)
_NO_KINDS: npt.NDArray[np.int8] = np.empty(0, np.int8)


class Fence(NamedTuple):
    """One use of bytes outside every span. Who waits for it is `CLEARANCE`'s to say."""

    hazard: Hazard
    """FORWARD, COPY_READ, COPY_WRITE or NETWORK; FIXED for a transfer in quarantine."""

    signal: Signal | None
    """The copy or transfer that reads or writes the bytes; None for a forward."""

    forward: int
    """The newest forward that may read the bytes; −1 unless the hazard is FORWARD."""

    band: int
    """The band that the bytes left, as `FencedBytes.enter` numbered it."""

    first_bytes: IntArray
    """Arena offsets at which its ranges begin."""

    end_bytes: IntArray
    """Where each ends, exclusive."""


class FencesMet(NamedTuple):
    """Fences that pages overlap. Who waits for them is `CLEARANCE`'s to say."""

    places: IntArray
    """Places in the pages asked about, one for each pair of a page and a range that it overlaps."""

    kinds: npt.NDArray[np.int8]
    """The `Hazard` of each pair."""

    signals: list[Signal]
    """Copies and transfers among them that can be waited for, each once; none of those in quarantine."""

    newest_forward: int
    """The newest unretired forward among them; −1 for none."""


class FencedBytes:
    """Fences of one arena, shared by its bands. It never waits, on host or stream: it says what to wait for."""

    def __init__(self, steps: ForwardSteps) -> None:
        """No fence; forwards retire as `steps` says."""
        self._steps = steps
        self._band_count = 0
        self._reset()

    def clone(self, steps: ForwardSteps) -> FencedBytes:
        """The same fences, which go their own way over a clone of the steps; signals are shared (row C13). Nobody waits."""
        return clone_of(self, _steps=steps)

    def _reset(self) -> None:
        self.open_fences: dict[int, Fence] = {}
        """Fences by number, some of which may be over; read by others."""
        self._number_count = 0
        self._steering_count = 0
        self.transfer_count = 0
        """Fences of transfers, quarantined ones among them: they bear on where bands may stand."""
        # By number of the fence.
        self._kinds: npt.NDArray[np.int8] = np.full(16, _OVER, np.int8)
        self._forwards: IntArray = np.zeros(16, np.int64)
        # By range.
        self._firsts: IntArray = np.zeros(16, np.int64)
        self._ends: IntArray = np.zeros(16, np.int64)
        self._owners: IntArray = np.zeros(16, np.int64)
        self._range_count = 0
        # What ends them.
        self._unretired: list[tuple[int, int]] = []
        self._of_signal: dict[tuple[int, Signal], tuple[int, ...]] = {}

    def __len__(self) -> int:
        """Fences not over. Nobody waits here."""
        self._drop_retired()
        return len(self.open_fences)

    @property
    def steers_choice(self) -> bool:
        """Whether any is of a kind that a choice of holes looks at: all but host copies. Nobody waits here."""
        self._drop_retired()
        return self._steering_count > 0

    def enter(self) -> int:
        """The number of one more band that gives back bytes here. Nobody waits."""
        self._band_count += 1
        return self._band_count - 1

    def add(self, fence: Fence) -> None:
        """Keep a fence until its forward retires or its band ends its signal. Nobody waits now; the next writer will."""
        number = self._number_count
        self._number_count += 1
        self.open_fences[number] = fence
        self._steering_count += _steers(fence)
        self.transfer_count += isinstance(fence.signal, NetworkTransfer)
        self._kinds = _with_room(self._kinds, number, 1)
        self._kinds[number] = fence.hazard
        self._forwards = _with_room(self._forwards, number, 1)
        self._forwards[number] = fence.forward
        ranges = slice(self._range_count, self._range_count + len(fence.first_bytes))
        for name, values in (
            ("_firsts", fence.first_bytes),
            ("_ends", fence.end_bytes),
            ("_owners", number),
        ):
            array = _with_room(getattr(self, name), ranges.start, ranges.stop - ranges.start)
            array[ranges] = values
            setattr(self, name, array)
        self._range_count = ranges.stop
        if fence.signal is None:
            heappush(self._unretired, (fence.forward, number))
        else:
            key = fence.band, fence.signal
            self._of_signal[key] = (*self._of_signal.get(key, ()), number)

    def end(self, band: int, signal: Signal) -> None:
        """Drop a band's fences of a copy or transfer that is over there, or out of quarantine. Nobody waits."""
        for number in self._of_signal.pop((band, signal), ()):
            self._drop(number)
        self._tidy()

    def quarantine(self, band: int, transfer: NetworkTransfer) -> None:
        """Make a band's fences of a failed transfer FIXED: nobody waits for them any more, and nobody writes there."""
        for number in self._of_signal.get((band, transfer), ()):
            self.open_fences[number] = self.open_fences[number]._replace(hazard=Hazard.FIXED)
            self._kinds[number] = Hazard.FIXED

    def fences(self) -> tuple[Fence, ...]:
        """The fences not over, oldest first. Nobody waits here."""
        self._drop_retired()
        return tuple(self.open_fences.values())

    def extents(self, *hazards: Hazard) -> tuple[IntArray, IntArray]:
        """Where the byte ranges of these kinds begin and where they end, ascending: what a plan lays out around (row C6).

        With NETWORK and FIXED, whatever grows elsewhere makes no host wait, and meets no quarantine. Asking waits for nothing.
        """
        self._drop_retired()
        count = self._range_count
        chosen = np.flatnonzero(
            np.isin(self._kinds[self._owners[:count]], [int(hazard) for hazard in hazards])
        )
        chosen = chosen[np.argsort(self._firsts[chosen], kind="stable")]
        return self._firsts[chosen], self._ends[chosen]

    def meet(self, grid: UnitGrid, pages: IntArray) -> FencesMet:
        """The fences that `pages`, pages of `grid`, overlap. Nobody waits here."""
        self._drop_retired()
        if not self.open_fences or not len(pages):
            return FencesMet(_NO_PLACES, _NO_KINDS, [], _NO_FORWARD)
        places, numbers = self._find(grid, pages)
        if not len(places):
            return FencesMet(_NO_PLACES, _NO_KINDS, [], _NO_FORWARD)
        met = [self.open_fences[number] for number in np.unique(numbers).tolist()]
        waited = dict.fromkeys(
            fence.signal for fence in met if fence.signal is not None and fence.hazard is not Hazard.FIXED
        )
        return FencesMet(
            places,
            self._kinds[numbers],
            list(waited),
            int(self._forwards[numbers].max(initial=_NO_FORWARD)),
        )

    def _find(self, grid: UnitGrid, pages: IntArray) -> tuple[IntArray, IntArray]:
        """Every pair of a place in `pages` and the number of a fence that the page overlaps."""
        count = self._range_count
        first_byte = grid.origin_bytes + int(pages.min()) * grid.unit_bytes
        end_byte = grid.origin_bytes + (int(pages.max()) + 1) * grid.unit_bytes
        near = ((self._firsts[:count] < end_byte) & (self._ends[:count] > first_byte)).nonzero()[0]
        if not len(near):
            return _NO_PLACES, _NO_PLACES
        near = near[self._kinds[self._owners[near]] != _OVER]
        order = np.argsort(pages, kind="stable")
        ascending = pages[order]
        # Pages [low, high) of the grid overlap the range; integer division rounds towards the lower page.
        low = (self._firsts[near] - grid.origin_bytes) // grid.unit_bytes
        high = -((grid.origin_bytes - self._ends[near]) // grid.unit_bytes)
        starts = np.searchsorted(ascending, low)
        counts = np.maximum(np.searchsorted(ascending, high) - starts, 0)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return order[np.repeat(starts, counts) + within], np.repeat(self._owners[near], counts)

    def _drop_retired(self) -> None:
        retired = self._steps.retired_through
        if not self._unretired or self._unretired[0][0] > retired:
            return
        while self._unretired and self._unretired[0][0] <= retired:
            self._drop(heappop(self._unretired)[1])
        self._tidy()

    def _drop(self, number: int) -> None:
        fence = self.open_fences.pop(number)
        self._steering_count -= _steers(fence)
        self.transfer_count -= isinstance(fence.signal, NetworkTransfer)
        self._kinds[number] = _OVER

    def _tidy(self) -> None:
        """Make the arrays anew once most of their entries are over."""
        if self._number_count > 2 * len(self.open_fences) + _FEW:
            fences = tuple(self.open_fences.values())
            self._reset()
            for fence in fences:
                self.add(fence)


def byte_ranges(grid: UnitGrid, pages: IntArray) -> tuple[IntArray, IntArray]:
    """The bytes of `pages` as ascending ranges, neighbours joined: where each begins, and where it ends."""
    pages = np.sort(pages)
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    last = np.append(starts[1:], len(pages)) - 1
    return (
        grid.origin_bytes + pages[starts] * grid.unit_bytes,
        grid.origin_bytes + (pages[last] + 1) * grid.unit_bytes,
    )


def _steers(fence: Fence) -> bool:
    return not isinstance(fence.signal, HostCopy)


def _with_room(array: npt.NDArray[np.signedinteger], used: int, more: int) -> npt.NDArray[np.signedinteger]:
    """The array, or a larger one with its first `used` entries, with room for `more` behind them."""
    if used + more <= len(array):
        return array
    larger = np.zeros(max(2 * len(array), used + more), array.dtype)
    larger[:used] = array[:used]
    return larger
