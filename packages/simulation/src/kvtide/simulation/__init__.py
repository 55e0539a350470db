"""A page-safety simulation of the allocator that ships: seeded schedulers on modelled devices, and checks after each action.

`run_seed` draws a scenario and a sequence of actions and says what failed; `shrink` makes the sequence minimal; a `Case` is a
failure as a file. `Operation` is what a package implements to bring operations of its own, in the entry-point group
`kvtide.simulation.operations`; what they work on is the `World`. `kvtide stress` runs many seeds.
`MUTATIONS` are rules to weaken, one at a time, and `hunt` says how soon that is noticed: `kvtide mutations`.
"""

from kvtide.simulation.actions import (
    OPERATION_GROUP,
    Action,
    Numbers,
    Operation,
    installed_operations,
)
from kvtide.simulation.allocators import Handed
from kvtide.simulation.bands import SimulatedBand
from kvtide.simulation.cases import Case, load_case, save_case
from kvtide.simulation.failures import CHECKS, CheckFailedError, Failure
from kvtide.simulation.mutations import MUTATIONS, Hunt, Mutation, hunt
from kvtide.simulation.operations import OPERATIONS
from kvtide.simulation.rank import Rank
from kvtide.simulation.requests import Batch, BatchEntry, BatchTake, Request
from kvtide.simulation.run import Run, run_actions, run_seed
from kvtide.simulation.scenario import BandDraft, Scenario, draw_scenario
from kvtide.simulation.shadow import Shadow
from kvtide.simulation.shrinking import shrink
from kvtide.simulation.sweep import SeedRun, Totals, sweep
from kvtide.simulation.world import World

__all__ = [
    "CHECKS",
    "MUTATIONS",
    "OPERATIONS",
    "OPERATION_GROUP",
    "Action",
    "BandDraft",
    "Batch",
    "BatchEntry",
    "BatchTake",
    "Case",
    "CheckFailedError",
    "Failure",
    "Handed",
    "Hunt",
    "Mutation",
    "Numbers",
    "Operation",
    "Rank",
    "Request",
    "Run",
    "Scenario",
    "SeedRun",
    "Shadow",
    "SimulatedBand",
    "Totals",
    "World",
    "draw_scenario",
    "hunt",
    "installed_operations",
    "load_case",
    "run_actions",
    "run_seed",
    "save_case",
    "shrink",
    "sweep",
]
