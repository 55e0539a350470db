"""Who may still touch a page: forwards in flight, and the pages that wait for them; without torch and without an arena.

`ForwardSteps` follows forwards from launch to processing, `PendingPages` holds a band's pages that were freed under one.
Neither blocks the host.
"""

from kvtide.ledger.errors import InvariantError
from kvtide.ledger.forward_steps import ForwardSteps, LaunchRecord, RecordedForward
from kvtide.ledger.pending_pages import PendingBatch, PendingPages

__all__ = [
    "ForwardSteps",
    "InvariantError",
    "LaunchRecord",
    "PendingBatch",
    "PendingPages",
    "RecordedForward",
]
