"""One band on the modelled device, what may still touch its page, and who writes it next: the parts of the schedules (L5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtide.device import IntArray, ModelledDevice, ModelledEvent, ModelledStream, Race, UnitGrid
from kvtide.ledger import (
    CLEARANCE,
    Access,
    Clearance,
    ClearanceTable,
    Consumer,
    ForwardSteps,
    Hazard,
    HostCopy,
    LaunchRecord,
    NetworkTransfer,
    PageUsage,
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
        self.unwaited: ModelledStream | None = None
        """A stream that loads should wait for and do not."""
        if broken_rule is Consumer.HOST_LOAD:
            self.unwaited = self.device.forward_stream
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


def next_forward_writes(scene: Scene, page: int, found: Clearance) -> None:
    stream = scene.device.forward_stream
    if scene.broken_rule is Consumer.FORWARD:
        stream = scene.device.create_stream("side")  # a forward that does not run on the forward stream
    queue_stream_waits(found, scene.usage, scene.device, stream)
    scene.forward(writes=(page,), stream=stream)


def move_writes(scene: Scene, page: int, found: Clearance) -> None:
    queue_stream_waits(found, scene.usage, scene.device, scene.device.schedule_stream)
    scene.device.copy_units(scene.device.schedule_stream, GRID, ids(ELSEWHERE), ids(page))


def zeroing_writes(scene: Scene, page: int, found: Clearance) -> None:
    queue_stream_waits(found, scene.usage, scene.device, scene.device.schedule_stream)
    scene.device.zero_units(scene.device.schedule_stream, GRID, ids(page))


def load_from_host_writes(scene: Scene, page: int, found: Clearance) -> None:
    device = scene.device
    for stream in (device.schedule_stream, device.forward_stream):
        if stream is not scene.unwaited:
            scene.behind(scene.loads, stream)
    queue_stream_waits(found, scene.usage, device, scene.loads)
    device.copy_spans(scene.loads, "next load", [scene.host_pool.span(64, 128)], scene.spans(page))


def peer_writes(scene: Scene, page: int, found: Clearance) -> None:
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
