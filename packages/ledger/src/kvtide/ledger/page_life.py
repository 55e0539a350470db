"""The life of a physical page as a state machine: its states, and every arrow with the function that makes it.

    beyond ──take──→ live ←──take── hole ──given back──→ beyond      nobody is in the way
                      │              ↑
                      ├─free──→ pending                              a forward may still touch it
                      └─move──→ vacated ──span retreats──→ fenced    a forward, a copy or a transfer may still read it
                                                             └─grown over──→ live     under clearance

`docs/life-of-a-page.md` tells the same as a story; a test compares the two and looks up every function.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class PageState(Enum):
    """Where a page of a band stands, and who waits before it gets new bytes.

    Fixed, held and under a copy or transfer are no states: they come on top of one.
    """

    BEYOND = "beyond"
    """Outside the band's span; its bytes are nobody's, or another band's. The next writer waits for nothing."""

    HOLE = "hole"
    """Free inside the span. The next writer waits for what a backup, a load or a transfer still does there, if anything."""

    LIVE = "live"
    """Bound to a virtual page."""

    PENDING = "pending"
    """Freed while a recorded forward was unprocessed; a stream waits for that forward if the page is needed before."""

    VACATED = "vacated"
    """Moved away from, and a forward or a send may still read it; a stream, or the host, waits if it is needed before."""

    FENCED = "fenced"
    """Outside the span, and somebody still reads its bytes; the next writer, of whichever band, waits as `CLEARANCE` says."""


class Arrow(NamedTuple):
    """One change of state. Who waits at it is in the docstring of the function that makes it."""

    source: PageState
    """Before."""

    target: PageState
    """After."""

    when: str
    """What happens."""

    made_by: str
    """The function that makes it, as `package.Class.method`."""


_BAND = "kvtide.chain.band.Band"
_PENDING = "kvtide.ledger.PendingPages"
_STEPS = "kvtide.ledger.ForwardSteps"
_USAGE = "kvtide.ledger.PageUsage"
_WAITS = "kvtide.ledger.queue_stream_waits"
_CLEARANCE = "kvtide.ledger.clearance"

BEYOND, HOLE, LIVE = PageState.BEYOND, PageState.HOLE, PageState.LIVE
PENDING, VACATED, FENCED = PageState.PENDING, PageState.VACATED, PageState.FENCED

PAGE_LIFE: tuple[Arrow, ...] = (
    Arrow(BEYOND, LIVE, "a take grows the span", f"{_BAND}.take"),
    Arrow(HOLE, LIVE, "a take uses it", f"{_BAND}.take"),
    Arrow(LIVE, HOLE, "freed with nothing in flight", f"{_BAND}.free"),
    Arrow(LIVE, PENDING, "freed under a forward", f"{_PENDING}.add"),
    Arrow(PENDING, HOLE, "the forward is processed", f"{_PENDING}.release_through"),
    Arrow(PENDING, HOLE, "settled: a stream waits for the forward", f"{_PENDING}.settle"),
    Arrow(HOLE, BEYOND, "at the span's open side, given back", f"{_BAND}.give_back"),
    Arrow(HOLE, LIVE, "the target of a move", f"{_BAND}.pack_into"),
    Arrow(BEYOND, LIVE, "the target of a move", f"{_BAND}.pack_into"),
    Arrow(BEYOND, HOLE, "the span is laid out over it", f"{_BAND}.pack_into"),
    Arrow(HOLE, BEYOND, "left behind by packing", f"{_BAND}.pack_into"),
    Arrow(LIVE, HOLE, "moved, with no forward or send to read it", f"{_USAGE}.vacate"),
    Arrow(LIVE, VACATED, "moved, and a forward or send may read it", f"{_USAGE}.vacate"),
    Arrow(VACATED, HOLE, "the readers are over", f"{_USAGE}.take_ready_vacated"),
    Arrow(VACATED, FENCED, "the span retreats past it", f"{_USAGE}.fence"),
    Arrow(VACATED, BEYOND, "the span retreats past it, its readers being over", f"{_USAGE}.fence"),
    Arrow(HOLE, FENCED, "given back while a copy or transfer uses it", f"{_USAGE}.fence"),
    Arrow(FENCED, BEYOND, "the forward is processed", f"{_STEPS}.forward_processed"),
    Arrow(FENCED, BEYOND, "the schedule stream waits for the forward", f"{_WAITS}"),
    Arrow(FENCED, BEYOND, "the copy or transfer is ended", f"{_USAGE}.end"),
    Arrow(FENCED, BEYOND, "the transfer's quarantine is over", f"{_USAGE}.unfix"),
    Arrow(FENCED, LIVE, "a band grows over it, under clearance", f"{_CLEARANCE}"),
)
"""Every arrow; two states may be joined by several.

What is grown over under clearance keeps its fence until the reader is over: a backup that a stream was told to wait for, or a
forward behind whose stream the writer stands anyway. A later writer of the bytes is told of it again.
"""
