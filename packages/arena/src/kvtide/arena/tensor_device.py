"""What a storage needs of a device beyond the seam: its bytes and tables as tensors that kernels index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from kvtide.arena.memory import KVArena
from kvtide.device import Device, IntArray, Stream, UnitGrid


class TensorDevice(Device, Protocol):
    """A `kvtide.device.Device` whose arena and mirrors are torch tensors."""

    @property
    def arena(self) -> KVArena:
        """The bytes it works on."""

    @property
    def tables(self) -> Mapping[str, torch.Tensor]:
        """Mirrors by name, int32; at fixed addresses once created."""

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

    def prewarm(self, grids: Sequence[UnitGrid]) -> None:
        """Compile, load and allocate whatever copies, zeroing and uploads on these grids need (row A7); touches no byte.

        Called once the mirrors are made. The host may wait.
        """
