"""One byte budget: what a request needs of each band, and what a budget holds.

Pure integer arithmetic over `kvtide.plan`, without torch. `size_plan` divides a budget, `request_demand` prices a request,
`requests_that_fit` says how many of them an arena holds.
"""

from kvtide.sizing.budget import (
    ID_BYTES,
    BandTarget,
    FixedAllocation,
    SizedPlan,
    mirror_lengths,
    requests_that_fit,
    size_plan,
)
from kvtide.sizing.demand import DEMAND_RULES, DemandPurpose, DemandRule, KVDemand, OwnWork, request_demand
from kvtide.sizing.errors import SizingError
from kvtide.sizing.policy import (
    CHECKPOINT_RULES,
    CheckpointRule,
    CheckpointStrategy,
    ChunkReads,
    ServingPolicy,
)

__all__ = [
    "CHECKPOINT_RULES",
    "DEMAND_RULES",
    "ID_BYTES",
    "BandTarget",
    "CheckpointRule",
    "CheckpointStrategy",
    "ChunkReads",
    "DemandPurpose",
    "DemandRule",
    "FixedAllocation",
    "KVDemand",
    "OwnWork",
    "ServingPolicy",
    "SizedPlan",
    "SizingError",
    "mirror_lengths",
    "request_demand",
    "requests_that_fit",
    "size_plan",
]
