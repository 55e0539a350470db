"""One ordering rule switched off at run time, to see that it is needed: `kvtide demo --break RULE`.

| rule | what is left out |
| - | - |
| `barrier` | the schedule stream's wait for the read end of the newest forward (K4) |
| `clearance` | its waits for forwards before it writes pages that they may still read (L3, L5) |
| `zeroing` | zeroing of pages and state slots on hand-out (A5) |
| `translate` | the upload of ids that a move has changed, so that forwards go on where a page lay (K3) |

All of them are things that the device is told. So the rule is broken below the storage, which goes on believing that it holds. The
timing is the worst that a device may choose: the schedule stream is never busy, a forward's metadata phase runs at once, and its
layers when the host waits for them. So is what becomes of bytes that the rules call free: `spoil_free_bytes` makes NaN of them, as
the next owner's writes might.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.arena import KVArena
from kvtide.device import ByteSpan, Event, IntArray, Mirror, RunningWork, Stream, UnitGrid
from kvtide.engine.forwards import ForwardQueue, LaunchedForward
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.storage import KVStorage, PreparedStep, SharedReadEnds


class Rule(enum.Enum):
    """What can be switched off."""

    BARRIER = "barrier"
    ZEROING = "zeroing"
    CLEARANCE = "clearance"
    TRANSLATE = "translate"


class BrokenDevice(ModelledTensorDevice):
    """A modelled device that leaves something out. Races are kept in `model.races`, and work goes on."""

    def __init__(self, arena: KVArena, rule: Rule | None) -> None:
        """As `ModelledTensorDevice`, without `rule`; with `None` only the timing is the worst, and everything is right."""
        super().__init__(arena, raise_races=False)
        self._rule = rule
        self._forward_has_just_ended = False
        self._barrier_event: Event | None = None
        self._has_uploaded = False

    def submit(
        self,
        name: str,
        *,
        reads: Sequence[ByteSpan] = (),
        writes: Sequence[ByteSpan] = (),
        run: Callable[[], None],
    ) -> None:
        """See `ModelledTensorDevice.submit`."""
        super().submit(name, reads=reads, writes=writes, run=run)
        if name.startswith("metadata"):
            self.model.run_until(self.model.record_event(self.forward_stream))

    def record_event(self, stream: Stream) -> Event:
        """See `Device.record_event`."""
        self._forward_has_just_ended = stream is self.forward_stream
        return super().record_event(stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See `Device.wait_event`; some waits of the schedule stream for forwards are left out."""
        # The barrier follows the event of the forward that it stands behind; what clearance asks for comes at other times.
        is_barrier, self._forward_has_just_ended = self._forward_has_just_ended, False
        if stream is self.schedule_stream and event.stream is self.forward_stream:
            if is_barrier:
                self._barrier_event = event
            # Behind the barrier, another wait for its event would change nothing, so it stands for no wait of clearance.
            left_out = Rule.BARRIER if event is self._barrier_event else Rule.CLEARANCE
            if self._rule is left_out:
                return
        super().wait_event(stream, event)

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """See `Device.copy_units`."""
        super().copy_units(stream, grid, sources, targets)
        self._run_ahead()

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """See `Device.zero_units`; the sinks, and what else is zeroed before the first upload, are."""
        if self._rule is not Rule.ZEROING or not self._has_uploaded:
            super().zero_units(stream, grid, units)
            self._run_ahead()

    def upload(self, stream: Stream) -> int:
        """See `Device.upload`."""
        self._has_uploaded = True
        count = super().upload(stream)
        self._run_ahead()
        return count

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """See `Device.create_mirrors`."""
        mirrors = super().create_mirrors(lengths)
        if self._rule is not Rule.TRANSLATE:
            return mirrors
        return {
            name: MirrorWithoutMoves(mirror) if name.startswith("ids:") else mirror
            for name, mirror in mirrors.items()
        }

    def spoil_free_bytes(self, storage: KVStorage) -> None:
        """Fill with 0xFF, NaN in every float type, what belongs to no live unit of `storage` and to no sink.

        Forwards in flight may still read some of it, so this waits for them; unless the rule that is broken is this very wait, or the
        barrier, which has made the schedule stream wait for them if no backend declares its read end.
        """
        if self._rule not in {Rule.CLEARANCE, Rule.BARRIER}:
            super().wait_event(self.schedule_stream, super().record_event(self.forward_stream))
        layout = storage.layout
        is_owned = np.zeros(layout.arena_bytes, np.bool_)
        is_owned[: layout.prefix_bytes] = True
        for band in layout.bands:
            starts = band.origin_bytes + storage.chain.live_units(band.name) * band.unit_bytes
            is_owned[(starts[:, None] + np.arange(band.unit_bytes)).ravel()] = True
        edges = np.flatnonzero(np.diff(is_owned, prepend=True, append=True)).reshape(-1, 2)
        spans = [self.model.arena_buffer.span(start, end) for start, end in edges.tolist()]

        def fill(work: RunningWork) -> None:
            for span in spans:
                work.write(span, 0xFF)

        self.model.submit(self.model.schedule_stream, "another owner's write", writes=spans, run=fill)
        self._run_ahead()

    def _run_ahead(self) -> None:
        """Run what the schedule stream can run."""
        while self.model.run_next(self.schedule_stream):
            pass


class SpoilingForwards:
    """A queue before each of whose forwards free bytes turn to NaN, once the moves and takes for it have been told to the device."""

    def __init__(self, queue: ForwardQueue, storage: KVStorage) -> None:
        """In front of `queue`; the device of `storage` is a `BrokenDevice`."""
        assert isinstance(storage.device, BrokenDevice), "other devices keep free bytes as they are"
        self._queue = queue
        self._storage = storage
        self._device = storage.device

    def launch(self, forward: LaunchedForward, step: PreparedStep) -> SharedReadEnds | None:
        """See `ForwardQueue.launch`."""
        self._device.spoil_free_bytes(self._storage)
        return self._queue.launch(forward, step)


class MirrorWithoutMoves:
    """A mirror that learns what a free id is bound to, and not where a bound one has moved."""

    def __init__(self, mirror: Mirror) -> None:
        """Over `mirror`."""
        self._mirror = mirror
        self._known: npt.NDArray[np.int64] = np.zeros(mirror.length, np.int64)

    @property
    def length(self) -> int:
        """See `Mirror.length`."""
        return self._mirror.length

    def stage(self, indices: IntArray, values: IntArray) -> None:
        """See `Mirror.stage`."""
        # An unbound page is 0, the sink; an unbound slot is −1.
        is_told = (self._known[indices] <= 0) | (np.asarray(values) <= 0)
        self._known[indices[is_told]] = values[is_told]
        self._mirror.stage(indices[is_told], values[is_told])
