"""One region of bytes, the views that kernels read and write, and the devices that work on it.

`KVArena` is the region, `RoutedKVCache` gives each layer its views, `host_layout` lays out the host's copies alike. Over the
region `CPUDevice` and `CUDADevice` implement `TensorDevice`, the seam of `kvtide.device` with tensors.
"""

from kvtide.arena.cpu_device import CPUDevice
from kvtide.arena.cuda_device import CUDADevice, CUDAEvent, CUDAStream
from kvtide.arena.host_layout import host_layout
from kvtide.arena.kernels import SCRATCH_BYTES, copy_units, token_slots, unit_words, zero_units
from kvtide.arena.memory import KVArena, torch_dtype
from kvtide.arena.routed_cache import OFFSET_BITS, LayerView, RoutedKVCache
from kvtide.arena.tensor_device import HostMemory, TensorDevice
from kvtide.arena.token_kernels import gather_pages, gather_tokens, translate_ids, write_tokens

__all__ = [
    "OFFSET_BITS",
    "SCRATCH_BYTES",
    "CPUDevice",
    "CUDADevice",
    "CUDAEvent",
    "CUDAStream",
    "HostMemory",
    "KVArena",
    "LayerView",
    "RoutedKVCache",
    "TensorDevice",
    "copy_units",
    "gather_pages",
    "gather_tokens",
    "host_layout",
    "token_slots",
    "torch_dtype",
    "translate_ids",
    "unit_words",
    "write_tokens",
    "zero_units",
]
