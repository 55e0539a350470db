"""Notes every access to every buffer and says which of them nothing orders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

import attrs

from kvtide.device.byte_history import Access, AccessStep, ByteHistory
from kvtide.device.byte_spans import Buffer, ByteSpan
from kvtide.device.protocols import UnitGrid
from kvtide.device.races import Race, RacingAccess, UnorderedAccessError
from kvtide.device.vector_clocks import Clock, Work


@attrs.define(eq=False)
class _Watched:
    """What is known of one buffer."""

    history: ByteHistory
    sinks: list[tuple[int, int]] = attrs.field(factory=list)


class RaceWatch:
    """See the module's docstring."""

    def __init__(self, *, name_units: Callable[[UnitGrid, int, int], str] | None, raise_races: bool) -> None:
        """`name_units(grid, first_unit, end_unit)` words a report; races are kept, and raised too if told so."""
        self.races: list[Race] = []
        """Everything found, in the order it was found."""
        self._name_units = name_units
        self._raise_races = raise_races
        self._watched: WeakKeyDictionary[Buffer, _Watched] = WeakKeyDictionary()

    def ignore(self, span: ByteSpan) -> None:
        """Take no note of accesses to `span` from now on: a sink, which anybody may write."""
        self._of(span.buffer).sinks.append((span.start_byte, span.end_byte))

    def note(
        self,
        work: Work,
        reads: Iterable[ByteSpan],
        writes: Iterable[ByteSpan],
        floor: Clock,
        *,
        is_late: bool = False,
    ) -> None:
        """Note what `work` touches; keeps the races that this shows, and raises `UnorderedAccessError` if told so.

        Every access is noted before anything is raised. `floor` as in `AccessStep`.
        """
        found: list[Race] = []
        for spans, is_write in ((reads, False), (writes, True)):
            steps: dict[UnitGrid | None, AccessStep] = {}
            for span in spans:
                step = steps.get(span.grid)
                if step is None:
                    access = Access(work, is_write, span.grid, is_late)
                    step = steps[span.grid] = AccessStep(access, floor)
                watched = self._of(span.buffer)
                for start, end in _outside(span.start_byte, span.end_byte, watched.sinks):
                    collisions = watched.history.note(step, start, end)
                    if collisions:
                        runs: dict[Access, list[list[int]]] = {}
                        for collision in collisions:
                            pieces = runs.setdefault(collision.other, [])
                            if pieces and pieces[-1][1] == collision.start_byte:
                                pieces[-1][1] = collision.end_byte
                            else:
                                pieces.append([collision.start_byte, collision.end_byte])
                        found += self._races(step.access, span.buffer, runs)
        self.races += found
        if found and self._raise_races:
            raise UnorderedAccessError(found)

    def _of(self, buffer: Buffer) -> _Watched:
        watched = self._watched.get(buffer)
        if watched is None:
            watched = self._watched[buffer] = _Watched(ByteHistory(len(buffer.bytes)))
        return watched

    def _races(self, access: Access, buffer: Buffer, runs: dict[Access, list[list[int]]]) -> list[Race]:
        return [
            Race(
                first=self._side(other, buffer, start, end),
                second=self._side(access, buffer, start, end),
                buffer=buffer.name,
                start_byte=start,
                end_byte=end,
            )
            for other, pieces in runs.items()
            for start, end in pieces
        ]

    def _side(self, access: Access, buffer: Buffer, start: int, end: int) -> RacingAccess:
        return RacingAccess(access.work.name, access.is_write, self._place(access.grid, buffer, start, end))

    def _place(self, grid: UnitGrid | None, buffer: Buffer, start: int, end: int) -> str | None:
        if grid is None:
            return None if buffer.name_bytes is None else buffer.name_bytes(start, end)
        first_unit = (start - grid.origin_bytes) // grid.unit_bytes
        end_unit = -((grid.origin_bytes - end) // grid.unit_bytes)
        if self._name_units is not None:
            return self._name_units(grid, first_unit, end_unit)
        return f"units [{first_unit}, {end_unit}) of {grid.unit_bytes} bytes"


def _outside(start: int, end: int, holes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of `[start, end)` that lie in no hole."""
    for hole_start, hole_end in sorted(holes):
        if hole_end <= start or hole_start >= end:
            continue
        if start < hole_start:
            yield start, hole_start
        start = hole_end
    if start < end:
        yield start, end
