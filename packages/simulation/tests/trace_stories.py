"""The cases that matter, as stories: each drives an allocator, and asserts that it shows what it is kept for.

Their traces are shipped (`kvtide.simulation.traces.STORIES`), and replayed by whoever changes or replaces the allocator. After a
change of a story, or a change of the allocator that is meant: `python -m pytest packages/simulation/tests/test_traces.py` with
KVTIDE_WRITE_STORIES=1 writes them anew.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvtide.chain import BandTake, ChainAllocator, Taken, TakeRefusal
from kvtide.device import IntArray, NumpyDevice
from kvtide.ledger import (
    Access,
    ForwardSteps,
    HostCopy,
    LaunchRecord,
    NetworkTransfer,
    ReceiveHold,
    Reservation,
)
from kvtide.simulation import BandDraft, Scenario
from kvtide.simulation.traces import TraceHeader, TraceRecorder

NONE = np.empty(0, np.int64)


def ids(*units: int) -> IntArray:
    return np.array(units, np.int64)


class Story:
    """An allocator that is recorded, and a scheduler's few words for it."""

    def __init__(
        self, about: str, bands: Sequence[BandDraft], arena_bytes: int, *, waits: bool = False
    ) -> None:
        layout = Scenario(
            bands=tuple(bands),
            arena_bytes=arena_bytes,
            row_count=1,
            overlap=2,
            declares_read_end=True,
            rank_seeds=(0,),
            random_queries=False,
        ).layout()
        self.layout = layout
        self.device = NumpyDevice(layout.arena_bytes, byte_work=False)
        lengths = {f"ids:{band.name}": layout.id_count(band) for band in layout.bands}
        chain = ChainAllocator(
            layout,
            self.device,
            self.device.create_mirrors(lengths),
            ForwardSteps(),
            wait_for_transfers=self._wait if waits else None,
        )
        self.out = io.StringIO()
        recorder = TraceRecorder(
            self.out, TraceHeader(layout=layout, waits_for_transfers=waits, about=about), chain
        )
        self.chain: Any = recorder.chain
        self.steps: Any = recorder.steps
        self.waited: list[str] = []

    def _wait(self, transfers: Sequence[NetworkTransfer]) -> None:
        for transfer in transfers:
            self.chain.uses.end(transfer)
            self.waited.append(transfer.name)

    def take(self, pages: int = 0, slots: int = 0, **bands: BandTake) -> Taken:
        taken = self.chain.take(pages=pages, state_slots=slots, bands=_named(bands))
        assert isinstance(taken, Taken), taken
        return taken

    def refused(self, pages: int = 0, slots: int = 0) -> TakeRefusal:
        taken = self.chain.take(pages=pages, state_slots=slots)
        assert isinstance(taken, TakeRefusal)
        return taken

    def launch(self, **writes: IntArray | None) -> tuple[LaunchRecord, Any]:
        record = self.steps.forward_launched()
        event = self.device.record_event(self.device.forward_stream)
        recorded = self.steps.forward_recorded(record, event)
        self.chain.forward_recorded(recorded, _named(writes) or {})
        return record, event

    def process(self, flying: tuple[LaunchRecord, Any]) -> None:
        record, event = flying
        self.steps.host_synchronised(event)
        self.steps.forward_processed(record)
        self.chain.forward_processed(record.forward)

    def send(self, **units: IntArray) -> NetworkTransfer:
        send = NetworkTransfer("send", Access.READ)
        self.chain.uses.begin(send, _named(units))
        return send

    def back_up(self, **units: IntArray) -> HostCopy:
        copy = HostCopy("backup", Access.READ, self.device.record_event(self.device.schedule_stream))
        self.chain.uses.begin(copy, _named(units))
        return copy

    def moved(self) -> int:
        moved: int = self.chain.statistics().moved_units
        return moved

    def figures(self, band: str) -> Any:
        return next(each for each in self.chain.statistics().bands if each.name == band)


def _named(bands: Mapping[str, Any]) -> dict[str, Any] | None:
    """`window_4` is how a keyword spells `window-4`."""
    return {name.replace("_", "-"): value for name, value in bands.items()} or None


STATE = BandDraft(kind="state", entry_bytes=96)
FULL = BandDraft(kind="full", entry_bytes=48)


def window(tokens: int, entry_bytes: int = 32) -> BandDraft:
    return BandDraft(kind="window", window_tokens=tokens, entry_bytes=entry_bytes)


def state_slots_exhausted() -> Story:
    story = Story(
        "state slots are gone while pages could be had; one freed slot is enough", [STATE, FULL], 48 + 96 * 4
    )
    taken = story.take(slots=4)
    assert story.chain.units_fit({"full": 1}) is False
    story.refused(slots=1)
    story.refused(pages=1)
    story.chain.free_state_slots(taken.state_slots[1:2])
    story.take(pages=1)
    assert story.moved() == 1, "the slot at the far end moves into the hole"
    story.refused(slots=1)
    return story


def float_in_the_way() -> Story:
    story = Story(
        "a float stands in the middle; a slot that fits beside it only once it is relocated",
        [STATE, window(4), FULL],
        96 + 96 * 4 + 32,
    )
    first = story.take(pages=2)
    assert story.moved() == 0
    assert story.chain.units_fit({"state": 2})
    flying = story.launch(window_4=first.pages, full=first.pages)
    story.take(slots=2)
    assert story.moved() > 0
    story.process(flying)
    story.chain.free_pages("window-4", first.pages)
    story.chain.free_pages("full", first.pages)
    assert story.figures("window-4").span_units == 0, "it is transparent again"
    story.take(slots=1)
    return story


def window_pressure() -> Story:
    story = Story(
        "only windows want room: pages minted before get their window pages back, in holes that a forward left",
        [window(8), FULL],
        80 + 32 * 6 + 48 * 4,
    )
    taken = story.take(pages=4)
    flying = story.launch(window_8=taken.pages, full=taken.pages)
    story.chain.free_pages("window-8", taken.pages[:3])
    assert story.figures("window-8").pending_units == 3
    story.take(window_8=BandTake(fresh=NONE, held=taken.pages[:3]))
    assert story.figures("window-8").settles + story.figures("window-8").span_units > 4
    story.process(flying)
    story.chain.free_pages("window-8", taken.pages[1:3])
    story.chain.flush_opportunistic(16)
    story.refused(pages=8)
    return story


def fixed_page_in_the_middle() -> Story:
    story = Story(
        "a fixed page in the middle of an end: relief packs around it, and gives up where it cannot",
        [STATE, FULL],
        48 + 96 * 5,
    )
    taken = story.take(pages=8)
    story.chain.uses.fix("somebody", {"full": taken.pages[3:4]})
    story.chain.free_pages("full", taken.pages[[0, 1, 2, 4, 5, 6]])
    story.take(slots=2)
    assert story.moved() >= 1
    story.refused(slots=2)
    story.chain.uses.unfix("somebody")
    story.take(slots=1)
    return story


def chain_without_full_band() -> Story:
    story = Story(
        "two windows and no full attention: a virtual page returns once the last band lets go of it",
        [window(16, 48), window(4)],
        80 + 48 * 3 + 32 * 3,
    )
    taken = story.take(pages=3)
    minted = story.chain.statistics().free_page_ids
    story.chain.free_pages("window-16", taken.pages[:2])
    assert story.chain.statistics().free_page_ids == minted
    story.chain.free_pages("window-4", taken.pages[:1])
    assert story.chain.statistics().free_page_ids == minted + 1
    story.take(pages=1)
    story.take(window_16=BandTake(fresh=NONE, held=taken.pages[1:2]))
    story.refused(pages=3)
    return story


def transfer_that_relief_waits_for() -> Story:
    story = Story(
        "no layout goes around a send: the host waits for it, inside the take",
        [STATE, FULL],
        48 + 96 * 4,
        waits=True,
    )
    taken = story.take(pages=8)
    story.send(full=taken.pages[5:6])
    story.chain.free_pages("full", taken.pages[:5])
    story.take(slots=1)
    assert not story.waited, "around the send there was room"
    story.take(slots=1)
    assert story.waited == ["send"]
    assert story.moved() >= 1
    return story


def flush_under_a_send() -> Story:
    story = Story(
        "a flush moves a page that a send and a backup read: the source stays unused until the send is over",
        [STATE, FULL],
        48 + 96 * 6,
    )
    taken = story.take(pages=6)
    send = story.send(full=taken.pages[5:])
    copy = story.back_up(full=taken.pages[4:5])
    story.chain.free_pages("full", taken.pages[:2])
    assert story.chain.flush_opportunistic(8) == 2
    story.take(slots=1)
    story.chain.uses.end(copy)
    story.chain.uses.end(send)
    story.take(slots=2)
    return story


def quarantined_pages() -> Story:
    story = Story(
        "a receive fails: its pages are freed and stay nobody's until it is proved that the peer is done",
        [STATE, FULL],
        48 + 96 * 4,
    )
    taken = story.take(pages=4, full=BandTake(unwritten=NONE))
    hold = ReceiveHold("receive")
    story.chain.uses.hold(hold, {"full": taken.pages})
    receive = NetworkTransfer("receive", Access.WRITE)
    story.chain.uses.begin(receive, {"full": taken.pages})
    story.chain.uses.release_hold(hold)
    story.chain.written(taken)
    story.chain.uses.quarantine(receive)
    story.chain.free_pages("full", taken.pages)
    assert story.figures("full").withheld_units == 4
    story.refused(slots=3)
    story.take(slots=2)
    story.chain.uses.unfix(receive)
    story.take(slots=1)
    return story


def reservation_ends_with_its_load() -> Story:
    story = Story(
        "a load's pages are reserved, then copied into, then ordinary: neither freed nor moved too early",
        [STATE, FULL],
        48 + 96 * 4,
    )
    gap = story.take(pages=3)
    taken = story.take(pages=2, full=BandTake(unwritten=NONE))
    reservation = Reservation("load")
    story.chain.uses.fix(reservation, {"full": taken.pages})
    story.chain.free_pages("full", gap.pages)
    story.refused(slots=3)
    load = HostCopy("load", Access.WRITE, story.device.record_event(story.device.schedule_stream))
    story.chain.uses.begin(load, {"full": taken.pages})
    story.chain.uses.unfix(reservation)
    story.chain.written(taken)
    assert story.chain.flush_opportunistic(8) == 0, "a flush moves nothing that a load writes"
    story.take(slots=3)
    assert story.moved() == 2, "a relief does, behind the load"
    story.chain.uses.end(load)
    return story


TELLERS: dict[str, Callable[[], Story]] = {
    "state-slots-exhausted": state_slots_exhausted,
    "float-in-the-way": float_in_the_way,
    "window-pressure": window_pressure,
    "fixed-page-in-the-middle": fixed_page_in_the_middle,
    "chain-without-full-band": chain_without_full_band,
    "transfer-that-relief-waits-for": transfer_that_relief_waits_for,
    "flush-under-a-send": flush_under_a_send,
    "quarantined-pages": quarantined_pages,
    "reservation-ends-with-its-load": reservation_ends_with_its_load,
}
