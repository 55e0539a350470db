"""The modelled device with tensors: real asynchrony on a CPU (decision D12).

A `kvtide.device.ModelledDevice` over the bytes of an arena tensor. What is queued on a stream runs when its turn comes, drawn by a
seed or when the host waits for it, and changes the bytes that models read; two accesses that nothing orders are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import attrs
import numpy as np
import torch

from kvtide.arena import HostMemory, KVArena
from kvtide.device import (
    Buffer,
    ByteSpan,
    Event,
    IntArray,
    Mirror,
    ModelledDevice,
    ModelledStream,
    RunningWork,
    Stream,
    UnitGrid,
)
from kvtide.plan import ArenaLayout


@attrs.frozen(eq=False)
class WatchedMemory(HostMemory):
    """Host memory whose bytes the modelled device watches as it does the arena's."""

    buffer: Buffer
    """What reports call it."""


class ModelledTensorDevice:
    """Implements `kvtide.arena.TensorDevice`; `model` is the modelled device behind it."""

    def __init__(self, arena: KVArena, *, seed: int | None = None, raise_races: bool = True) -> None:
        """Drive `arena`, every byte of which becomes 0xFF, a NaN in every float type.

        `seed` draws when queued work runs, and what queries of events say; without one, work runs when the host waits for it.
        """
        arena.bytes.fill_(0xFF)
        self.arena = arena
        """The bytes it works on."""
        self.model = ModelledDevice(
            arena.byte_count,
            seed=seed,
            random_queries=seed is not None,
            raise_races=raise_races,
            name_units=self._name_units,
            memory=arena.bytes.numpy(),
        )
        """Where work is queued, noted and run."""
        self.copy_stream = self.model.create_stream("copy")
        """See `TensorDevice.copy_stream`."""
        self.tables: dict[str, torch.Tensor] = {}
        """Mirrors by name, int32; at fixed addresses once created."""
        self._names: dict[UnitGrid, str] = {}

    def watch(self, layout: ArenaLayout) -> None:
        """Let reports use the names of `layout`'s bands, and say nothing of their sinks, which anybody may write."""
        for band in layout.bands:
            grid = UnitGrid(band.origin_bytes, band.unit_bytes)
            self._names[grid] = band.name
            if band.has_sink:
                for span in self.spans(grid, np.zeros(1, np.int64)):
                    self.model.allow_unordered(span)

    def spans(self, grid: UnitGrid, units: IntArray) -> tuple[ByteSpan, ...]:
        """Spans of units, to declare as reads or writes of submitted work."""
        return self.model.unit_spans(grid, units)

    def submit(
        self,
        name: str,
        *,
        reads: Sequence[ByteSpan] = (),
        writes: Sequence[ByteSpan] = (),
        run: Callable[[], None],
    ) -> None:
        """Queue a piece of a forward on the forward stream; `run` is called when its turn comes."""

        def run_it(_: RunningWork) -> None:
            run()

        self.model.submit(self.model.forward_stream, name, reads=reads, writes=writes, run=run_it)

    # ── the seam ──

    @property
    def arena_bytes(self) -> int:
        """See `Device.arena_bytes`."""
        return self.arena.byte_count

    @property
    def schedule_stream(self) -> ModelledStream:
        """See `Device.schedule_stream`."""
        return self.model.schedule_stream

    @property
    def forward_stream(self) -> ModelledStream:
        """See `Device.forward_stream`."""
        return self.model.forward_stream

    def record_event(self, stream: Stream) -> Event:
        """See `Device.record_event`."""
        return self.model.record_event(stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See `Device.wait_event`."""
        self.model.wait_event(stream, event)

    def query_event(self, event: Event) -> bool:
        """See `Device.query_event`."""
        return self.model.query_event(event)

    def wait_on_host(self, event: Event) -> None:
        """See `Device.wait_on_host`."""
        self.model.wait_on_host(event)

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """See `Device.copy_units`."""
        self.model.copy_units(stream, grid, sources, targets)

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """See `Device.zero_units`."""
        self.model.zero_units(stream, grid, units)

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """See `Device.create_mirrors`."""
        mirrors = self.model.create_mirrors(lengths)
        self.tables = {name: torch.from_numpy(table) for name, table in self.model.tables.items()}
        return mirrors

    def upload(self, stream: Stream) -> int:
        """See `Device.upload`."""
        return self.model.upload(stream)

    def send(self, stream: Stream, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        """See `TensorDevice.send`: arguments of work that runs now."""
        return [torch.from_numpy(np.array(array)) for array in arrays]

    def queue_work(self, stream: Stream, work: Callable[[], None]) -> None:
        """See `TensorDevice.queue_work`: on tensors that are not watched."""

        def run(_: RunningWork) -> None:
            work()

        self.model.submit(stream, f"work of stream {stream.name!r}", run=run)

    def allocate_host(self, byte_count: int) -> WatchedMemory:
        """See `TensorDevice.allocate_host`."""
        buffer = self.model.create_buffer("host memory", byte_count)
        buffer.bytes[:] = 0xFF
        return WatchedMemory(torch.from_numpy(buffer.bytes), buffer)

    def copy_to_host(
        self, stream: Stream, grid: UnitGrid, units: IntArray, target: HostMemory, first_byte: int
    ) -> None:
        """See `TensorDevice.copy_to_host`."""
        in_arena, on_host = self._pairs(grid, units, target, first_byte)
        self.model.copy_spans(stream, "copy to the host", in_arena, on_host)

    def copy_from_host(
        self, stream: Stream, source: HostMemory, first_byte: int, grid: UnitGrid, units: IntArray
    ) -> None:
        """See `TensorDevice.copy_from_host`."""
        in_arena, on_host = self._pairs(grid, units, source, first_byte)
        self.model.copy_spans(stream, "copy from the host", on_host, in_arena)

    @property
    def scratch_bytes(self) -> int:
        """See `TensorDevice.scratch_bytes`: moves pass through host memory of their own."""
        return 0

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """See `TensorDevice.on_stream`: what runs now is on the stream that it was queued on."""
        return nullcontext()

    def prewarm(self, grids: Sequence[UnitGrid]) -> None:
        """See `TensorDevice.prewarm`: nothing is compiled."""

    def _pairs(
        self, grid: UnitGrid, units: IntArray, memory: HostMemory, first_byte: int
    ) -> tuple[list[ByteSpan], list[ByteSpan]]:
        """Each unit in the arena, and where it lies in host memory."""
        assert isinstance(memory, WatchedMemory), "host memory of another device"
        ends = first_byte + grid.unit_bytes * np.arange(len(units) + 1)
        on_host = [
            memory.buffer.span(first, end)
            for first, end in zip(ends.tolist(), ends[1:].tolist(), strict=False)
        ]
        return [span for unit in units for span in self.spans(grid, np.array([unit]))], on_host

    def _name_units(self, grid: UnitGrid, first: int, end: int) -> str:
        return f"band {self._names.get(grid, '?')!r} units [{first}, {end})"
