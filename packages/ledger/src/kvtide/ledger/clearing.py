"""What a consumer must wait for before it writes pages, and which free pages it should take (rows L5, C8).

Both read the ledger and change nothing. The decision follows counts, forwards retired and transfers released, never an event
(D5); `queue_stream_waits`, which carries a clearance out, may leave out a wait for an event that has been reached.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.device import Device, Event, IntArray, Stream
from kvtide.ledger.clearance_table import CLEARANCE, Clear, ClearanceTable, Consumer, Hazard
from kvtide.ledger.page_usage import PageUsage
from kvtide.ledger.signals import NetworkTransfer

_NO_PAGES: IntArray = np.empty(0, np.int64)
_NO_FORWARD = -1
_FEW = 64  # holes, below which looking at them in parts costs more than it saves

# Plain integers: comparing an array with an enum's member, or hashing one, costs as much as the rest of the question.
_NONE, _STREAM_WAIT, _AFTER_RETIRE, _HOST_WAIT, _EXCLUDED = map(int, Clear)
_COPY_READ, _COPY_WRITE = int(Hazard.COPY_READ), int(Hazard.COPY_WRITE)
_GROUP_OF = np.zeros(len(Clear), np.int8)
"""By answer: 0 for holes to take first, 1 for those behind a forward, 2 for those behind a transfer, 3 for those left out."""
_GROUP_OF[[Clear.STREAM_WAIT, Clear.AFTER_RETIRE, Clear.HOST_WAIT, Clear.EXCLUDED]] = (1, 1, 2, 3)


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
    """The newest forward that may read what a move left in the pages, for a consumer that publishes their ids; −1 for none.

    The ids leave the process only behind a gate that was recorded once `retired_through` had reached it, or behind any gate for
    −1. Nobody waits for it here: publication comes later. It stays so for whoever asks again after the take, until the forward
    retires. A gate from before the retirement proves nothing, since the schedule stream's wait, which may be what retired the
    forward, stands behind it.
    """


class HoleChoice(NamedTuple):
    """Free pages for a consumer, best first. Whom they wait for is `clearance`'s to say, once they are chosen."""

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
    waited for. `table` is `CLEARANCE` unless a test weakens it. Raises `InvariantError` for a page outside the band.
    """
    if usage.is_clear:
        usage.check_pages(pages)
        return Clearance(pages, _NO_PAGES, (), (), _NO_FORWARD)
    hazards = usage.hazards_on(pages)
    if not len(hazards.places):
        return Clearance(pages, _NO_PAGES, (), (), _NO_FORWARD)
    answers = _answers(table, consumer)
    strictest = _strictest(len(pages), hazards.places, hazards.kinds, answers)
    if strictest.max() == _EXCLUDED:
        # What only the excluded pages carry binds nobody, so the question is put again without them.
        excluded = strictest == _EXCLUDED
        rest = clearance(consumer, usage, pages[~excluded], table)
        return rest._replace(excluded=pages[excluded])
    answer_to: list[int] = answers.tolist()
    newest = hazards.newest_forward
    forward = answer_to[Hazard.FORWARD] if newest != _NO_FORWARD else _NONE
    waits: dict[int, Event] = {}
    transfers = []
    for signal in hazards.signals:
        answer = answer_to[signal.hazard]
        if isinstance(signal, NetworkTransfer):
            if answer == _HOST_WAIT:
                transfers.append(signal)
        elif answer == _STREAM_WAIT:
            waits[id(signal.finish)] = signal.finish
    if forward == _STREAM_WAIT:
        event = usage.steps.recorded(newest).event
        waits[id(event)] = event
    return Clearance(
        free_to_go=pages[strictest == _NONE],
        excluded=_NO_PAGES,
        stream_waits=tuple(waits.values()),
        host_waits=tuple(transfers),
        publish_after=newest if forward == _AFTER_RETIRE else _NO_FORWARD,
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
    one ends is not the same on every rank. Raises `InvariantError` for a page outside the band among those looked at, which are no
    more than the choice needs.
    """
    if not usage.steers_choice:
        chosen = holes[:page_count]
        usage.check_pages(chosen)
        return HoleChoice(chosen, len(chosen), 0)
    answers = _answers(table, consumer)
    # Holes are looked at in growing parts, and no further than to as many of the best as are asked for.
    parts: list[npt.NDArray[np.int8]] = []
    seen = clear = 0
    while not parts or (clear < page_count and seen < len(holes)):
        parts.append(_groups(usage, holes[seen : seen + max(seen, 2 * page_count, _FEW)], answers))
        seen += len(parts[-1])
        clear += len(parts[-1]) - int(np.count_nonzero(parts[-1]))
    groups = parts[0] if len(parts) == 1 else np.concatenate(parts)
    first, behind_forward, behind_transfer, _ = np.bincount(groups, minlength=4).tolist()
    chosen_count = min(page_count, first + behind_forward + behind_transfer)
    order = np.argsort(groups, kind="stable")[:chosen_count]
    clear_count = min(chosen_count, first)
    return HoleChoice(holes[order], clear_count, min(chosen_count - clear_count, behind_forward))


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


def _groups(usage: PageUsage, holes: IntArray, answers: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """The group of each hole, as `_GROUP_OF` numbers them."""
    hazards = usage.hazards_on(holes)
    kinds = hazards.kinds
    logical = (kinds != _COPY_READ) & (kinds != _COPY_WRITE)
    groups: npt.NDArray[np.int8] = _GROUP_OF[
        _strictest(len(holes), hazards.places[logical], kinds[logical], answers)
    ]
    return groups


def _strictest(
    page_count: int, places: IntArray, kinds: npt.NDArray[np.int8], answers: npt.NDArray[np.int8]
) -> npt.NDArray[np.int8]:
    """What binds each page: the strictest answer to the hazards that it carries."""
    strictest = np.zeros(page_count, np.int8)
    np.maximum.at(strictest, places, answers[kinds])
    return strictest


def _answers(table: ClearanceTable, consumer: Consumer) -> npt.NDArray[np.int8]:
    """A consumer's row by hazard number."""
    if table is CLEARANCE:
        return _ANSWERS[consumer]
    return np.array([table[consumer][hazard] for hazard in Hazard], np.int8)


_ANSWERS = {
    consumer: np.array([CLEARANCE[consumer][hazard] for hazard in Hazard], np.int8) for consumer in Consumer
}
