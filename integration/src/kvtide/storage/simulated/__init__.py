"""The prefix tree in the simulation of page safety: operations that `kvtide stress` finds by entry point (rows K7-K9, X1).

Requests that share prefixes run among the simulation's own, over the parts that ship (`PrefixSharing`, its tree, `TrackingSlots`,
`EvictingTakes`), on every rank. Only this module may be imported from elsewhere, and only where `kvtide-simulation` is installed; the
storage knows nothing of it.

| module | |
| - | - |
| `settings` | how a scenario shares: strategy, grid, eviction policy |
| `prompts` | requests, and texts that begin alike |
| `meanings` | what each unit was computed from: the dumbest model of a hit |
| `watched_chain` | an allocator whose calls move the world's model along |
| `sharing_rank` | one rank's parts, and the verbs over them |
| `sharers` | all ranks together, what they are held to |
| `requests_operations`, `tree_operations` | what is drawn |
"""

from kvtide.simulation import Operation
from kvtide.storage.simulated.requests_operations import Begin, End, Launch, Process, Serve, Step
from kvtide.storage.simulated.sharers import Sharers
from kvtide.storage.simulated.tree_operations import Crowd, Empty, MakeRoom, ReadNodes

OPERATIONS: tuple[Operation, ...] = (
    Begin(),
    Step(),
    Launch(),
    Process(),
    Serve(),
    End(),
    MakeRoom(),
    Empty(),
    Crowd(),
    ReadNodes(),
)
"""Every one, with its weight."""

__all__ = ["OPERATIONS", "Sharers"]
