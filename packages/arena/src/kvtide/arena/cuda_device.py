"""The CUDA device: three streams of one GPU, fresh events, Triton programs (row V1).

The host queues and never waits: ids travel through pinned staging, each call as one copy and as few launches as its hazards
allow. It needs Triton, which the rest of the package does not.

    arena | mirrors | scratch for moves that pass over themselves, landing for ids      on the GPU, sized once
    staging, `SMALL_BYTES` or `LANDING_BYTES` for each call on its way                  pinned host memory, grows

Copies to and from host memory name no ids to the GPU: each run of neighbouring units is a copy of its own, by the copy engines, so
they need no memory there and take no turn with moves.

Scratch and landing serve one stream at a time, in its order; another stream first waits for that one. A call that names
more ids than the landing holds is queued in pieces. What a forward's ids take (`send`) is the forward's own memory, as its
activations are.

No call may be part of a CUDA graph: a replay would copy what the host has put into staging since. Ids are sent before, to
tensors that the graph reads at fixed addresses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import attrs
import numpy as np
import torch

from kvtide.arena.copy_plan import copy_segments
from kvtide.arena.memory import KVArena
from kvtide.arena.pinned_staging import Reached, Staged, StagingRing, staged_bytes
from kvtide.arena.tensor_device import HostMemory, arena_units, host_units
from kvtide.device import Event, IntArray, Mirror, MirrorStaging, Stream, UnitGrid
from kvtide.plan import GPU_SCRATCH_BYTES

LANDING_BYTES = 1 << 20
"""For ids and table entries: 65,536 pairs of a move, 87,380 entries of an upload. A multiple of 16."""

SMALL_BYTES = 4 << 10
"""Of staging for most calls: 256 pairs of a move, 340 entries of an upload."""

SMALL_COUNT = 64
"""Such buffers, for each stream, that are made before service: 64 calls on their way, 256 KiB."""


@attrs.frozen(eq=False)
class CUDAStream:
    """A named stream of the GPU; equal to itself only."""

    name: str
    """For logs."""

    torch_stream: torch.cuda.Stream
    """What torch calls it."""


@attrs.frozen(eq=False)
class CUDAEvent:
    """A point in one stream, recorded when made; equal to itself only."""

    stream: CUDAStream
    """Where it was recorded."""

    torch_event: torch.cuda.Event
    """What torch calls it."""


class CUDADevice:
    """Implements `TensorDevice` over a `KVArena` in the memory of a GPU.

    It may be dropped at any time, and the arena with it: torch gives their memory to nobody before the work that was queued on
    its streams until then is over.
    """

    def __init__(
        self,
        arena: KVArena,
        *,
        scratch_bytes: int = GPU_SCRATCH_BYTES,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Drive `arena`, on streams of its GPU; forwards run on `forward_stream`, by default a new one.

        `scratch_bytes` is all that it holds beside arena and mirrors. The host waits for the GPU once, here, so that whoever
        made the arena is through with it. Raises `ValueError` for less scratch than `LANDING_BYTES`, `ImportError` without
        Triton.
        """
        from kvtide.arena import triton_kernels  # noqa: PLC0415  # Triton is optional

        if scratch_bytes < LANDING_BYTES:
            raise ValueError(
                f"a CUDA device cannot work in {scratch_bytes} bytes of scratch: ids on their way alone take {LANDING_BYTES}"
            )
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
        self.copy_stream = CUDAStream("copy", _new_stream(self._torch_device))
        """See `TensorDevice.copy_stream`."""
        self._landing = torch.empty(LANDING_BYTES, dtype=torch.uint8, device=self._torch_device)
        self._scratch = torch.empty(
            (scratch_bytes - LANDING_BYTES) // 8, dtype=torch.int64, device=self._torch_device
        )
        self._landing_stream = self.schedule_stream
        self._staging = MirrorStaging()
        self._ring = StagingRing(self._create_pinned, sorted((SMALL_BYTES, LANDING_BYTES)))
        self._flat = torch.zeros(0, dtype=torch.int32, device=self._torch_device)
        for memory in (arena.bytes, self._landing, self._scratch):
            self._hold(memory)
        torch.cuda.synchronize(self._torch_device)

    @property
    def arena_bytes(self) -> int:
        """See `Device.arena_bytes`."""
        return self.arena.byte_count

    @property
    def scratch_bytes(self) -> int:
        """See `TensorDevice.scratch_bytes`."""
        return LANDING_BYTES + self._scratch.numel() * 8

    @property
    def staging_buffer_count(self) -> int:
        """Staging buffers there are; the ring grows when all are on their way."""
        return self._ring.buffer_count

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """See `TensorDevice.on_stream`; the stream's GPU is torch's current one inside."""
        return torch.cuda.stream(_own(stream).torch_stream)

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
        self._refuse_capture(stream)
        grid.check_pairs(self.arena_bytes, sources, targets)
        scratch_units = self._scratch.numel() * 8 // grid.unit_bytes
        for piece in _pieces(len(sources), 16):
            pairs = sources[piece], targets[piece]
            segments = copy_segments(*pairs, scratch_units)
            with self._landed(stream, pairs) as (source_ids, target_ids):
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
        self._refuse_capture(stream)
        grid.check_units(self.arena_bytes, units)
        for piece in _pieces(len(units), 8):
            with self._landed(stream, [units[piece]]) as (ids,):
                self._kernels.zero_units(self.arena.bytes, grid.origin_bytes, grid.unit_bytes, ids)

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """See `Device.create_mirrors`; the host waits for the GPU once."""
        mirrors = self._staging.lay_out(lengths)
        self._flat = torch.zeros(sum(lengths.values()), dtype=torch.int32, device=self._torch_device)
        self._hold(self._flat)
        torch.cuda.synchronize(self._torch_device)
        self.tables = {
            name: self._flat[mirror.offset : mirror.offset + mirror.length]
            for name, mirror in mirrors.items()
        }
        return dict(mirrors)

    def upload(self, stream: Stream) -> int:
        """See `Device.upload`: one copy and one launch, however many entries of however many mirrors."""
        self._refuse_capture(stream)
        indices, values = self._staging.drain()
        for piece in _pieces(len(indices), 12):
            with self._landed(stream, [indices[piece], values[piece]]) as (places, entries):
                self._kernels.write_tokens(self._flat.view(-1, 1), places, entries)
        return len(indices)

    def send(self, stream: Stream, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        """See `TensorDevice.send`: one copy, to memory that torch holds for as long as the tensors live, not to the landing."""
        self._refuse_capture(stream)
        size = staged_bytes(arrays)
        with self.on_stream(stream), self._ring.buffer(_own(stream).torch_stream, size) as buffer:
            memory = torch.empty(size, dtype=torch.uint8, device=self._torch_device)
            return buffer.send_to(memory, arrays)

    def queue_work(self, stream: Stream, work: Callable[[], None]) -> None:
        """See `TensorDevice.queue_work`."""
        with self.on_stream(stream):
            work()

    def allocate_host(self, byte_count: int) -> HostMemory:
        """See `TensorDevice.allocate_host`. Memory that torch has not pinned before may hold the GPU up while it is."""
        return HostMemory(self._create_pinned(byte_count))

    def copy_to_host(
        self, stream: Stream, grid: UnitGrid, units: IntArray, target: HostMemory, first_byte: int
    ) -> None:
        """See `TensorDevice.copy_to_host`: a copy for each run of neighbours."""
        self._refuse_capture(stream)
        grid.check_units(self.arena_bytes, units)
        kept, arena = host_units(target, first_byte, grid, len(units)), arena_units(self.arena, grid)
        with self.on_stream(stream):
            for place, first, count in _unit_runs(units):
                kept[place : place + count].copy_(arena[first : first + count], non_blocking=True)

    def copy_from_host(
        self, stream: Stream, source: HostMemory, first_byte: int, grid: UnitGrid, units: IntArray
    ) -> None:
        """See `TensorDevice.copy_from_host`: a copy for each run of neighbours."""
        self._refuse_capture(stream)
        grid.check_units(self.arena_bytes, units)
        kept, arena = host_units(source, first_byte, grid, len(units)), arena_units(self.arena, grid)
        with self.on_stream(stream):
            for place, first, count in _unit_runs(units):
                arena[first : first + count].copy_(kept[place : place + count], non_blocking=True)

    def prewarm(self, grids: Sequence[UnitGrid]) -> None:
        """See `TensorDevice.prewarm`; staging for many small calls, and for two iterations on their way, each of which moves and
        zeroes many pages in every band, uploads, and sends a forward's ids. The host waits for the GPU once.
        """
        for stream, large_count in (
            (self.schedule_stream, 2 * (2 * len(grids) + 1)),
            (self.forward_stream, 2),
        ):
            self._ring.reserve(stream.torch_stream, LANDING_BYTES, large_count)
            self._ring.reserve(stream.torch_stream, SMALL_BYTES, SMALL_COUNT)
        with self.on_stream(self.schedule_stream):
            ids = torch.zeros(2, dtype=torch.int64, device=self._torch_device)
            for unit_bytes in sorted({grid.unit_bytes for grid in grids}):
                self._kernels.prewarm_units(self.arena.bytes, unit_bytes, ids, self._scratch)
            if self._flat.numel():
                self._kernels.prewarm_table(self._flat, ids, ids.view(torch.int32))
        torch.cuda.synchronize(self._torch_device)

    @contextmanager
    def _landed(self, stream: Stream, arrays: Sequence[Staged]) -> Iterator[list[torch.Tensor]]:
        """`arrays` on the GPU, for work that is queued on `stream` inside; that work may use the scratch too."""
        own = _own(stream)
        with self.on_stream(own):
            if self._landing_stream is not own:
                own.torch_stream.wait_stream(self._landing_stream.torch_stream)
                self._landing_stream = own
            with self._ring.buffer(own.torch_stream, staged_bytes(arrays)) as buffer:
                yield buffer.send_to(self._landing, arrays)

    def _refuse_capture(self, stream: Stream) -> None:
        """Raise `RuntimeError` while a graph is captured on `stream`, with nothing queued or drained."""
        with self.on_stream(stream):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"stream {stream.name!r} is capturing a CUDA graph, whose replays would read ids that the host has replaced "
                    "since: send ids before the capture, to tensors at fixed addresses that the graph reads"
                )

    def _hold(self, memory: torch.Tensor) -> None:
        """Let torch give `memory` to nobody, once it is dropped, before every stream is through with it."""
        for stream in (self.schedule_stream, self.forward_stream, self.copy_stream):
            memory.record_stream(stream.torch_stream)

    def _create_pinned(self, byte_count: int) -> torch.Tensor:
        return torch.empty(byte_count, dtype=torch.uint8, pin_memory=True)


def _pieces(count: int, id_bytes: int) -> Iterator[slice]:
    """Runs of `count` things whose ids, `id_bytes` for each, fit into the landing; none where there is nothing."""
    # Fours, so that each array of a run takes whole sections of staging.
    step = LANDING_BYTES // id_bytes // 4 * 4
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _unit_runs(units: IntArray) -> Iterator[tuple[int, int, int]]:
    """Runs of units that follow one another: their place among `units`, the first one, and how many."""
    edges = np.flatnonzero(np.diff(units, prepend=units[:1] - 2, append=units[-1:] + 2) != 1).tolist()
    for place, end in itertools.pairwise(edges):
        yield place, int(units[place]), end - place


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
