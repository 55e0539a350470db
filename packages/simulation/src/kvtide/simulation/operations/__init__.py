"""The operations that this package brings: what a scheduler does to the allocator and what others do with units meanwhile."""

from __future__ import annotations

from kvtide.simulation.actions import Operation
from kvtide.simulation.operations.capacity import AskFits, EnsureCapacity, FillArena, WhatIf
from kvtide.simulation.operations.crowds import Crowd
from kvtide.simulation.operations.ending_takes import TakeWhatEnds
from kvtide.simulation.operations.forwards import AbortForward, Flush, LaunchForward, ProcessForward
from kvtide.simulation.operations.frees import DropCheckpoints, DropTail, Finish, Retire
from kvtide.simulation.operations.host_copies import BackUp, Load, SubmitLoad
from kvtide.simulation.operations.lulls import Lull
from kvtide.simulation.operations.misuse import Misuse
from kvtide.simulation.operations.refills import RefillByLoad, RefillByPeer
from kvtide.simulation.operations.rehoming import Rehome
from kvtide.simulation.operations.state_slots import Checkpoint, Fork, Restore
from kvtide.simulation.operations.takes import Admit, Grow, Rebind
from kvtide.simulation.operations.time import PassTime, Rest
from kvtide.simulation.operations.transfers import BeginTransfer, Fail, Receive, Send
from kvtide.simulation.operations.uses_end import EndUse, Fix, GiveUp, Unfix

OPERATIONS: tuple[Operation, ...] = (
    Admit(),
    Grow(),
    Rebind(),
    Rehome(),
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
    Lull(),
    Crowd(),
    AskFits(),
    EnsureCapacity(),
    WhatIf(),
    Misuse(),
    TakeWhatEnds(),
    BackUp(),
    Load(),
    SubmitLoad(),
    RefillByLoad(),
    RefillByPeer(),
    Send(),
    Receive(),
    BeginTransfer(),
    Fail(),
    EndUse(),
    Fix(),
    Unfix(),
    GiveUp(),
    PassTime(),
    Rest(),
)
"""Every one, with its weight."""
