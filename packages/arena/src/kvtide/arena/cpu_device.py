"""The CPU device: torch bytes, work done at once (row V1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from kvtide.arena.kernels import SCRATCH_BYTES, copy_units, zero_units
from kvtide.arena.memory import KVArena
from kvtide.arena.tensor_device import HostMemory, arena_units, host_units
from kvtide.device import ImmediateStream, ImmediateStreams, IntArray, Mirror, MirrorStaging, Stream, UnitGrid


class CPUDevice(ImmediateStreams):
    """Implements `TensorDevice` over a `KVArena` in host memory. Every call is complete when it returns."""

    def __init__(self, arena: KVArena) -> None:
        """Drive `arena`."""
        super().__init__()
        self.copy_stream = ImmediateStream("copy")
        """See `TensorDevice.copy_stream`."""
        self.arena = arena
        """The bytes this device works on."""
        self.tables: dict[str, torch.Tensor] = {}
        """Mirrors by name, int32; at fixed addresses once created."""
        self._staging = MirrorStaging()
        self._flat = torch.zeros(0, dtype=torch.int32)

    @property
    def arena_bytes(self) -> int:
        """See `Device.arena_bytes`."""
        return self.arena.byte_count

    @property
    def scratch_bytes(self) -> int:
        """See `TensorDevice.scratch_bytes`."""
        return SCRATCH_BYTES

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """See `TensorDevice.on_stream`: there is one order, that of the calls."""
        return nullcontext()

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """See `Device.copy_units`."""
        grid.check_pairs(self.arena_bytes, sources, targets)
        copy_units(
            self.arena.bytes,
            grid.origin_bytes,
            grid.unit_bytes,
            _tensor(sources),
            _tensor(targets),
        )

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """See `Device.zero_units`."""
        grid.check_units(self.arena_bytes, units)
        zero_units(self.arena.bytes, grid.origin_bytes, grid.unit_bytes, _tensor(units))

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """See `Device.create_mirrors`."""
        mirrors = self._staging.lay_out(lengths)
        self._flat = torch.zeros(sum(lengths.values()), dtype=torch.int32)
        self.tables = {
            name: self._flat[mirror.offset : mirror.offset + mirror.length]
            for name, mirror in mirrors.items()
        }
        return dict(mirrors)

    def upload(self, stream: Stream) -> int:
        """See `Device.upload`."""
        indices, values = self._staging.drain()
        self._flat[torch.from_numpy(indices)] = torch.from_numpy(values)
        return len(indices)

    def send(self, stream: Stream, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        """See `TensorDevice.send`."""
        return [_tensor(array) for array in arrays]

    def queue_work(self, stream: Stream, work: Callable[[], None]) -> None:
        """See `TensorDevice.queue_work`."""
        work()

    def allocate_host(self, byte_count: int) -> HostMemory:
        """See `TensorDevice.allocate_host`."""
        return HostMemory(torch.empty(byte_count, dtype=torch.uint8))

    def copy_to_host(
        self, stream: Stream, grid: UnitGrid, units: IntArray, target: HostMemory, first_byte: int
    ) -> None:
        """See `TensorDevice.copy_to_host`."""
        grid.check_units(self.arena_bytes, units)
        kept = host_units(target, first_byte, grid, len(units))
        torch.index_select(arena_units(self.arena, grid), 0, _tensor(units), out=kept)

    def copy_from_host(
        self, stream: Stream, source: HostMemory, first_byte: int, grid: UnitGrid, units: IntArray
    ) -> None:
        """See `TensorDevice.copy_from_host`."""
        grid.check_units(self.arena_bytes, units)
        kept = host_units(source, first_byte, grid, len(units))
        arena_units(self.arena, grid).index_copy_(0, _tensor(units), kept)

    def prewarm(self, grids: Sequence[UnitGrid]) -> None:
        """See `TensorDevice.prewarm`: nothing is compiled, and scratch is allocated when used."""


def _tensor(ids: IntArray) -> torch.Tensor:
    """`ids` for torch, which takes neither reversed nor read-only arrays as they are."""
    return torch.from_numpy(np.array(ids))
