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
from kvtide.sizing.demand import KVDemand, request_demand
from kvtide.sizing.errors import SizingError

__all__ = [
    "ID_BYTES",
    "BandTarget",
    "FixedAllocation",
    "KVDemand",
    "SizedPlan",
    "SizingError",
    "mirror_lengths",
    "request_demand",
    "requests_that_fit",
    "size_plan",
]
