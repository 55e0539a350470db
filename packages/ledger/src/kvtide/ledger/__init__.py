"""Who may still touch a page, and who waits for it: without torch, without an arena, for any engine.

`ForwardSteps` follows forwards from launch to processing, `PendingPages` holds a band's pages that were freed under one,
`PageUsage` every other use that is not over. `CLEARANCE` is the one rule of who waits for whom; `clearance` and `choose_holes`
apply it. Nothing here blocks the host or queues a stream wait but `queue_stream_waits`, which only queues.
"""

from kvtide.ledger.clearance_table import (
    CLEARANCE,
    REASONS,
    Clear,
    ClearanceTable,
    Consumer,
    Hazard,
    format_clearance,
)
from kvtide.ledger.clearing import Clearance, HoleChoice, choose_holes, clearance, queue_stream_waits
from kvtide.ledger.cloning import clone_of
from kvtide.ledger.errors import InvariantError
from kvtide.ledger.fenced_bytes import Fence, FencedBytes, FencesMet
from kvtide.ledger.forward_steps import ForwardSteps, LaunchRecord, RecordedForward
from kvtide.ledger.invariants import INVARIANTS, CheckLevel, Invariant, InvariantChecks
from kvtide.ledger.page_answers import Hazards, Writers
from kvtide.ledger.page_life import PAGE_LIFE, Arrow, PageState
from kvtide.ledger.page_usage import PageUsage
from kvtide.ledger.pending_pages import PendingBatch, PendingPages
from kvtide.ledger.signals import Access, HostCopy, NetworkTransfer, ReceiveHold, Reservation, Signal
from kvtide.ledger.usage_books import fence_books, sorted_pages

__all__ = [
    "CLEARANCE",
    "INVARIANTS",
    "PAGE_LIFE",
    "REASONS",
    "Access",
    "Arrow",
    "CheckLevel",
    "Clear",
    "Clearance",
    "ClearanceTable",
    "Consumer",
    "Fence",
    "FencedBytes",
    "FencesMet",
    "ForwardSteps",
    "Hazard",
    "Hazards",
    "HoleChoice",
    "HostCopy",
    "Invariant",
    "InvariantChecks",
    "InvariantError",
    "LaunchRecord",
    "NetworkTransfer",
    "PageState",
    "PageUsage",
    "PendingBatch",
    "PendingPages",
    "ReceiveHold",
    "RecordedForward",
    "Reservation",
    "Signal",
    "Writers",
    "choose_holes",
    "clearance",
    "clone_of",
    "fence_books",
    "format_clearance",
    "queue_stream_waits",
    "sorted_pages",
]
