"""What rows have been promised: the books, and whether they can be kept (row K5).

Each row is *promised* its peak in every band on the day it is admitted: every full-attention page of input and output, the most
of each window that any chunking up to its chunk limit holds, its state slots. What it was promised and does not hold is
*outstanding*. The invariant, at every moment:

    units in use, less what a cache could evict, all that is outstanding, and window units that rows share, once
    for each row but one, can be laid out in the arena

It is asked of the chain as it is (`ChainAllocator.admits`), so pages that are fixed, sent or quarantined count where they lie. A take
of an admitted row uses what is outstanding; retiring a window returns it; a release ends both. None changes the sum, and fewer
units can always be laid out where more can, so *no take of an admitted row is refused*. Whoever adds to the sum asks first:
an admission, and under an overcommitting policy a further share of output. Virtual ids are as many as the smallest unit needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.ledger import InvariantError
from kvtide.plan import ArenaLayout
from kvtide.storage.evicting_takes import EvictingTakes
from kvtide.storage.row_units import RowUnits


class Promises:
    """By row and band. One owner: admission."""

    def __init__(
        self, layout: ArenaLayout, chain: ChainAllocator, takes: EvictingTakes, units: RowUnits
    ) -> None:
        """Nothing is promised."""
        self._layout = layout
        self._chain = chain
        self._takes = takes
        self._units = units
        self._promised: IntArray = np.zeros_like(units.counts)

    @property
    def promised_units(self) -> IntArray:
        """Units promised in all, in chain order: what is admitted at peak."""
        total: IntArray = self._promised.sum(axis=1)
        return total

    @property
    def outstanding_units(self) -> IntArray:
        """Units promised and not held, in chain order."""
        total: IntArray = np.maximum(self._promised - self._units.counts, 0).sum(axis=1)
        return total

    def of(self, rows: IntArray) -> IntArray:
        """Units of each row, `[bands, rows]`."""
        promised: IntArray = self._promised[:, rows]
        return promised

    def charge(self, rows: IntArray, units: IntArray) -> None:
        """From now on rows are promised `units [bands, rows]`, which fit."""
        self._promised[:, rows] = units

    def end(self, rows: IntArray) -> None:
        """Rows are over."""
        self._promised[:, rows] = 0

    def has_room(self, asked: IntArray) -> bool:
        """Whether so many units, in chain order, fit beside what is outstanding, all that is evictable being evicted."""
        with self._chain.capacity_decision("an admission"):
            units = (self.outstanding_units + asked).tolist()
            names = [band.name for band in self._layout.bands]
            return self._takes.has_room(
                {
                    name: count + self._takes.counted_on_again(name)
                    for name, count in zip(names, units, strict=True)
                }
            )

    def verify(self, rows: IntArray) -> None:
        """Raise `InvariantError` unless promises are those of `rows`, those in use, none holds more, and all can be kept.

        While units are fixed or under a transfer the last may fail for a time.
        """
        of_rows = self._promised[:, rows].sum(axis=1)
        if (of_rows != self.promised_units).any():
            raise InvariantError(
                "storage.promise_leak",
                f"{self.promised_units.tolist()} units are promised, the rows in use hold promises of {of_rows.tolist()}",
                "a row was closed without its promise",
            )
        over = rows[(self._units.counts[:, rows] > self._promised[:, rows]).any(axis=0)]
        if len(over):
            raise InvariantError(
                "storage.held_within_promise",
                f"rows {over.tolist()} hold {self._units.counts[:, over].tolist()} units, by band, of "
                f"{self._promised[:, over].tolist()} that they were promised",
                "a demand was priced too low, or a window was not retired",
            )
        if not self._chain.uses.bind_layout and not self.has_room(np.zeros(len(self._promised), np.int64)):
            raise InvariantError(
                "storage.promise_kept",
                f"{self.outstanding_units.tolist()} units are outstanding, more than can be laid out beside what is in use",
                "units were taken that nobody was promised, or a cache locked what it had offered",
            )

    # ── text ──

    def beside(self) -> str:
        """Text: what is in the way, each unit of it named once: promises, and what nobody in service holds."""
        text = (
            f"beside what is promised: admitted at peak are {self.by_band(self.promised_units)}, of which resident now "
            f"{self.by_band(self._units.counts.sum(axis=1))}"
        )
        cached, evictable = self._takes.held_units(), self._takes.evictable_units()
        if any(cached.values()):
            names = [band.name for band in self._layout.bands]
            text += (
                f"; a cache holds {self.by_band([cached.get(name, 0) for name in names])}, of which it could evict "
                f"{self.by_band([evictable.get(name, 0) for name in names])}"
            )
        withheld = [band.withheld_units for band in self._chain.statistics().bands]
        if any(withheld):
            text += f"; fixed, quarantined or under a transfer, and nobody's, are {self.by_band(withheld)}"
        return text

    def by_band(self, units: IntArray | Sequence[int]) -> str:
        """Text: units by the bands' names."""
        bands = self._layout.bands
        return ", ".join(f"{band.name!r} {count}" for band, count in zip(bands, units, strict=True))
