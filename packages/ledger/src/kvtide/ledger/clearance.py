"""What a consumer must wait for before it writes pages, and which free pages it should take (rows L5, C8).

Both read the ledger and change nothing. The decision follows counts, forwards retired and transfers released, never an event
(D5); `queue_stream_waits`, which carries a clearance out, may leave out a wait for an event that has been reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.device import Device, Event, IntArray, Stream
from kvtide.ledger.clearance_table import CLEARANCE, Clear, ClearanceTable, Consumer, Hazard
from kvtide.ledger.page_usage import PageUsage
from kvtide.ledger.signals import HostCopy, NetworkTransfer

_NO_PAGES: IntArray = np.empty(0, np.int64)
_NO_FORWARD = -1


class Clearance(NamedTuple):
    """What stands between a consumer and its pages. It is an answer: nothing has been waited for yet."""

    free_to_go: IntArray
    """Pages that the consumer may write at once; in the order asked."""

    excluded: IntArray
    """Pages that it must not write at all; in the order asked."""

    stream_waits: tuple[Event, ...]
    """Events that the consumer's stream waits for before it writes; the host goes on."""

    host_waits: tuple[NetworkTransfer, ...]
    """Transfers that the host waits for, outside every stream, before anything is queued."""

    publish_after: int
    """The ids may leave the process only once this forward has retired; −1 for at once. Nobody waits: publication comes later."""


class HoleChoice(NamedTuple):
    """Free pages for a consumer, best first. What they must clear is `clearance`'s to say, once they are chosen."""

    pages: IntArray
    """At most as many as were asked for; fewer if the holes are short."""

    clear_count: int
    """The first so many make nobody wait for an unretired forward or an unreleased transfer."""

    after_forward_count: int
    """The next so many wait for an unretired forward: a stream, or the publication of their ids. The rest make the host wait."""


def clearance(
    consumer: Consumer, usage: PageUsage, pages: IntArray, table: ClearanceTable = CLEARANCE
) -> Clearance:
    """What `consumer` must do before it writes `pages`; asking waits for nothing, neither on the host nor on a stream.

    Pages excluded bring no waits of their own. Forwards run in order on one stream, so of several the newest one's event is
    waited for. `table` is `CLEARANCE` unless a test weakens it.
    """
    if usage.is_clear:
        return Clearance(pages, _NO_PAGES, (), (), _NO_FORWARD)
    hazards = usage.hazards_on(pages)
    if not len(hazards.places):
        return Clearance(pages, _NO_PAGES, (), (), _NO_FORWARD)
    row = table[consumer]
    strictest = _strictest(len(pages), hazards.places, hazards.kinds, row)
    excluded = strictest == Clear.EXCLUDED
    if excluded.any():
        # What only the excluded pages carry binds nobody, so the question is put again without them.
        rest = clearance(consumer, usage, pages[~excluded], table)
        return rest._replace(excluded=pages[excluded])
    newest = hazards.newest_forward
    forward = row[Hazard.FORWARD] if newest != _NO_FORWARD else Clear.NONE
    waits = [
        s.finish for s in hazards.signals if isinstance(s, HostCopy) and row[s.hazard] is Clear.STREAM_WAIT
    ]
    if forward is Clear.STREAM_WAIT:
        waits.append(usage.steps.recorded(newest).event)
    transfers = [s for s in hazards.signals if isinstance(s, NetworkTransfer)]
    return Clearance(
        free_to_go=pages[strictest == Clear.NONE],
        excluded=_NO_PAGES,
        stream_waits=tuple({id(event): event for event in waits}.values()),
        host_waits=tuple(transfers) if row[Hazard.NETWORK] is Clear.HOST_WAIT else (),
        publish_after=newest if forward is Clear.AFTER_RETIRE else _NO_FORWARD,
    )


def choose_holes(
    consumer: Consumer,
    usage: PageUsage,
    holes: IntArray,
    page_count: int,
    table: ClearanceTable = CLEARANCE,
) -> HoleChoice:
    """The best `page_count` of `holes`, free pages in the order in which the band prefers them; nobody waits for the choice.

    First those that make `consumer` wait for no unretired forward and no unreleased transfer, then those behind a forward, last
    those for which the host would wait; each group in the band's order, excluded pages left out. Host copies play no part: when
    one ends is not the same on every rank. Vacated pages may stand among the holes (then `PageUsage.take_vacated` follows).
    """
    if usage.is_clear:
        chosen = holes[:page_count]
        return HoleChoice(chosen, len(chosen), 0)
    hazards = usage.hazards_on(holes)
    logical = (hazards.kinds != Hazard.COPY_READ) & (hazards.kinds != Hazard.COPY_WRITE)
    strictest = _strictest(len(holes), hazards.places[logical], hazards.kinds[logical], table[consumer])
    groups = (
        holes[strictest == Clear.NONE],
        holes[(strictest == Clear.STREAM_WAIT) | (strictest == Clear.AFTER_RETIRE)],
        holes[strictest == Clear.HOST_WAIT],
    )
    clear_count = min(page_count, len(groups[0]))
    after_forward_count = min(page_count - clear_count, len(groups[1]))
    return HoleChoice(np.concatenate(groups)[:page_count], clear_count, after_forward_count)


def queue_stream_waits(found: Clearance, usage: PageUsage, device: Device, stream: Stream) -> int:
    """Make `stream` wait for `found.stream_waits`; how many waits were queued. The host does not wait.

    An event that has been reached needs no wait: that saves work and changes no decision, since a forward waited for on the
    schedule stream retires either way. `found.host_waits` are the caller's, before this.
    """
    queued = 0
    for event in found.stream_waits:
        if not device.query_event(event):
            device.wait_event(stream, event)
            queued += 1
        if stream == device.schedule_stream:
            usage.steps.wait_queued(event)
    return queued


def _strictest(
    page_count: int, places: IntArray, kinds: npt.NDArray[np.int8], row: Mapping[Hazard, Clear]
) -> npt.NDArray[np.int8]:
    """What binds each page: the strictest answer to the hazards that it carries."""
    answers = np.array([row[hazard] for hazard in Hazard], np.int8)
    strictest = np.zeros(page_count, np.int8)
    np.maximum.at(strictest, places, answers[kinds])
    return strictest
