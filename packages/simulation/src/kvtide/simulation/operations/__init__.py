"""The operations that this package brings: what a scheduler does to the allocator alone, without host copies and transfers."""

from __future__ import annotations

from kvtide.simulation.actions import Operation
from kvtide.simulation.operations.capacity import AskFits, EnsureCapacity, FillArena, WhatIf
from kvtide.simulation.operations.forwards import AbortForward, Flush, LaunchForward, ProcessForward
from kvtide.simulation.operations.frees import DropCheckpoints, DropTail, Finish, Retire
from kvtide.simulation.operations.misuse import Misuse
from kvtide.simulation.operations.state_slots import Checkpoint, Fork, Restore
from kvtide.simulation.operations.takes import Admit, Grow, Rebind
from kvtide.simulation.operations.time import PassTime, Rest

OPERATIONS: tuple[Operation, ...] = (
    Admit(),
    Grow(),
    Rebind(),
    LaunchForward(),
    ProcessForward(),
    AbortForward(),
    Finish(),
    Retire(),
    DropTail(),
    DropCheckpoints(),
    Fork(),
    Checkpoint(),
    Restore(),
    FillArena(),
    Flush(),
    AskFits(),
    EnsureCapacity(),
    WhatIf(),
    Misuse(),
    PassTime(),
    Rest(),
)
"""Every one, with its weight."""
