"""What a storage needs of a device beyond the seam: its bytes and tables as tensors that kernels index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from kvtide.arena.memory import KVArena
from kvtide.device import Device


class TensorDevice(Device, Protocol):
    """A `kvtide.device.Device` whose arena and mirrors are torch tensors."""

    @property
    def arena(self) -> KVArena:
        """The bytes it works on."""

    @property
    def tables(self) -> Mapping[str, torch.Tensor]:
        """Mirrors by name, int32; at fixed addresses once created."""
