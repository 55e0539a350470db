"""Bands of units in one arena, and the allocator over them: takes, frees, and pages that move to make room.

`ChainAllocator` is what a storage uses. It decides on host arrays and drives any `kvtide.device.Device`; it needs no torch.
"""

from kvtide.chain.allocator import ChainAllocator
from kvtide.chain.errors import ChainError
from kvtide.chain.id_space import MASKED, SINK, IdSpace
from kvtide.chain.refusal import BandFigures, Refusal, TakeRefusal
from kvtide.chain.relief import FLUSH_REACH
from kvtide.chain.statistics import BandStatistics, ChainStatistics
from kvtide.chain.takes import BandTake, Taken

__all__ = [
    "FLUSH_REACH",
    "MASKED",
    "SINK",
    "BandFigures",
    "BandStatistics",
    "BandTake",
    "ChainAllocator",
    "ChainError",
    "ChainStatistics",
    "IdSpace",
    "Refusal",
    "TakeRefusal",
    "Taken",
]
