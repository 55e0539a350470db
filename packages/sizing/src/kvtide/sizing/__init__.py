"""One byte budget: what a request needs of each band, and what a budget holds.

Pure integer arithmetic over `kvtide.plan`, without torch. `size_plan` divides a budget, `request_demand` prices a request,
`requests_that_fit` says how many of them an arena holds.
"""

from kvtide.sizing.budget import DEFAULT_STATE_SHARE, size_plan, size_stages
from kvtide.sizing.demand import (
    DEMAND_RULES,
    DemandPurpose,
    DemandRule,
    KVDemand,
    OwnWork,
    context_demand,
    request_demand,
)
from kvtide.sizing.errors import SizingError
from kvtide.sizing.fitting import ID_BYTES, ROW_STATE_BYTES, mirror_lengths, requests_that_fit
from kvtide.sizing.policy import (
    CHECKPOINT_RULES,
    CheckpointRule,
    CheckpointStrategy,
    ChunkReads,
    ServingPolicy,
)
from kvtide.sizing.resident import resident_demand
from kvtide.sizing.sized_plan import BandTarget, FixedAllocation, SizedPlan

__all__ = [
    "CHECKPOINT_RULES",
    "DEFAULT_STATE_SHARE",
    "DEMAND_RULES",
    "ID_BYTES",
    "ROW_STATE_BYTES",
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
    "context_demand",
    "mirror_lengths",
    "request_demand",
    "requests_that_fit",
    "resident_demand",
    "size_plan",
    "size_stages",
]
