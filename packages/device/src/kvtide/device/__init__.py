"""The seam between the allocator and a device: streams, events, unit copies, mirrors; without torch.

`Device` is the protocol. `NumpyDevice` is the simplest implementation, immediate and on the host; the CPU and CUDA devices
over torch live in `kvtide.arena`.
"""

from kvtide.device.numpy_device import ImmediateEvent, ImmediateStream, NumpyDevice
from kvtide.device.protocols import Device, Event, IntArray, Mirror, Stream, UnitGrid
from kvtide.device.staging import MirrorStaging, StagedMirror

__all__ = [
    "Device",
    "Event",
    "ImmediateEvent",
    "ImmediateStream",
    "IntArray",
    "Mirror",
    "MirrorStaging",
    "NumpyDevice",
    "StagedMirror",
    "Stream",
    "UnitGrid",
]
