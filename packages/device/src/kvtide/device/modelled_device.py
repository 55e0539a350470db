"""A device on which time is a choice, for testing whatever schedules work on a device (rows V2, V3).

    device call  ──►  noted: who touches which bytes, behind what     a race is found here, whatever the timing
                 └─►  queued on its stream                            bytes change when the test, or a seed, runs it

Two accesses to the same bytes, one of them writing, must be ordered by something: one stream, an event that is waited for, or
a host that waited. Nothing else orders them, not the order of the calls and not luck; what is left unordered is reported by
name. Work is run late, so what is missing a wait computes wrong bytes as well. `modelled_order` says what orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.device.byte_spans import Buffer, ByteArray, ByteSpan
from kvtide.device.modelled_order import ModelledOrder
from kvtide.device.modelled_streams import Entry, ModelledEvent, ModelledStream
from kvtide.device.protocols import IntArray, Mirror, Stream, UnitGrid
from kvtide.device.race_watch import RaceWatch
from kvtide.device.races import Race
from kvtide.device.running_work import RunningWork, check_copy_order, fill_span
from kvtide.device.staging_ring import StagingRing
from kvtide.device.vector_clocks import Clock, Work, join
from kvtide.device.watched_mirrors import WatchedMirrors


class ModelledDevice(ModelledOrder):
    """See the module's docstring; implements `kvtide.device.Device`.

    Without a seed nothing runs until it is told to: `run_next`, `run_until`, `run_all`, or a host wait, which runs what it
    needs. With a seed, some work also runs by itself between calls, and the same calls run it alike.
    """

    def __init__(
        self,
        arena_bytes: int,
        *,
        seed: int | None = None,
        random_queries: bool = False,
        raise_races: bool = True,
        name_units: Callable[[UnitGrid, int, int], str] | None = None,
        memory: ByteArray | None = None,
    ) -> None:
        """A device with an arena and the streams "schedule" and "forward".

        Args:
            arena_bytes: bytes of the arena, filled with 0xFF, a NaN in every float type.
            seed: draws an interleaving; by default work runs only when told.
            random_queries: `query_event` answers by the toss of a coin where both answers are possible. A yes is made true
                first: what the event needs is run. Asks for a seed.
            raise_races: raise `UnorderedAccessError` from the call that finds a race; otherwise only keep it in `races`.
            name_units: words for units `[first, end)` of a grid, for reports: "band 'window-128' pages [4, 7)".
            memory: bytes to use as the arena instead of its own, say those of a tensor.
        """
        super().__init__(seed=seed, random_queries=random_queries)
        if memory is not None and len(memory) != arena_bytes:
            raise ValueError(f"an arena of {arena_bytes} bytes cannot use memory of {len(memory)}")
        self.arena_bytes = arena_bytes
        self._watch = RaceWatch(name_units=name_units, raise_races=raise_races)
        self._undiscovered = 0
        self.arena_buffer = Buffer(
            "the arena", np.full(arena_bytes, 0xFF, np.uint8) if memory is None else memory
        )
        """The arena, to declare spans of."""
        self._mirrors = WatchedMirrors()
        self._staging = StagingRing(self.create_buffer, self.host_has_seen)
        self._upload_count = 0

    # ── what stands where ──

    @property
    def arena(self) -> ByteArray:
        """The arena's bytes as they are now, a view; nobody is asked whether work on them is over."""
        self._refuse("read the arena")
        return self.arena_buffer.bytes

    @property
    def tables(self) -> dict[str, npt.NDArray[np.int32]]:
        """The mirrors as they are now, by name; views, as `arena`."""
        self._refuse("read the mirrors")
        return self._mirrors.tables()

    @property
    def races(self) -> tuple[Race, ...]:
        """Every race found so far, in the order found."""
        return tuple(self._watch.races)

    @property
    def staging_buffer_count(self) -> int:
        """Staging buffers there are; the ring grows when all are in use."""
        return self._staging.buffer_count

    def units(self, grid: UnitGrid) -> ByteArray:
        """The arena as `[unit_count, unit_bytes]` on `grid`; a view, as `arena`."""
        count = grid.unit_count(self.arena_bytes)
        end_byte = grid.origin_bytes + count * grid.unit_bytes
        return self.arena[grid.origin_bytes : end_byte].reshape(count, grid.unit_bytes)

    def unit_spans(self, grid: UnitGrid, units: IntArray) -> tuple[ByteSpan, ...]:
        """Spans of units of the arena, to declare as reads or writes; `IndexError` for a unit outside it."""
        return self.arena_buffer.units(grid, units)

    def mirror_span(self, name: str, first_entry: int = 0, end_entry: int | None = None) -> ByteSpan:
        """Entries `[first_entry, end_entry)` of a mirror, to declare as read; all of them by default."""
        return self._mirrors.span(name, first_entry, end_entry)

    def create_buffer(self, name: str, byte_count: int) -> Buffer:
        """More watched bytes, zero-filled: a host pool, a peer's memory."""
        return Buffer(name, np.zeros(byte_count, np.uint8))

    def allow_unordered(self, span: ByteSpan) -> None:
        """Report nothing about these bytes: a sink, which padded rows of any forward write and nobody's result depends on."""
        self._watch.ignore(span)

    # ── work ──

    def submit(
        self,
        stream: Stream,
        name: str,
        *,
        reads: Sequence[ByteSpan] = (),
        writes: Sequence[ByteSpan] = (),
        run: Callable[[RunningWork], None] | None = None,
        discovers: bool = False,
    ) -> None:
        """Queue work on a stream.

        Args:
            stream: where.
            name: who, for reports: "forward 12".
            reads: bytes it reads.
            writes: bytes it writes; bytes that it reads first stand in both.
            run: what it does when its turn comes; without it, it only counts as having touched the bytes.
            discovers: it may touch more than it declared, say pages whose ids it reads from a mirror. Those accesses are
                checked when it runs; without this they raise `UndeclaredAccessError`.

        Raises:
            UnorderedAccessError: see `raise_races`; the work is queued all the same.
        """
        own = self._own(stream)
        self._let_time_pass()
        own.clock = join(own.clock, self._timelines.host_clock)
        work = self._timelines.work(name, own.timeline, own.clock)
        self._queue(own, work, reads, writes, run, discovers=discovers)
        self._watch.note(work, reads, writes, self._floor())

    def start_transfer(
        self,
        name: str,
        *,
        reads: Sequence[ByteSpan] = (),
        writes: Sequence[ByteSpan] = (),
        run: Callable[[RunningWork], None] | None = None,
        engine: str = "network",
    ) -> ModelledEvent:
        """Start work outside every stream, such as a network transfer; the event is its end.

        It begins whenever it likes from now on, behind only what the host has seen. The event's stream is named `engine`.
        """
        self._let_time_pass()
        stream = self._open_transfer(engine)
        work = self._timelines.work(name, stream.timeline, stream.clock)
        self._queue(stream, work, reads, writes, run, discovers=False)
        event = self._end_transfer(stream)
        self._watch.note(work, reads, writes, self._floor())
        return event

    def copy_spans(
        self, stream: Stream, name: str, sources: Sequence[ByteSpan], targets: Sequence[ByteSpan]
    ) -> None:
        """Queue one copy of each source to its target, of just as many bytes, say to a host pool."""
        if [source.byte_count for source in sources] != [target.byte_count for target in targets]:
            raise ValueError(f"{name}: each target must have as many bytes as its source")

        def copy(work: RunningWork) -> None:
            contents = [work.read(source) for source in sources]
            for target, values in zip(targets, contents, strict=True):
                work.write(target, values)

        self.submit(stream, name, reads=sources, writes=targets, run=copy)

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """See `Device.copy_units`; a later source that is an earlier target, or a target twice, raises `ValueError`."""
        grid.check_pairs(self.arena_bytes, sources, targets)
        reads, writes = self.unit_spans(grid, sources), self.unit_spans(grid, targets)
        check_copy_order(sources, targets)
        sources, targets = sources.copy(), targets.copy()
        units = self.arena_buffer.bytes[grid.origin_bytes :]
        units = units[: grid.unit_count(self.arena_bytes) * grid.unit_bytes].reshape(-1, grid.unit_bytes)

        def copy(_: RunningWork) -> None:
            units[targets] = units[sources]

        self.submit(stream, "move", reads=reads, writes=writes, run=copy)

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """See `Device.zero_units`."""
        spans = self.unit_spans(grid, units)

        def zero(_: RunningWork) -> None:
            for span in spans:
                fill_span(span, 0)

        self.submit(stream, "zeroing", writes=spans, run=zero)

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """See `Device.create_mirrors`."""
        return self._mirrors.create(lengths)

    def upload(self, stream: Stream) -> int:
        """See `Device.upload`. The host fills a staging buffer now; the stream reads it, and writes the mirrors, later.

        A buffer is filled again once the host has seen the end of its upload, or was told so by `return_staging`.
        """
        batch = self._mirrors.drain()
        if batch is None:
            return 0
        name = f"upload {self._upload_count}"
        self._upload_count += 1
        slot = self._staging.take(batch.staged.nbytes)
        source = slot.buffer.span(0, batch.staged.nbytes)
        try:
            self.write_on_host(source, batch.staged, name=f"staging for {name}")
        finally:
            run = self._mirrors.writer(source)
            self.submit(stream, name, reads=(source,), writes=batch.targets, run=run)
            slot.event = self.record_event(stream)
        return len(batch.staged)

    def return_staging(self) -> None:
        """The caller knows that every upload so far is over: their staging buffers may be filled again.

        A device that is told so too early reports the next upload, and uploads wrong values.
        """
        self._staging.return_all()

    # ── the host's own hands ──

    def read_on_host(self, span: ByteSpan, *, name: str = "the host") -> ByteArray:
        """A copy of watched bytes; a race unless the host has seen the end of whatever writes them."""
        self._refuse(f"read {span.buffer.name}")
        self._note_host(name, reads=(span,))
        return span.buffer.bytes[span.start_byte : span.end_byte].copy()

    def write_on_host(
        self, span: ByteSpan, values: npt.NDArray[np.generic] | int, *, name: str = "the host"
    ) -> None:
        """Fill watched bytes, as `RunningWork.write`; a race unless the host has seen the end of whatever touches them."""
        fill_span(span, values)
        self._note_host(name, writes=(span,))

    # ── helpers ──

    def _queue(
        self,
        stream: ModelledStream,
        work: Work,
        reads: Sequence[ByteSpan],
        writes: Sequence[ByteSpan],
        run: Callable[[RunningWork], None] | None,
        *,
        discovers: bool,
    ) -> None:
        if run is None:
            self._queues.queue(stream, Entry(work))
            return

        def note_late(span: ByteSpan, is_write: bool) -> None:
            spans = (span,)
            self._watch.note(work, () if is_write else spans, spans if is_write else (), (), is_late=True)

        running = RunningWork(work.name, reads, writes, note_late if discovers else None)

        def run_it() -> None:
            try:
                run(running)
            finally:
                self._undiscovered -= discovers

        self._undiscovered += discovers
        self._queues.queue(stream, Entry(work, run_it))

    def _floor(self) -> Clock:
        """Behind every access to come: what the host has seen, or nothing while queued work may still touch old bytes."""
        return () if self._undiscovered else self._timelines.host_clock

    def _note_host(
        self, name: str, *, reads: Sequence[ByteSpan] = (), writes: Sequence[ByteSpan] = ()
    ) -> None:
        self._watch.note(self._timelines.host_work(name), reads, writes, self._floor())
