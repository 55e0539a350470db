"""What a storage needs of a device beyond the seam: its bytes and tables as tensors that kernels index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import attrs
import torch

from kvtide.arena.memory import KVArena
from kvtide.device import Device, IntArray, Stream, UnitGrid


@attrs.frozen(eq=False)
class HostMemory:
    """Bytes of the host that a device copies to and from by itself. They may be dropped at any time: what is queued keeps them."""

    bytes: torch.Tensor
    """The bytes, `[byte_count]` uint8; the host may look at them behind an event behind the last copy to them."""


class TensorDevice(Device, Protocol):
    """A `kvtide.device.Device` whose arena and mirrors are torch tensors."""

    @property
    def arena(self) -> KVArena:
        """The bytes it works on."""

    @property
    def tables(self) -> Mapping[str, torch.Tensor]:
        """Mirrors by name, int32; at fixed addresses once created."""

    @property
    def copy_stream(self) -> Stream:
        """Where copies between the arena and host memory run, beside forwards and the schedule stream's work."""

    @property
    def scratch_bytes(self) -> int:
        """Most bytes that it holds beside the arena and its mirrors, where the arena lies; budgets charge them (S1)."""

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside, what torch is told is queued on `stream`."""

    def send(self, stream: Stream, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        """Copies of host arrays, any shapes, where the arena lies, for work on `stream`; all in one batch.

        The host does not wait, and may not change the arrays after. Raises `RuntimeError` while `stream` captures a CUDA graph, as
        does whatever else brings ids to a GPU.
        """

    def queue_work(self, stream: Stream, work: Callable[[], None]) -> None:
        """Have `work` on tensors done when `stream` gets there: called now where torch queues it, else when its turn comes."""

    def allocate_host(self, byte_count: int) -> HostMemory:
        """Host memory, uninitialised, pinned where the arena lies on a GPU. Raises what torch does where there is none."""

    def copy_to_host(
        self, stream: Stream, grid: UnitGrid, units: IntArray, target: HostMemory, first_byte: int
    ) -> None:
        """Copy whole units, one behind the other, to bytes of `target` from `first_byte` on, on `stream`; the host does not wait.

        It takes no memory beside both. Raises, with nothing copied, `IndexError` for a unit outside the arena and for bytes outside
        `target`.
        """

    def copy_from_host(
        self, stream: Stream, source: HostMemory, first_byte: int, grid: UnitGrid, units: IntArray
    ) -> None:
        """The way back: fill `units`, each named once, from bytes of `source`; as `copy_to_host`."""

    def prewarm(self, grids: Sequence[UnitGrid]) -> None:
        """Compile, load and allocate whatever copies, zeroing and uploads on these grids need (row A7); touches no byte.

        Called once the mirrors are made. The host may wait.
        """


def host_units(memory: HostMemory, first_byte: int, grid: UnitGrid, unit_count: int) -> torch.Tensor:
    """Bytes of `memory` from `first_byte` on as units of `grid`, `[unit_count, unit_bytes]`; `IndexError` for bytes outside it."""
    end_byte = first_byte + unit_count * grid.unit_bytes
    if first_byte < 0 or end_byte > memory.bytes.numel():
        raise IndexError(
            f"{unit_count} units of {grid.unit_bytes} bytes from byte {first_byte} on do not lie in host memory of "
            f"{memory.bytes.numel()} bytes"
        )
    return memory.bytes[first_byte:end_byte].view(unit_count, grid.unit_bytes)


def arena_units(arena: KVArena, grid: UnitGrid) -> torch.Tensor:
    """Every unit of `grid` in the arena, `[unit_count, unit_bytes]` uint8, a view."""
    count = grid.unit_count(arena.byte_count)
    end_byte = grid.origin_bytes + count * grid.unit_bytes
    return arena.bytes[grid.origin_bytes : end_byte].view(count, grid.unit_bytes)
