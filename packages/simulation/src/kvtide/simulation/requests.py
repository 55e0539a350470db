"""The simulated scheduler's requests, and the batch that its next forward will run."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from kvtide.chain import Taken
from kvtide.device import IntArray
from kvtide.simulation.bands import SimulatedBand
from kvtide.simulation.shadow import Shadow


@attrs.define(eq=False)
class Request:
    """One request, in one row of the request table."""

    number: int
    """Ordinal of its admission."""

    row: int
    """Its line in the request table."""

    length: int = 0
    """Tokens that forwards were launched for."""

    pages: IntArray = attrs.field(factory=lambda: np.empty(0, np.int64))
    """Virtual pages by column; 0 where one has returned to the chain."""

    state_slots: list[int] = attrs.field(factory=list)
    """Virtual state slots: the running one, then those kept at checkpoints."""

    def sub_pages(self, band: SimulatedBand) -> IntArray:
        """Virtual units of every column in one attention band, bound or not, by position."""
        return band.sub_pages(self.pages)

    def bound(self, band: SimulatedBand, shadow: Shadow) -> IntArray:
        """Virtual units it holds in one band."""
        units = np.array(self.state_slots, np.int64) if band.is_state else self.sub_pages(band)
        return units[shadow.bound[band.name][units]]


@attrs.frozen(eq=False)
class BatchEntry:
    """One request's part in the next forward."""

    request: Request
    """Whose."""

    start: int
    """First token it writes."""

    end: int
    """One past the last; `start` where it writes none."""

    written_slots: tuple[int, ...] = ()
    """State slots it writes beside the running one."""


@attrs.frozen(eq=False)
class BatchTake:
    """A take made for the next forward."""

    taken: tuple[Taken, ...]
    """One a rank."""

    promised: Mapping[str, IntArray]
    """Band → virtual units that the forward writes whole, and that are not zeroed until it is known not to."""

    def renamed(self, band: str, sources: IntArray, targets: IntArray) -> BatchTake:
        """With what `sources` named called `targets`."""
        if band not in self.promised:
            return self
        promised = {**self.promised, band: renamed(self.promised[band], sources, targets)}
        return attrs.evolve(self, promised=promised)


@attrs.define(eq=False)
class Batch:
    """What the next forward will run; empty when nothing is prepared."""

    entries: list[BatchEntry] = attrs.field(factory=list)
    """One a request."""

    takes: list[BatchTake] = attrs.field(factory=list)
    """Takes whose debts are open."""

    def entry_of(self, request: Request) -> BatchEntry | None:
        """The request's part, if it has one."""
        return next((entry for entry in self.entries if entry.request is request), None)

    def __contains__(self, request: Request) -> bool:
        return self.entry_of(request) is not None

    def put(self, request: Request, start: int, end: int, slots: tuple[int, ...]) -> None:
        """Let the request write tokens `[start, end)`, which include those that it had, and `slots` beside those that it had."""
        before = self.entry_of(request)
        if before is not None:
            self.entries.remove(before)
            slots = before.written_slots + slots
        self.entries.append(BatchEntry(request, start, end, slots))

    def drop(self, request: Request) -> None:
        """Leave a request out, whose units were freed."""
        self.entries = [entry for entry in self.entries if entry.request is not request]


def renamed(units: IntArray, sources: IntArray, targets: IntArray) -> IntArray:
    """Units, with those of `sources` called by the targets in the same places."""
    names = dict(zip(sources.tolist(), targets.tolist(), strict=True))
    return np.array([names.get(unit, unit) for unit in units.tolist()], np.int64)
