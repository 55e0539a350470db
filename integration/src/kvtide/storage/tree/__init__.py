"""The prefix tree over every sub-pool: what a hit is, what is kept, what goes first.

`PrefixTree` decides and touches no memory; `kvtide.storage.KVStorage` carries out what it says.
"""

from kvtide.storage.tree.inserting import Inserted
from kvtide.storage.tree.locks import TreeLock
from kvtide.storage.tree.matching import Checkpoint, Match
from kvtide.storage.tree.nodes import NO_STATE
from kvtide.storage.tree.policies import CostAware, EvictionPolicy, LeastRecentlyUsed, Worth
from kvtide.storage.tree.shape import TreeShape, TreeWindow
from kvtide.storage.tree.tree import PrefixTree, TreeStatistics

__all__ = [
    "NO_STATE",
    "Checkpoint",
    "CostAware",
    "EvictionPolicy",
    "Inserted",
    "LeastRecentlyUsed",
    "Match",
    "PrefixTree",
    "TreeLock",
    "TreeShape",
    "TreeStatistics",
    "TreeWindow",
    "Worth",
]
