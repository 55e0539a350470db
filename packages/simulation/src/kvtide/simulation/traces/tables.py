"""What a chain binds, and how it changes call by call: so that of two tables that differ the first units can be named.

A state tells tables by a digest; a line tells which entries its call has changed. Adding up those of all lines so far gives a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain as joined
from typing import NamedTuple, TypeAlias

import numpy as np

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.simulation.traces.trace_format import Rebound, TraceLine

Tables: TypeAlias = Mapping[str, IntArray]
"""Band → physical unit of every virtual one."""


class UnitDifference(NamedTuple):
    """A virtual unit that two lives bind otherwise."""

    band: str
    """Of the chain."""

    virtual: int
    """(Sub-)page or slot."""

    first: int | None
    """The physical unit that the first binds it to, None for none."""

    second: int | None
    """The second."""


class TableChanges:
    """What each call changes in an implementation's tables."""

    def __init__(self, tables: Tables) -> None:
        """With nothing bound: what an entry reads as now is None from here on."""
        self._unbound = self._last = tables

    def since_last(self, tables: Tables) -> Rebound:
        """Entries that have changed since they were last told."""
        found = {}
        for name, table in tables.items():
            changed = np.flatnonzero(table != self._last[name])
            if len(changed):
                is_bound = (table[changed] != self._unbound[name][changed]).tolist()
                entries = zip(changed.tolist(), table[changed].tolist(), is_bound, strict=True)
                found[name] = [[virtual, unit if bound else None] for virtual, unit, bound in entries]
        self._last = tables
        return found


def tables_of(chain: ChainAllocator) -> Tables:
    """Of every band."""
    layout = chain.layout
    return {
        band.name: chain.physical_units(band.name, np.arange(layout.id_count(band))).astype(np.int64)
        for band in layout.bands
    }


def units_that_differ(first: Sequence[TraceLine], second: Sequence[TraceLine]) -> Iterator[UnitDifference]:
    """Virtual units that two lives bind otherwise behind these lines, in the order of bands; none where one does not tell."""
    if not all(any(line.rebound for line in lines) for lines in (first, second)):
        return
    one, other = _bound_behind(first), _bound_behind(second)
    for band in dict.fromkeys(joined(one, other)):
        entries, others = one.get(band, {}), other.get(band, {})
        for virtual in sorted(entries.keys() | others.keys()):
            if entries.get(virtual) != others.get(virtual):
                yield UnitDifference(band, virtual, entries.get(virtual), others.get(virtual))


def _bound_behind(lines: Sequence[TraceLine]) -> dict[str, dict[int, int | None]]:
    found: dict[str, dict[int, int | None]] = {}
    for line in lines:
        for band, entries in line.rebound.items():
            found.setdefault(band, {}).update(
                (virtual, unit) for virtual, unit in entries if virtual is not None
            )
    return found
