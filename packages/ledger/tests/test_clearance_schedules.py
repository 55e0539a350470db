"""Every cell of `CLEARANCE`, proved by the schedule that it prevents (L5).

For each consumer and hazard one schedule runs twice on the modelled device, by the same code: with the table as it is, where
nothing may be reported, and with that one cell weakened to "none", where the race must be. A cell that says "none" relies on
another rule instead; there the second run breaks that rule.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from kvtide.device import IntArray, ModelledDevice, ModelledEvent, ModelledStream, Race, UnitGrid
from kvtide.ledger import (
    CLEARANCE,
    REASONS,
    Access,
    Clear,
    ClearanceTable,
    Consumer,
    FencedBytes,
    ForwardSteps,
    Hazard,
    HostCopy,
    LaunchRecord,
    NetworkTransfer,
    PageUsage,
    PendingPages,
    Reservation,
    choose_holes,
    clearance,
    queue_stream_waits,
)

GRID = UnitGrid(0, 64)
PAGE, TARGET, SPARE, ELSEWHERE = 3, 6, 5, 7


def ids(*pages: int) -> IntArray:
    return np.array(pages, np.int64)


class Scene:
    """One band of eight pages on the modelled device; `PAGE` carries the hazard and stands first among the holes."""

    def __init__(self, table: ClearanceTable = CLEARANCE, *, broken_rule: Consumer | None = None) -> None:
        self.table = table
        self.broken_rule = broken_rule
        self.device = ModelledDevice(8 * GRID.unit_bytes, raise_races=False)
        self.copies = self.device.create_stream("copies")
        self.loads = self.device.create_stream("loads")
        self.steps = ForwardSteps()
        self.usage = PageUsage(self.steps, 8, name="full", grid=GRID)
        self.host_pool = self.device.create_buffer("host pool", 8 * GRID.unit_bytes)
        self.in_flight: list[tuple[LaunchRecord, ModelledEvent]] = []
        self.transfers: dict[NetworkTransfer, ModelledEvent] = {}
        self.after_choice: Callable[[], None] = lambda: None
        """What the hazard's own work does between the consumer's choice and its write."""
        self.written: list[int] = []

    def spans(self, page: int) -> tuple:
        return self.device.unit_spans(GRID, ids(page))

    def behind(self, stream: ModelledStream, *others: ModelledStream) -> None:
        for other in others:
            self.device.wait_event(stream, self.device.record_event(other))

    def forward(
        self,
        *,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
        stream: ModelledStream | None = None,
    ) -> None:
        """Launched behind an upload, so behind all that the schedule stream was given (K4)."""
        stream = stream or self.device.forward_stream
        self.behind(stream, self.device.schedule_stream)
        record = self.steps.forward_launched()
        self.device.submit(
            stream,
            f"forward {record.forward}",
            reads=[span for page in reads for span in self.spans(page)],
            writes=[span for page in writes for span in self.spans(page)],
        )
        event = self.device.record_event(stream)
        self.steps.forward_recorded(record, event)
        self.usage.record_forward_writes(self.steps.newest_recorded, ids(*writes))
        self.in_flight.append((record, event))

    def process(self) -> None:
        record, event = self.in_flight.pop(0)
        self.device.wait_on_host(event)
        self.steps.host_synchronised(event)
        self.steps.forward_processed(record)

    def copy(self, access: Access, page: int) -> HostCopy:
        """A backup or load; its stream stands behind the forward and schedule streams (H1, H2, K3)."""
        self.behind(self.copies, self.device.forward_stream, self.device.schedule_stream)
        name = "backup" if access is Access.READ else "load"
        here, there = self.spans(page), (self.host_pool.span(0, GRID.unit_bytes),)
        source, target = (here, there) if access is Access.READ else (there, here)
        self.device.copy_spans(self.copies, name, source, target)
        return HostCopy(name, access, self.device.record_event(self.copies))

    def transfer(self, access: Access, page: int) -> NetworkTransfer:
        """A send or receive, begun by the host behind a gate on the schedule stream (T4)."""
        self.device.wait_on_host(self.device.record_event(self.device.schedule_stream))
        name = "send" if access is Access.READ else "receive"
        spans = {"reads" if access is Access.READ else "writes": self.spans(page)}
        transfer = NetworkTransfer(name, access)
        self.transfers[transfer] = self.device.start_transfer(name, **spans)
        return transfer

    def wait_for_transfers(self, transfers: tuple[NetworkTransfer, ...]) -> None:
        for transfer in transfers:
            self.device.wait_on_host(self.transfers[transfer])
            self.usage.end(transfer)

    def consume(self, consumer: Consumer) -> tuple[Race, ...]:
        """Choose a hole, clear it, write it; then let everything run."""
        choice = choose_holes(consumer, self.usage, ids(PAGE, SPARE), 1, self.table).pages
        found = clearance(consumer, self.usage, choice, self.table)
        self.after_choice()
        self.wait_for_transfers(found.host_waits)
        self.written = choice.tolist()
        WRITES[consumer](self, int(choice[0]), found)
        self.device.run_all()
        return self.device.races


# ── hazards: each leaves PAGE a hole, or vacated, under a use that is not over ──


def forward_reads_what_a_move_left(scene: Scene) -> None:
    scene.forward(reads=(PAGE,))
    scene.device.copy_units(scene.device.schedule_stream, GRID, ids(PAGE), ids(TARGET))
    assert scene.usage.vacate(ids(PAGE)).tolist() == []


def backup_reads(scene: Scene) -> None:
    scene.usage.record(scene.copy(Access.READ, PAGE), ids(PAGE))


def load_writes(scene: Scene) -> None:
    scene.usage.record(scene.copy(Access.WRITE, PAGE), ids(PAGE))


def send_reads(scene: Scene) -> None:
    scene.usage.record(scene.transfer(Access.READ, PAGE), ids(PAGE))


def receive_writes(scene: Scene) -> None:
    scene.usage.record(scene.transfer(Access.WRITE, PAGE), ids(PAGE))


def load_has_reserved(scene: Scene) -> None:
    """Its copy is submitted while the consumer is between its choice and its write."""
    reservation = Reservation("load of node 7")
    scene.usage.fix(reservation, ids(PAGE))

    def submit() -> None:
        scene.usage.record(scene.copy(Access.WRITE, PAGE), ids(PAGE))
        scene.usage.unfix(reservation)

    scene.after_choice = submit


def failed_transfer_may_still_write(scene: Scene) -> None:
    """In quarantine: its use is over for everyone who would wait, and its engine may write at any time."""
    failed = scene.transfer(Access.WRITE, PAGE)
    scene.usage.record(failed, ids(PAGE))
    scene.usage.quarantine(failed)


HAZARDS: dict[Hazard, tuple[Callable[[Scene], None], ...]] = {
    Hazard.FORWARD: (forward_reads_what_a_move_left,),
    Hazard.COPY_READ: (backup_reads,),
    Hazard.COPY_WRITE: (load_writes,),
    Hazard.NETWORK: (send_reads, receive_writes),
    Hazard.FIXED: (load_has_reserved, failed_transfer_may_still_write),
}


# ── consumers: each queues its stream waits where it must, obeys the rules that hold anyway, and writes ──


def next_forward_writes(scene: Scene, page: int, found: object) -> None:
    stream = scene.device.forward_stream
    if scene.broken_rule is Consumer.FORWARD:
        stream = scene.device.create_stream("side")  # a forward that does not run on the forward stream
    queue_stream_waits(found, scene.usage, scene.device, stream)
    scene.forward(writes=(page,), stream=stream)


def move_writes(scene: Scene, page: int, found: object) -> None:
    queue_stream_waits(found, scene.usage, scene.device, scene.device.schedule_stream)
    scene.device.copy_units(scene.device.schedule_stream, GRID, ids(ELSEWHERE), ids(page))


def zeroing_writes(scene: Scene, page: int, found: object) -> None:
    queue_stream_waits(found, scene.usage, scene.device, scene.device.schedule_stream)
    scene.device.zero_units(scene.device.schedule_stream, GRID, ids(page))


def load_from_host_writes(scene: Scene, page: int, found: object) -> None:
    device = scene.device
    scene.behind(scene.loads, device.schedule_stream)
    if scene.broken_rule is not Consumer.HOST_LOAD:
        scene.behind(scene.loads, device.forward_stream)
    queue_stream_waits(found, scene.usage, device, scene.loads)
    device.copy_spans(scene.loads, "next load", [scene.host_pool.span(64, 128)], scene.spans(page))


def peer_writes(scene: Scene, page: int, found: object) -> None:
    queue_stream_waits(found, scene.usage, scene.device, scene.device.schedule_stream)
    gate = scene.device.record_event(scene.device.schedule_stream)
    while scene.steps.retired_through < found.publish_after:
        scene.process()
    scene.device.wait_on_host(gate)
    scene.device.start_transfer("next receive", writes=scene.spans(page))


WRITES = {
    Consumer.FORWARD: next_forward_writes,
    Consumer.SCHEDULE_COPY: move_writes,
    Consumer.ZERO: zeroing_writes,
    Consumer.HOST_LOAD: load_from_host_writes,
    Consumer.NETWORK_RECEIVE: peer_writes,
}

CELLS = [
    pytest.param(consumer, hazard, schedule, id=f"{consumer.name}-{hazard.name}-{schedule.__name__}")
    for consumer, hazard in product(Consumer, Hazard)
    for schedule in HAZARDS[hazard]
]


def weakened(consumer: Consumer, hazard: Hazard) -> ClearanceTable:
    """The table with one cell that asks for nothing."""
    return {**CLEARANCE, consumer: {**CLEARANCE[consumer], hazard: Clear.NONE}}


@pytest.mark.requirement("L5")
def test_every_cell_has_its_schedule() -> None:
    """A new consumer or hazard without its pair of runs, or a "none" without the rule that it relies on, fails here."""
    assert set(CLEARANCE) == set(Consumer) == set(WRITES)
    assert set(HAZARDS) == set(Hazard)
    assert all(set(row) == set(Hazard) for row in CLEARANCE.values())
    proved = {(cell.values[0], cell.values[1]) for cell in CELLS}
    assert proved == set(product(Consumer, Hazard))
    queue_nothing = {
        (consumer, hazard)
        for consumer, hazard in proved
        if CLEARANCE[consumer][hazard] in (Clear.NONE, Clear.AFTER_RETIRE)
    }
    assert set(REASONS) == queue_nothing


@pytest.mark.requirement("L5", "L4")
@pytest.mark.parametrize(("consumer", "hazard", "schedule"), CELLS)
def test_with_the_cell_the_schedule_is_clean(
    consumer: Consumer, hazard: Hazard, schedule: Callable[[Scene], None]
) -> None:
    """The page is written after all, unless it is excluded, so clean means ordered and not avoided."""
    scene = Scene()
    schedule(scene)
    # The holes offered hold a clear one too: C8 takes that first, so the hazardous one is offered alone where it may be used.
    if CLEARANCE[consumer][hazard] is not Clear.EXCLUDED:
        scene.usage.fix("not for this test", ids(SPARE))
    assert scene.consume(consumer) == ()
    assert scene.written == [SPARE if CLEARANCE[consumer][hazard] is Clear.EXCLUDED else PAGE]


@pytest.mark.requirement("L5", "L4")
@pytest.mark.parametrize(("consumer", "hazard", "schedule"), CELLS)
def test_without_the_cell_the_schedule_is_reported(
    consumer: Consumer, hazard: Hazard, schedule: Callable[[Scene], None]
) -> None:
    """Each cell is needed: no other rule prevents this schedule."""
    relies_on_a_rule = CLEARANCE[consumer][hazard] is Clear.NONE
    scene = Scene(weakened(consumer, hazard), broken_rule=consumer if relies_on_a_rule else None)
    schedule(scene)
    races = scene.consume(consumer)
    assert scene.written == [PAGE]
    assert races, "nothing was reported"
    for race in races:
        assert race.buffer == "the arena"
        assert (race.start_byte, race.end_byte) == (PAGE * 64, PAGE * 64 + 64)
        assert race.second.is_write or race.first.is_write


@pytest.mark.requirement("L5", "L6")
@pytest.mark.parametrize("gate_is_taken", ["before the retirement", "after it"])
def test_ids_of_a_page_behind_a_forward_leave_behind_a_gate_taken_once_it_has_retired(
    gate_is_taken: str,
) -> None:
    """A forward retires as soon as the schedule stream is told to wait for it: a gate from before stands in front of that wait."""
    scene = Scene()
    forward_reads_what_a_move_left(scene)
    found = clearance(Consumer.NETWORK_RECEIVE, scene.usage, ids(PAGE))
    assert found.publish_after == 0
    device, stream = scene.device, scene.device.schedule_stream
    early = device.record_event(stream)
    event = scene.steps.recorded(0).event
    device.wait_event(stream, event)
    scene.steps.wait_queued(event)
    assert scene.steps.retired_through >= found.publish_after
    device.wait_on_host(early if gate_is_taken == "before the retirement" else device.record_event(stream))
    device.start_transfer("receive", writes=scene.spans(PAGE))
    assert (device.races == ()) == (gate_is_taken == "after it")


@pytest.mark.requirement("L4", "L5", "A5")
@pytest.mark.parametrize("taker", [Consumer.FORWARD, Consumer.HOST_LOAD, Consumer.NETWORK_RECEIVE])
@pytest.mark.parametrize("reader_is_kept", [True, False])
def test_zeroing_a_page_that_was_taken_early_without_a_wait_is_clean_only_while_its_reader_is_known(
    taker: Consumer, reader_is_kept: bool
) -> None:
    """The taker's own work never came: an aborted launch, a load given up, a request cancelled. The zero debt did."""
    scene = Scene()
    forward_reads_what_a_move_left(scene)
    queue_stream_waits(
        clearance(taker, scene.usage, ids(PAGE)), scene.usage, scene.device, scene.device.schedule_stream
    )
    scene.usage.take_vacated(ids(PAGE))
    usage = scene.usage if reader_is_kept else PageUsage(scene.steps, 8)
    zeroing_writes(scene, PAGE, clearance(Consumer.ZERO, usage, ids(PAGE)))
    scene.device.run_all()
    assert (scene.device.races == ()) == reader_is_kept


# ── what a move waits for before it reads its sources ──


def forward_writes(scene: Scene) -> None:
    scene.forward(writes=(PAGE,))


def forward_writes_the_unknown(scene: Scene) -> None:
    scene.forward(writes=(PAGE,))
    scene.usage.record_forward_writes(scene.steps.newest_recorded, None)


@pytest.mark.requirement("L4", "L7")
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
@pytest.mark.parametrize(
    "schedule", [forward_writes, forward_writes_the_unknown, load_writes, receive_writes]
)
def test_a_move_out_of_pages_that_somebody_writes_is_clean_only_behind_its_writers(
    schedule: Callable[[Scene], None], waits: bool
) -> None:
    """A move reads its sources, which CLEARANCE, a table of writers, does not speak of."""
    scene = Scene()
    schedule(scene)
    schedule_stream = scene.device.schedule_stream
    writers = scene.usage.writers(ids(PAGE))
    assert (writers.forward is not None) + len(writers.copies) + len(writers.transfers) == 1
    if waits:
        scene.wait_for_transfers(writers.transfers)
        for event in [copy.finish for copy in writers.copies]:
            scene.device.wait_event(schedule_stream, event)
        if writers.forward is not None:
            scene.device.wait_event(schedule_stream, writers.forward.event)
            scene.steps.wait_queued(writers.forward.event)
    scene.device.copy_units(schedule_stream, GRID, ids(PAGE), ids(TARGET))
    scene.device.run_all()
    assert (scene.device.races == ()) == waits


@pytest.mark.requirement("L4")
@pytest.mark.parametrize("schedule", [forward_reads_what_a_move_left, backup_reads, send_reads])
@pytest.mark.parametrize("shared", [True, False], ids=["fences shared", "fences apart"])
def test_bytes_that_left_a_band_bind_whichever_band_writes_them_next(
    schedule: Callable[[Scene], None], shared: bool
) -> None:
    """A neighbour's page of another size, and another origin, overlaps what a forward, a backup or a send still reads."""
    scene = Scene()
    schedule(scene)
    scene.usage.fence(ids(PAGE))
    grid = UnitGrid(16, 80)
    fences = scene.usage.fences if shared else FencedBytes(scene.steps)
    neighbour = PageUsage(scene.steps, 6, name="window", grid=grid, fences=fences)
    pages = ids(1, 2)  # bytes [96, 256): the first ends where PAGE is not yet, the second overlaps it
    found = clearance(Consumer.ZERO, neighbour, pages)
    scene.wait_for_transfers(found.host_waits)
    queue_stream_waits(found, neighbour, scene.device, scene.device.schedule_stream)
    scene.device.zero_units(scene.device.schedule_stream, grid, pages)
    scene.device.run_all()
    assert (scene.device.races == ()) == shared
    assert found.free_to_go.tolist() == ([1] if shared else [1, 2])


@pytest.mark.requirement("T6", "L4", "L5")
@pytest.mark.parametrize("consumer", Consumer)
@pytest.mark.parametrize("whole", [True, False], ids=["pages and fences", "pages alone"])
def test_bytes_of_a_failed_transfer_that_left_its_band_are_in_quarantine_too(
    consumer: Consumer, whole: bool
) -> None:
    """The peer may still write them, and no wait ends that: a band that grew over them would be written under its owner."""
    scene = Scene()
    failed = scene.transfer(Access.WRITE, PAGE)
    scene.usage.record(failed, ids(PAGE))
    other = PageUsage(scene.steps, 8, name="window", grid=GRID, fences=scene.usage.fences)
    scene.usage.fence(ids(PAGE))
    if whole:
        scene.usage.quarantine(failed)
    else:
        scene.usage.fix("what is left of it", scene.usage.end(failed))
    scene.usage = other
    assert (scene.consume(consumer) == ()) == whole
    assert scene.written == [SPARE if whole else PAGE]


@pytest.mark.requirement("L2", "L3")
@pytest.mark.parametrize("how", ["settled", "processed", "neither"])
def test_a_page_freed_under_a_forward_is_clean_behind_its_settling_or_processing(how: str) -> None:
    """A freed page's batch carries what a vacated page's record does."""
    scene = Scene()
    scene.forward(reads=(PAGE,), writes=(SPARE,))
    pending = PendingPages()
    assert scene.steps.newest_recorded is not None
    pending.add(ids(PAGE, SPARE), scene.steps.newest_recorded)
    pages = ids(PAGE, SPARE)
    if how == "settled":
        pages, event = pending.settle(1)
        assert event is not None
        scene.device.wait_event(scene.device.schedule_stream, event)
    elif how == "processed":
        scene.process()
        pages = pending.release_through(0)
    scene.device.zero_units(scene.device.schedule_stream, GRID, pages)
    scene.device.run_all()
    assert (scene.device.races == ()) == (how != "neither")
