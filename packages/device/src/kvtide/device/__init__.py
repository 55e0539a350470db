"""The seam between the allocator and a device: streams, events, unit copies, mirrors; without torch.

`Device` is the protocol. `NumpyDevice` is the simplest implementation, immediate and on the host; the CPU and CUDA devices
over torch live in `kvtide.arena`. `ModelledDevice` is the one to test a scheduler on: its work runs when the test or a seed says,
and it reports by name any two accesses to the same bytes that nothing orders.
"""

from kvtide.device.byte_spans import Buffer, ByteSpan
from kvtide.device.immediate import ImmediateEvent, ImmediateStream, ImmediateStreams
from kvtide.device.modelled_device import ModelledDevice
from kvtide.device.modelled_streams import ModelledEvent, ModelledStream
from kvtide.device.numpy_device import NumpyDevice
from kvtide.device.protocols import Device, Event, IntArray, Mirror, Stream, UnitGrid
from kvtide.device.races import (
    HostMayNotWaitError,
    Race,
    RacingAccess,
    UndeclaredAccessError,
    UnorderedAccessError,
)
from kvtide.device.running_work import RunningWork
from kvtide.device.staging import MirrorStaging, StagedMirror

__all__ = [
    "Buffer",
    "ByteSpan",
    "Device",
    "Event",
    "HostMayNotWaitError",
    "ImmediateEvent",
    "ImmediateStream",
    "ImmediateStreams",
    "IntArray",
    "Mirror",
    "MirrorStaging",
    "ModelledDevice",
    "ModelledEvent",
    "ModelledStream",
    "NumpyDevice",
    "Race",
    "RacingAccess",
    "RunningWork",
    "StagedMirror",
    "Stream",
    "UndeclaredAccessError",
    "UnitGrid",
    "UnorderedAccessError",
]
