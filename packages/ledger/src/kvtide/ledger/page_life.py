"""The life of a physical page as a state machine: its states, and every arrow with the function that makes it.

    beyond ⇄ hole ⇄ live         with nothing in flight
                     │
           pending ←─┼─→ vacated ─→ fenced bytes       while somebody may still read or write the page

`docs/life-of-a-page.md` tells the same as a story; a test compares the two and looks up every function.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class PageState(Enum):
    """Where a page of a band stands. Fixed, held and under a copy or transfer are not states: they come on top of one."""

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
    """Outside the span, and somebody still reads its bytes; the next writer, of whichever band, waits for them."""


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
_USAGE = "kvtide.ledger.PageUsage"

PAGE_LIFE: tuple[Arrow, ...] = (
    Arrow(PageState.BEYOND, PageState.LIVE, "take: the frontier grows", f"{_BAND}.take"),
    Arrow(PageState.HOLE, PageState.LIVE, "take", f"{_BAND}.take"),
    Arrow(PageState.LIVE, PageState.HOLE, "free, nothing in flight", f"{_BAND}.free"),
    Arrow(PageState.LIVE, PageState.PENDING, "free under a forward", f"{_PENDING}.add"),
    Arrow(PageState.PENDING, PageState.HOLE, "the forward is processed", f"{_PENDING}.release_through"),
    Arrow(PageState.PENDING, PageState.HOLE, "settled: a stream waits for the forward", f"{_PENDING}.settle"),
    Arrow(
        PageState.HOLE, PageState.BEYOND, "a boundary hole is given back", f"{_BAND}.release_pending_through"
    ),
    Arrow(PageState.LIVE, PageState.HOLE, "moved, no forward or send reads it", f"{_USAGE}.vacate"),
    Arrow(PageState.LIVE, PageState.VACATED, "moved, a forward or send may read it", f"{_USAGE}.vacate"),
    Arrow(PageState.VACATED, PageState.HOLE, "its readers are over", f"{_USAGE}.take_ready_vacated"),
    Arrow(PageState.VACATED, PageState.LIVE, "taken early, under clearance", f"{_USAGE}.take_vacated"),
    Arrow(PageState.VACATED, PageState.FENCED, "the frontier retreats past it", f"{_USAGE}.fence"),
    Arrow(PageState.HOLE, PageState.FENCED, "given back while a copy or send reads it", f"{_USAGE}.fence"),
    Arrow(PageState.FENCED, PageState.BEYOND, "its forward retires, or its reader is ended", f"{_USAGE}.end"),
    Arrow(
        PageState.FENCED, PageState.LIVE, "a band grows over it, under clearance", "kvtide.ledger.clearance"
    ),
)
"""Every arrow. The same two states may be joined by several."""
