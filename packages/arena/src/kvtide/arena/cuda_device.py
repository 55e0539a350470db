"""The CUDA device: two streams of one GPU, fresh events, Triton programs (row V1).

The host queues and never waits: ids travel through pinned staging, each call as one copy and as few launches as its hazards
allow. It needs Triton, which the rest of the package does not.

What it holds beside the arena: scratch for moves that pass over themselves, mirrors, and the staging ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import torch

from kvtide.arena.copy_plan import copy_segments
from kvtide.arena.kernels import SCRATCH_BYTES
from kvtide.arena.memory import KVArena
from kvtide.arena.pinned_staging import Reached, StagingBuffer, StagingRing, staged_bytes
from kvtide.device import Event, IntArray, Mirror, MirrorStaging, Stream, UnitGrid


@attrs.frozen(eq=False)
class CUDAStream:
    """A named stream of the GPU; equal to itself only."""

    name: str
    """For logs."""

    torch_stream: torch.cuda.Stream
    """What torch calls it: queue forwards under `torch.cuda.stream(…)` of it."""


@attrs.frozen(eq=False)
class CUDAEvent:
    """A point in one stream, recorded when made; equal to itself only."""

    stream: CUDAStream
    """Where it was recorded."""

    torch_event: torch.cuda.Event
    """What torch calls it."""


class CUDADevice:
    """Implements `TensorDevice` over a `KVArena` in the memory of a GPU."""

    def __init__(
        self,
        arena: KVArena,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Drive `arena`, on streams of its GPU; forwards run on `forward_stream`, by default a new one.

        The host waits for the GPU once, here, so that whoever made the arena is through with it. Raises `ImportError` without
        Triton.
        """
        from kvtide.arena import triton_kernels  # noqa: PLC0415  # Triton is optional

        self._kernels = triton_kernels
        self.arena = arena
        """The bytes this device works on."""
        self.tables: dict[str, torch.Tensor] = {}
        """Mirrors by name, int32; at fixed addresses once created."""
        self._torch_device = arena.bytes.device
        self.schedule_stream = CUDAStream("schedule", _new_stream(self._torch_device))
        """See `Device.schedule_stream`."""
        self.forward_stream = CUDAStream(
            "forward",
            _new_stream(self._torch_device) if forward_stream is None else forward_stream,
        )
        """See `Device.forward_stream`."""
        self._scratch = torch.empty(scratch_bytes // 8, dtype=torch.int64, device=self._torch_device)
        self._staging = MirrorStaging()
        self._ring = StagingRing(self._create_buffer)
        self._flat = torch.zeros(0, dtype=torch.int32, device=self._torch_device)
        torch.cuda.synchronize(self._torch_device)

    @property
    def arena_bytes(self) -> int:
        """See `Device.arena_bytes`."""
        return self.arena.byte_count

    @property
    def staging_buffer_count(self) -> int:
        """Staging buffers there are; the ring grows when all are on their way."""
        return self._ring.buffer_count

    # ── order ──

    def record_event(self, stream: Stream) -> CUDAEvent:
        """See `Device.record_event`."""
        own = _own(stream)
        return CUDAEvent(own, own.torch_stream.record_event())

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See `Device.wait_event`."""
        _own(stream).torch_stream.wait_event(_own_event(event).torch_event)

    def query_event(self, event: Event) -> bool:
        """See `Device.query_event`."""
        torch_event: Reached = _own_event(event).torch_event
        return torch_event.query()

    def wait_on_host(self, event: Event) -> None:
        """See `Device.wait_on_host`."""
        _own_event(event).torch_event.synchronize()

    # ── work ──

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """See `Device.copy_units`: one launch where no pair writes what another reads, as of compaction.

        Otherwise, as of a float that moves over itself, two launches for each scratch full of pairs.
        """
        grid.check_units(self.arena_bytes, sources)
        grid.check_units(self.arena_bytes, targets)
        if not len(sources):
            return
        segments = copy_segments(sources, targets, self._scratch.numel() * 8 // grid.unit_bytes)
        with self._staged(stream, staged_bytes([sources, targets])) as buffer:
            source_ids, target_ids = buffer.send([sources, targets])
            self._kernels.copy_units(
                self.arena.bytes,
                grid.origin_bytes,
                grid.unit_bytes,
                source_ids,
                target_ids,
                segments=segments,
                scratch=self._scratch,
            )

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """See `Device.zero_units`: one launch."""
        grid.check_units(self.arena_bytes, units)
        if not len(units):
            return
        with self._staged(stream, staged_bytes([units])) as buffer:
            (ids,) = buffer.send([units])
            self._kernels.zero_units(self.arena.bytes, grid.origin_bytes, grid.unit_bytes, ids)

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """See `Device.create_mirrors`; the host waits for the GPU once."""
        mirrors = self._staging.lay_out(lengths)
        self._flat = torch.zeros(sum(lengths.values()), dtype=torch.int32, device=self._torch_device)
        torch.cuda.synchronize(self._torch_device)
        self.tables = {
            name: self._flat[mirror.offset : mirror.offset + mirror.length]
            for name, mirror in mirrors.items()
        }
        return dict(mirrors)

    def upload(self, stream: Stream) -> int:
        """See `Device.upload`: one copy and one launch, however many entries of however many mirrors."""
        indices, values = self._staging.drain()
        if not len(indices):
            return 0
        with self._staged(stream, staged_bytes([indices, values])) as buffer:
            places, entries = buffer.send([indices, values])
            self._kernels.write_tokens(self._flat.view(-1, 1), places, entries)
        return len(indices)

    def send(self, stream: Stream, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        """See `TensorDevice.send`: one copy, to memory that torch holds for as long as the tensors live."""
        size = staged_bytes(arrays)
        with self._staged(stream, size) as buffer:
            memory = torch.empty(size, dtype=torch.uint8, device=self._torch_device)
            return buffer.send_to(memory, arrays)

    def prewarm(
        self, grids: Sequence[UnitGrid], *, staging_buffers: int = 8, staged_units: int = 4096
    ) -> None:
        """See `TensorDevice.prewarm`; staging for so many calls on their way at once, of so many units each.

        The host waits for the GPU once.
        """
        self._ring.reserve(staging_buffers, staged_units * 16)
        with torch.cuda.stream(self.schedule_stream.torch_stream):
            ids = torch.zeros(2, dtype=torch.int64, device=self._torch_device)
            for unit_bytes in sorted({grid.unit_bytes for grid in grids}):
                self._kernels.prewarm_units(self.arena.bytes, unit_bytes, ids, self._scratch)
            if self._flat.numel():
                self._kernels.prewarm_table(self._flat, ids, ids.view(torch.int32))
        torch.cuda.synchronize(self._torch_device)

    @contextmanager
    def _staged(self, stream: Stream, byte_count: int) -> Iterator[StagingBuffer]:
        """A staging buffer for work that is queued on `stream` inside; it comes back behind that work, done or failed."""
        torch_stream = _own(stream).torch_stream
        with torch.cuda.stream(torch_stream):
            buffer = self._ring.take(byte_count)
            try:
                yield buffer
            finally:
                buffer.event = torch_stream.record_event()

    def _create_buffer(self, byte_count: int) -> StagingBuffer:
        return StagingBuffer(
            pinned=torch.empty(byte_count, dtype=torch.uint8, pin_memory=True),
            landing=torch.empty(byte_count, dtype=torch.uint8, device=self._torch_device),
        )


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated


def _own(stream: Stream) -> CUDAStream:
    if not isinstance(stream, CUDAStream):
        raise TypeError(f"stream {stream.name!r} is not one of a CUDA device: use its streams")
    return stream


def _own_event(event: Event) -> CUDAEvent:
    if not isinstance(event, CUDAEvent):
        raise TypeError(f"an event of stream {event.stream.name!r} was recorded on another kind of device")
    return event
