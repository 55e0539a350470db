"""The ledger against the dumbest model: a dict from a page to the list of uses that are not over (L4-L7, C8)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtide.device import Event, ImmediateEvent, ImmediateStream, IntArray, UnitGrid
from kvtide.ledger import (
    CLEARANCE,
    Access,
    Clear,
    Consumer,
    FencedBytes,
    ForwardSteps,
    Hazard,
    HostCopy,
    InvariantError,
    LaunchRecord,
    NetworkTransfer,
    PageUsage,
    ReceiveHold,
    choose_holes,
    clearance,
)

PAGE_COUNT = 8
BAND, NEIGHBOUR = UnitGrid(32, 48), UnitGrid(16, 80)
NEIGHBOUR_COUNT = 5
PAGES = st.lists(st.integers(0, PAGE_COUNT - 1), unique=True, max_size=PAGE_COUNT)
STREAM = ImmediateStream("any")

Use = tuple[Hazard | str, object]


def ids(pages: list[int]) -> IntArray:
    return np.array(pages, np.int64)


def bytes_of(grid: UnitGrid, page: int) -> range:
    return range(grid.origin_bytes + page * grid.unit_bytes, grid.origin_bytes + (page + 1) * grid.unit_bytes)


class UsageAgainstADict(RuleBasedStateMachine):
    """Two bands over the same bytes: one whose pages are used, and a neighbour that meets only what was fenced."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = ForwardSteps()
        fences = FencedBytes(self.steps)
        self.usage = PageUsage(self.steps, PAGE_COUNT, name="band", grid=BAND, fences=fences)
        self.neighbour = PageUsage(
            self.steps, NEIGHBOUR_COUNT, name="neighbour", grid=NEIGHBOUR, fences=fences
        )
        self.uses: dict[int, list[Use]] = {page: [] for page in range(PAGE_COUNT)}
        self.byte_uses: list[tuple[int, Use]] = []
        self.flying: list[tuple[LaunchRecord, Event, set[int] | None]] = []
        self.quarantined: list[NetworkTransfer] = []
        self.retired = -1
        self.serial = 0
        self.turn = 0

    # ── the model's questions, page by page ──

    def is_over(self, use: Use) -> bool:
        return use[0] is Hazard.FORWARD and use[1] <= self.retired

    def carried(self, page: int) -> list[Use]:
        """Uses of a page of the band that its next writer meets."""
        fenced = [use for byte, use in self.byte_uses if byte in bytes_of(BAND, page)]
        return [use for use in self.uses[page] + fenced if use[0] in list(Hazard) and not self.is_over(use)]

    def under_transfer(self, page: int) -> bool:
        return any(kind is Hazard.NETWORK for kind, _ in self.uses[page])

    def vacated(self) -> list[int]:
        return [page for page in self.uses if any(kind == "vacated" for kind, _ in self.uses[page])]

    def may_be_written_by_forward(self, page: int) -> bool:
        return any(
            writes is None or page in writes
            for record, _, writes in self.flying
            if record.forward > self.retired
        )

    def is_received(self, page: int) -> bool:
        return any(kind is Hazard.NETWORK and key.access is Access.WRITE for kind, key in self.uses[page])

    def has(self, page: int, kind: Hazard | str) -> bool:
        return any(found == kind for found, _ in self.uses[page])

    def drop(self, page: int, kinds: set[Hazard | str]) -> None:
        self.uses[page] = [use for use in self.uses[page] if use[0] not in kinds]

    # ── forwards ──

    @precondition(lambda self: len(self.flying) < 3)
    @rule(writes=st.none() | PAGES)
    def record_forward(self, writes: list[int] | None) -> None:
        record = self.steps.forward_launched()
        event = ImmediateEvent(STREAM)
        recorded = self.steps.forward_recorded(record, event)
        self.usage.record_forward_writes(recorded, None if writes is None else ids(writes))
        self.flying.append((record, event, None if writes is None else set(writes)))

    @precondition(lambda self: self.flying)
    @rule()
    def process(self) -> None:
        record, event, _ = self.flying.pop(0)
        self.steps.host_synchronised(event)
        self.steps.forward_processed(record)
        self.retired = max(self.retired, record.forward)

    @precondition(lambda self: self.flying)
    @rule(place=st.integers(0, 2))
    def queue_a_wait(self, place: int) -> None:
        record, event, _ = self.flying[min(place, len(self.flying) - 1)]
        self.steps.wait_queued(event)
        self.retired = max(self.retired, record.forward)

    # ── copies, transfers, claims ──

    @rule(pages=PAGES, kind=st.sampled_from([HostCopy, NetworkTransfer]), access=st.sampled_from(Access))
    def record(self, pages: list[int], kind: type, access: Access) -> None:
        name = f"{kind.__name__} {self.serial}"
        self.serial += 1
        signal = (
            HostCopy(name, access, ImmediateEvent(STREAM))
            if kind is HostCopy
            else NetworkTransfer(name, access)
        )
        self.usage.record(signal, ids(pages))
        for page in pages:
            self.uses[page].append((signal.hazard, signal))
        with pytest.raises(InvariantError):
            self.usage.record(signal, ids(pages))

    @precondition(lambda self: self.usage.signals())
    @rule(place=st.integers(0, 20))
    def end(self, place: int) -> None:
        signals = self.usage.signals()
        signal = signals[place % len(signals)]
        pages = [page for page in self.uses if any(key is signal for _, key in self.uses[page])]
        assert sorted(self.usage.end(signal).tolist()) == pages
        for page in pages:
            self.uses[page] = [use for use in self.uses[page] if use[1] is not signal]
        self.byte_uses = [(byte, use) for byte, use in self.byte_uses if use[1] is not signal]
        with pytest.raises(InvariantError):
            self.usage.end(signal)

    @precondition(lambda self: any(isinstance(s, NetworkTransfer) for s in self.usage.signals()))
    @rule(place=st.integers(0, 20))
    def quarantine(self, place: int) -> None:
        transfers = [signal for signal in self.usage.signals() if isinstance(signal, NetworkTransfer)]
        failed = transfers[place % len(transfers)]
        with pytest.raises(InvariantError):
            self.usage.fix(failed, ids([]))
        pages = [page for page in self.uses if any(key is failed for _, key in self.uses[page])]
        assert sorted(self.usage.quarantine(failed).tolist()) == pages
        fixed = (Hazard.FIXED, failed)
        for page in pages:
            self.uses[page] = [fixed if key is failed else (kind, key) for kind, key in self.uses[page]]
        self.byte_uses = [(byte, fixed if use[1] is failed else use) for byte, use in self.byte_uses]
        self.quarantined.append(failed)
        with pytest.raises(InvariantError):
            self.usage.quarantine(failed)

    @precondition(lambda self: self.quarantined)
    @rule(place=st.integers(0, 5))
    def prove(self, place: int) -> None:
        failed = self.quarantined.pop(place % len(self.quarantined))
        pages = [page for page in self.uses if any(key is failed for _, key in self.uses[page])]
        assert sorted(self.usage.unfix(failed).tolist()) == pages
        for page in pages:
            self.uses[page] = [use for use in self.uses[page] if use[1] is not failed]
        self.byte_uses = [(byte, use) for byte, use in self.byte_uses if use[1] is not failed]

    @rule(pages=PAGES, owner=st.sampled_from(["load", "relief"]))
    def fix(self, pages: list[int], owner: str) -> None:
        self.usage.fix(owner, ids(pages))
        for page in pages:
            self.uses[page].append((Hazard.FIXED, owner))

    @rule(owner=st.sampled_from(["load", "relief"]))
    def unfix(self, owner: str) -> None:
        claimed = [page for page in self.uses for use in self.uses[page] if use == (Hazard.FIXED, owner)]
        try:
            assert sorted(self.usage.unfix(owner).tolist()) == claimed
        except InvariantError:
            assert not claimed
        for page in self.uses:
            self.uses[page] = [use for use in self.uses[page] if use != (Hazard.FIXED, owner)]

    @rule(pages=PAGES)
    def hold(self, pages: list[int]) -> None:
        hold = ReceiveHold("receive")
        self.usage.hold(hold, ids(pages))
        for page in pages:
            self.uses[page].append(("held", hold))

    @rule()
    def release_holds(self) -> None:
        holds = {key for uses in self.uses.values() for kind, key in uses if kind == "held"}
        for hold in holds:
            self.usage.release_hold(hold)
        for page in self.uses:
            self.drop(page, {"held"})

    @rule()
    def go_on_in_a_clone(self) -> None:
        """The clone answers from here on; whatever becomes of the original must not show."""
        steps, fences, bands = self.steps, self.usage.fences, (self.usage, self.neighbour)
        self.steps = steps.clone()
        shared = fences.clone(self.steps)
        self.usage, self.neighbour = (band.clone(self.steps, shared) for band in bands)
        everything = np.arange(PAGE_COUNT)
        for signal in bands[0].signals():
            bands[0].end(signal)
        bands[0].fix("original", everything)
        bands[0].hold(ReceiveHold("original"), everything)
        bands[1].record(NetworkTransfer("original", Access.WRITE), np.arange(NEIGHBOUR_COUNT))
        bands[1].fence(np.arange(NEIGHBOUR_COUNT))
        recorded = steps.forward_recorded(steps.forward_launched(), ImmediateEvent(STREAM))
        bands[0].record_forward_writes(recorded, None)
        steps.wait_queued(recorded.event)
        steps.host_synchronised(recorded.event)
        bands[0].take_ready_vacated()

    # ── moves ──

    @rule(pages=PAGES, order=st.none() | st.permutations(range(PAGE_COUNT)))
    def vacate(self, pages: list[int], order: list[int] | None) -> None:
        targets = None if order is None else order[: len(pages)]
        forbidden = [
            page
            for page in pages
            if self.has(page, Hazard.FIXED)
            or self.has(page, "vacated")
            or self.may_be_written_by_forward(page)
            or self.is_received(page)
        ]
        if forbidden:
            with pytest.raises(InvariantError):
                self.usage.vacate(ids(pages), None if targets is None else ids(targets))
            return
        if targets is None and any(self.has(page, "held") for page in pages):
            with pytest.raises(InvariantError):
                self.usage.vacate(ids(pages))
            targets = pages[::-1]
        newest = self.flying[-1][0].forward if self.flying else -1
        ready = self.usage.vacate(ids(pages), None if targets is None else ids(targets)).tolist()
        held = [[use for use in self.uses[page] if use[0] == "held"] for page in pages]
        for page in pages:
            self.drop(page, {"held"})
        for page, uses in zip(targets or (), held, strict=bool(targets)):
            self.uses[page] += uses
        stay = [page for page in pages if newest > self.retired or self.under_transfer(page)]
        assert ready == [page for page in pages if page not in stay]
        for page in stay:
            self.uses[page].append(("vacated", None))
            if newest > self.retired:
                self.uses[page].append((Hazard.FORWARD, newest))

    @rule()
    def take_ready(self) -> None:
        ready = [
            page
            for page in self.vacated()
            if not self.under_transfer(page)
            and all(self.is_over(use) for use in self.uses[page] if use[0] is Hazard.FORWARD)
        ]
        assert sorted(self.usage.take_ready_vacated().tolist()) == ready
        for page in ready:
            self.drop(page, {"vacated", Hazard.FORWARD})

    @rule(pages=PAGES)
    def fence(self, pages: list[int]) -> None:
        if any(self.has(page, Hazard.FIXED) for page in pages):
            with pytest.raises(InvariantError):
                self.usage.fence(ids(pages))
            return
        self.usage.fence(ids(pages))
        for page in pages:
            for use in self.uses[page]:
                if use[0] in list(Hazard) and not self.is_over(use):
                    self.byte_uses += [(byte, use) for byte in bytes_of(BAND, page)]
            self.drop(page, {"vacated", *Hazard})

    # ── questions ──

    @rule(pages=PAGES, consumer=st.sampled_from(Consumer))
    def ask_clearance(self, pages: list[int], consumer: Consumer) -> None:
        self.compare(consumer, self.usage, {page: self.carried(page) for page in pages})

    @rule(
        pages=st.lists(st.integers(0, NEIGHBOUR_COUNT - 1), unique=True), consumer=st.sampled_from(Consumer)
    )
    def ask_the_neighbours_clearance(self, pages: list[int], consumer: Consumer) -> None:
        carried = {
            page: [
                use
                for byte, use in self.byte_uses
                if byte in bytes_of(NEIGHBOUR, page) and not self.is_over(use)
            ]
            for page in pages
        }
        self.compare(consumer, self.neighbour, carried)

    def compare(self, consumer: Consumer, usage: PageUsage, carried: dict[int, list[Use]]) -> None:
        row = CLEARANCE[consumer]
        binding = {
            page: {(row[kind], key) for kind, key in uses if row[kind] is not Clear.NONE}
            for page, uses in carried.items()
        }
        excluded = [page for page, bound in binding.items() if any(c is Clear.EXCLUDED for c, _ in bound)]
        bound = {use for page in binding if page not in excluded for use in binding[page]}
        forwards = {clear: [k for c, k in bound if c is clear and isinstance(k, int)] for clear in Clear}
        events = {key.finish for clear, key in bound if isinstance(key, HostCopy)}
        if forwards[Clear.STREAM_WAIT]:
            newest = max(forwards[Clear.STREAM_WAIT])
            events.add(next(event for record, event, _ in self.flying if record.forward == newest))

        found = clearance(consumer, usage, ids(list(carried)))
        assert found.free_to_go.tolist() == [page for page in binding if not binding[page]]
        assert found.excluded.tolist() == excluded
        assert len(found.stream_waits) == len(events)
        assert set(found.stream_waits) == events
        assert len(found.host_waits) == len(set(found.host_waits))
        assert set(found.host_waits) == {key for clear, key in bound if clear is Clear.HOST_WAIT}
        assert found.publish_after == max(forwards[Clear.AFTER_RETIRE], default=-1)

    @rule(pages=PAGES, page_count=st.integers(0, PAGE_COUNT), consumer=st.sampled_from(Consumer))
    def choose(self, pages: list[int], page_count: int, consumer: Consumer) -> None:
        row = CLEARANCE[consumer]
        groups: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for page in pages:
            answers = {row[kind] for kind, _ in self.carried(page) if "COPY" not in kind.name}
            if Clear.EXCLUDED in answers:
                continue
            place = 2 if Clear.HOST_WAIT in answers else 1 if answers - {Clear.NONE} else 0
            groups[place].append(page)
        choice = choose_holes(consumer, self.usage, ids(pages), page_count)
        assert choice.pages.tolist() == (groups[0] + groups[1] + groups[2])[:page_count]
        assert choice.clear_count == min(page_count, len(groups[0]))
        assert choice.after_forward_count == min(page_count - choice.clear_count, len(groups[1]))

    @invariant()
    def questions_are_answered_after_every_step(self) -> None:
        """In turn by consumer and page, so that every state is asked about and a question leaves nothing behind."""
        self.turn += 1
        page = self.turn % PAGE_COUNT
        consumer = list(Consumer)[self.turn % len(Consumer)]
        self.ask_what_a_move_waits_for([page])
        self.compare(consumer, self.usage, {page: self.carried(page)})
        self.compare(consumer, self.usage, {page: self.carried(page) for page in range(PAGE_COUNT)})

    @rule(pages=PAGES)
    def move_questions(self, pages: list[int]) -> None:
        self.ask_what_a_move_waits_for(pages)

    def ask_what_a_move_waits_for(self, pages: list[int]) -> None:
        found = self.usage.writers(ids(pages))
        writing = [
            record.forward
            for record, _, writes in self.flying
            if record.forward > self.retired and pages and (writes is None or set(pages) & writes)
        ]
        keys = {key for page in pages for kind, key in self.uses[page] if kind is not Hazard.FIXED}
        assert (found.forward.forward if found.forward else -1) == max(writing, default=-1)
        assert set(found.copies) == {k for k in keys if isinstance(k, HostCopy) and k.access is Access.WRITE}
        assert set(found.transfers) == {
            k for k in keys if isinstance(k, NetworkTransfer) and k.access is Access.WRITE
        }
        assert self.usage.stopping(ids(pages)).tolist() == [
            self.may_be_written_by_forward(page)
            or self.is_received(page)
            or self.has(page, Hazard.COPY_WRITE)
            or self.has(page, Hazard.FIXED)
            or self.has(page, "held")
            for page in pages
        ]

    @invariant()
    def sets_agree(self) -> None:
        assert sorted(self.usage.vacated_pages().tolist()) == self.vacated()
        for found, kind in (
            (self.usage.fixed_pages(), Hazard.FIXED),
            (self.usage.held_pages(), "held"),
            (self.usage.transfer_pages(), Hazard.NETWORK),
        ):
            assert found.tolist() == [page for page in self.uses if self.has(page, kind)]
        at_rest = not any(self.uses.values()) and not self.usage.signals()
        if at_rest and not self.usage.has_holds:
            # An owner or signal that names no page is no less open, and the model does not know of it.
            assert all("fixes" in line for line in self.usage.open_uses())


@pytest.mark.requirement("L4", "L5", "L6", "L7", "C8", "C13")
def test_any_run_of_uses_answers_as_a_dict_of_lists_would() -> None:
    """Which pages are free to go, what they wait for, what a move waits for and leaves behind, whoever asks and whenever."""
    run_state_machine_as_test(
        UsageAgainstADict, settings=settings(max_examples=120, stateful_step_count=50, deadline=None)
    )
