"""A device that does at once what it is told, and knows who is ordered behind whom.

Every piece of work has a number; a set of works is the bits of an integer. A stream, the host and an event are each a set: the
works that lie behind whatever comes next there (`kvtide.device.ModelledDevice` keeps the same as vector clocks). Who touches bytes
must have in its set whoever touched them before, if one of the two writes; nothing else orders them. Where no access is
unordered, every timing gives what the order of the calls gives, so the contents that the calls leave are those of every timing.

Bytes are looked at in cells of 16, of which units are made. A cell's contents are whose it is: a number that the world chooses.
A clone costs a few short lists, and `signature` tells two devices apart only where some later access could.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from kvtide.device import Event, IntArray, Mirror, Stream, UnitGrid
from kvtide.simulation.failures import CheckFailedError

CELL_BYTES = 16
"""Unit bytes and origins are multiples of it."""

ZERO = 0
"""Contents of a cell that was zeroed."""

NOBODYS = -1
"""Contents of a cell that no unit in use covers: whatever its last tenant left, which nobody may read."""


@attrs.frozen
class OrderedStream:
    """A queue of work in order."""

    name: str
    """For reports."""


@attrs.frozen(eq=False)
class OrderedEvent:
    """A point in one stream; equal to itself only."""

    stream: OrderedStream
    """Where it was recorded."""

    behind: int
    """Works that are over when it is reached."""


@attrs.frozen
class UnseenMirror:
    """A mirror that nobody reads: the search's forwards are told where their units are."""

    length: int
    """Entries."""

    def stage(self, indices: IntArray, values: IntArray) -> None:
        """Nothing to keep."""


SCHEDULE = OrderedStream("schedule")
"""Where the allocator's work runs."""

FORWARD = OrderedStream("forward")
"""Where forwards run."""

COPIES = OrderedStream("copies")
"""Where host copies run."""

NETWORK = OrderedStream("network")
"""Where transfers run, outside every stream."""


class OrderedDevice:
    """See the module's docstring; implements `kvtide.device.Device`."""

    schedule_stream = SCHEDULE
    forward_stream = FORWARD

    def __init__(self, arena_bytes: int, prefix_bytes: int) -> None:
        """Bytes that nobody has touched; the prefix is left out, its sinks are written by anybody."""
        self.arena_bytes = arena_bytes
        self.host = 0
        """Works whose end the host has seen."""
        self.queued = 0
        """Work on a stream since it was last 0: whether a call did anything."""
        self.contents = [NOBODYS] * (arena_bytes // CELL_BYTES)
        """Whose each cell is."""
        self._prefix_cells = prefix_bytes // CELL_BYTES
        self._behind = {SCHEDULE: 0, FORWARD: 0}
        self._names: list[str] = []
        self._readers = [0] * (arena_bytes // CELL_BYTES)
        self._writers = [0] * (arena_bytes // CELL_BYTES)

    def clone(self) -> OrderedDevice:
        """The same bytes and order, which go their own way."""
        clone = object.__new__(OrderedDevice)
        clone.arena_bytes, clone.host, clone.queued = self.arena_bytes, self.host, self.queued
        clone.contents = self.contents.copy()
        clone._prefix_cells = self._prefix_cells
        clone._behind, clone._names = self._behind.copy(), self._names.copy()
        clone._readers, clone._writers = self._readers.copy(), self._writers.copy()
        return clone

    # ── the seam ──

    def record_event(self, stream: Stream) -> OrderedEvent:
        """See `Device.record_event`."""
        own = _own(stream)
        return OrderedEvent(own, self._behind[own] | self.host)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See `Device.wait_event`."""
        assert isinstance(event, OrderedEvent), "an event of another device"
        self._behind[_own(stream)] |= event.behind
        self.queued += 1

    def query_event(self, event: Event) -> bool:
        """No: whoever needs the event waits for it, so that no order is left to luck."""
        return False

    def wait_on_host(self, event: Event) -> None:
        """Nobody may, inside an allocator operation."""
        raise CheckFailedError(
            "host_read_after_wait", "an allocator operation waits for an event on the host"
        )

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """See `Device.copy_units`."""
        own, cells = _own(stream), grid.unit_bytes // CELL_BYTES
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            reads, writes = cells_of(grid, source), cells_of(grid, target)
            self.work(own, f"the move of bytes {reads.start * CELL_BYTES}", reads, writes)
            self.contents[writes.start : writes.stop] = self.contents[reads.start : reads.start + cells]

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """See `Device.zero_units`."""
        for unit in units.tolist():
            writes = cells_of(grid, unit)
            self.work(_own(stream), "zeroing", (), writes)
            self.contents[writes.start : writes.stop] = [ZERO] * len(writes)

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """See `Device.create_mirrors`."""
        return {name: UnseenMirror(length) for name, length in lengths.items()}

    def upload(self, stream: Stream) -> int:
        """Nothing to bring up to date."""
        return 0

    # ── work of others ──

    def behind(self, stream: OrderedStream) -> int:
        """Works that lie behind what is queued on a stream next; behind a transfer only what the host has seen."""
        return self._behind.get(stream, 0) | self.host

    def work(
        self,
        stream: OrderedStream,
        name: str,
        reads: Iterable[int],
        writes: Iterable[int],
        *,
        behind: int = 0,
    ) -> OrderedEvent:
        """One more work that touches cells, behind what its stream and `behind` say; the event of its end.

        Raises `CheckFailedError` for bytes that it touches unordered.
        """
        behind |= self.behind(stream)
        own = 1 << len(self._names)
        self._names.append(name)
        self.queued += 1
        readers, writers = self._readers, self._writers
        for cell in reads:
            if writers[cell] & ~behind:
                self._race(name, "reads", cell, writers[cell] & ~behind, "writing")
            readers[cell] |= own
        for cell in writes:
            if cell < self._prefix_cells:
                continue
            if writers[cell] & ~behind & ~own:
                self._race(name, "writes", cell, writers[cell] & ~behind, "writing")
            if readers[cell] & ~behind & ~own:
                self._race(name, "writes", cell, readers[cell] & ~behind & ~own, "reading")
            writers[cell] |= own
        if stream in self._behind:
            self._behind[stream] = behind | own
        return OrderedEvent(stream, behind | own)

    def order_behind(self, stream: OrderedStream, behind: int) -> None:
        """What is queued on a stream from now on lies behind these works."""
        self._behind[stream] |= behind

    def writers_of(self, cells: Iterable[int]) -> int:
        """Works that have written any of the cells."""
        found = 0
        for cell in cells:
            found |= self._writers[cell]
        return found

    def signature(self, events: Sequence[int]) -> tuple[object, ...]:
        """What later accesses can tell of the past; `events` are the sets of all events that may still be waited for.

        Works matter by who lies behind them, the forward stream and the events, and by the cells they touched; not by number, name
        or order. Those the host has seen lie behind everything that is still to come. So do those behind the schedule stream:
        every forward, copy and gate is ordered behind it.
        """
        over = self.host | self._behind[SCHEDULE]
        live = 0
        for cell in self._readers:
            live |= cell
        for cell in self._writers:
            live |= cell
        live &= ~over
        if not live:
            return ()
        sets = (self._behind[FORWARD], *events)
        classes: dict[int, int] = {}
        while live:
            work = live & -live
            live ^= work
            number = 0
            for place, behind in enumerate(sets):
                if behind & work:
                    number |= 1 << place
            classes[number] = classes.get(number, 0) | work
        kinds = sorted(classes)
        return tuple(
            (
                kind,
                sum(1 << cell for cell, works in enumerate(self._readers) if works & classes[kind]),
                sum(1 << cell for cell, works in enumerate(self._writers) if works & classes[kind]),
            )
            for kind in kinds
        )

    def _race(self, name: str, verb: str, cell: int, others: int, how: str) -> None:
        other = self._names[(others & -others).bit_length() - 1]
        start = cell * CELL_BYTES
        raise CheckFailedError(
            "unordered_overlap",
            f"{name} {verb} bytes [{start}, {start + CELL_BYTES}) unordered with {other} {how} them",
        )


def cells_of(grid: UnitGrid, unit: int) -> range:
    """Cells of one unit."""
    first = (grid.origin_bytes + unit * grid.unit_bytes) // CELL_BYTES
    return range(first, first + grid.unit_bytes // CELL_BYTES)


def _own(stream: Stream) -> OrderedStream:
    assert isinstance(stream, OrderedStream), "a stream of another device"
    return stream
