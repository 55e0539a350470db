"""A page-safety simulation of the allocator that ships: seeded schedulers on modelled devices, and checks after each action.

`run_seed` draws a scenario and a sequence of actions and says what failed; `shrink` makes the sequence minimal; a `Case` is a
failure as a file. `Operation` is what a package implements to bring operations of its own, in the entry-point group
`kvtide.simulation.operations`; what they work on is the `World`. `kvtide stress` runs many seeds.

`exhaust` tries every sequence on tiny arenas. `TraceRecorder` writes an allocator's life, `replay` repeats it on any implementation.
`MUTATIONS` are rules to weaken, one at a time, and `hunt` says how soon that is noticed: `kvtide mutations`.
"""

from kvtide.simulation.actions import (
    OPERATION_GROUP,
    Action,
    Numbers,
    Operation,
    installed_operations,
    not_reached,
)
from kvtide.simulation.bands import SimulatedBand
from kvtide.simulation.cases import MODELLED, Case, load_case, save_case
from kvtide.simulation.exhaustive import SHAPES, Exhausted, Shape, exhaust, repeat
from kvtide.simulation.failures import CHECKS, CheckFailedError, Failure
from kvtide.simulation.handed import HOW, Handed
from kvtide.simulation.holders import Holder
from kvtide.simulation.mutations import MUTATIONS, Hunt, Mutation, hunt
from kvtide.simulation.operations import OPERATIONS
from kvtide.simulation.operations.capacity import draw_units
from kvtide.simulation.operations.choices import draw_bits, one_of, some_of, some_places
from kvtide.simulation.operations.phrases import UNDER, phrases, under
from kvtide.simulation.rank import Rank
from kvtide.simulation.real import DEVICE_KINDS, RealDevice, open_device, run_actions_on, run_seed_on
from kvtide.simulation.requests import Batch, BatchEntry, BatchTake, Request
from kvtide.simulation.run import Run, run_actions, run_seed
from kvtide.simulation.scenario import BandDraft, Scenario, draw_scenario
from kvtide.simulation.shadow import Shadow
from kvtide.simulation.shrinking import shrink
from kvtide.simulation.sweep import SeedRun, Totals, sweep
from kvtide.simulation.traces import (
    STORIES,
    ChainAdapter,
    Divergence,
    Recorded,
    TraceAdapter,
    TraceError,
    TraceHeader,
    TraceLine,
    TraceRecorder,
    first_divergence,
    read_trace,
    record_seed,
    replay,
    told,
)
from kvtide.simulation.use_steps import announce, back_up, fix
from kvtide.simulation.uses import Kind, Part, Stage, parts_of
from kvtide.simulation.world import World

__all__ = [
    "CHECKS",
    "DEVICE_KINDS",
    "HOW",
    "MODELLED",
    "MUTATIONS",
    "OPERATIONS",
    "OPERATION_GROUP",
    "SHAPES",
    "STORIES",
    "UNDER",
    "Action",
    "BandDraft",
    "Batch",
    "BatchEntry",
    "BatchTake",
    "Case",
    "ChainAdapter",
    "CheckFailedError",
    "Divergence",
    "Exhausted",
    "Failure",
    "Handed",
    "Holder",
    "Hunt",
    "Kind",
    "Mutation",
    "Numbers",
    "Operation",
    "Part",
    "Rank",
    "RealDevice",
    "Recorded",
    "Request",
    "Run",
    "Scenario",
    "SeedRun",
    "Shadow",
    "Shape",
    "SimulatedBand",
    "Stage",
    "Totals",
    "TraceAdapter",
    "TraceError",
    "TraceHeader",
    "TraceLine",
    "TraceRecorder",
    "World",
    "announce",
    "back_up",
    "draw_bits",
    "draw_scenario",
    "draw_units",
    "exhaust",
    "first_divergence",
    "fix",
    "hunt",
    "installed_operations",
    "load_case",
    "not_reached",
    "one_of",
    "open_device",
    "parts_of",
    "phrases",
    "read_trace",
    "record_seed",
    "repeat",
    "replay",
    "run_actions",
    "run_actions_on",
    "run_seed",
    "run_seed_on",
    "save_case",
    "shrink",
    "some_of",
    "some_places",
    "sweep",
    "told",
    "under",
]
