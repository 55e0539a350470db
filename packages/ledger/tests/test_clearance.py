"""The table as it prints, and what is made of its answers (L5, L6, C8, D5)."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from kvtide.device import ImmediateEvent, ImmediateStream, IntArray, ModelledDevice, UnitGrid
from kvtide.ledger import (
    CLEARANCE,
    Access,
    Clear,
    Consumer,
    ForwardSteps,
    HostCopy,
    NetworkTransfer,
    PageUsage,
    PendingPages,
    choose_holes,
    clearance,
    format_clearance,
    queue_stream_waits,
)

STREAM = ImmediateStream("any")

PRINTED = """\
| consumer | `FORWARD` | `COPY_READ`, `COPY_WRITE` | `NETWORK` | `FIXED` |
| - | - | - | - | - |
| `FORWARD`: the next forward | none: forward stream order | stream wait | host wait | excluded |
| `SCHEDULE_COPY`: a move or a state copy | stream wait | stream wait | host wait | excluded |
| `ZERO`: zeroing on hand-out | stream wait | stream wait | host wait | excluded |
| `HOST_LOAD`: a load from host memory | none: its stream has waited for the forward and schedule streams | stream wait | host wait | excluded |
| `NETWORK_RECEIVE`: a peer's write | after retire: ids leave behind a gate, only after the forward | stream wait | host wait | excluded |
"""


def ids(*pages: int) -> IntArray:
    return np.array(pages, np.int64)


@pytest.mark.requirement("L5")
def test_the_table_prints_one_row_a_consumer() -> None:
    """The page of the design that this project builds can be laid beside it."""
    assert format_clearance() == PRINTED
    readme = Path(__file__).resolve().parents[1] / "README.md"
    assert PRINTED in readme.read_text(encoding="utf-8")


@pytest.mark.requirement("L5")
def test_a_cell_that_differs_within_a_shared_column_is_not_hidden() -> None:
    """COPY_READ and COPY_WRITE print as one column because they agree; a table where they do not must say so."""
    row = {
        **CLEARANCE[Consumer.ZERO],
        min(CLEARANCE[Consumer.ZERO], key=lambda h: h.name != "COPY_READ"): Clear.NONE,
    }
    assert "| none, stream wait |" in format_clearance({**CLEARANCE, Consumer.ZERO: row})


def vacated_band() -> tuple[ForwardSteps, PageUsage]:
    """Pages 0 to 9: 1 vacated under forward 0, 2 under forward 1, 3 sent, 4 backed up, 5 fixed, the rest clear."""
    steps = ForwardSteps()
    usage = PageUsage(steps, 10)
    for page in (1, 2):
        recorded = steps.forward_recorded(steps.forward_launched(), ImmediateEvent(STREAM))
        usage.record_forward_writes(recorded, ids(0))
        usage.vacate(ids(page))
    usage.record(NetworkTransfer("send", Access.READ), ids(3))
    usage.record(HostCopy("backup", Access.READ, ImmediateEvent(STREAM)), ids(4))
    usage.fix("reservation", ids(5))
    return steps, usage


@pytest.mark.requirement("C8")
@pytest.mark.parametrize(
    ("consumer", "chosen", "clear", "after_forward"),
    [
        (Consumer.ZERO, [9, 4, 0, 2, 1, 3], 3, 2),
        (Consumer.NETWORK_RECEIVE, [9, 4, 0, 2, 1, 3], 3, 2),
        (Consumer.FORWARD, [9, 4, 2, 1, 0, 3], 5, 0),
        (Consumer.HOST_LOAD, [9, 4, 2, 1, 0, 3], 5, 0),
    ],
)
def test_holes_that_wait_for_no_forward_come_first_and_fixed_ones_not_at_all(
    consumer: Consumer, chosen: list[int], clear: int, after_forward: int
) -> None:
    """Within a group the band's own order stands. A backup plays no part: its end is not the same on every rank."""
    _, usage = vacated_band()
    choice = choose_holes(consumer, usage, ids(9, 5, 4, 3, 2, 1, 0), 7)
    assert choice.pages.tolist() == chosen
    assert (choice.clear_count, choice.after_forward_count) == (clear, after_forward)
    assert choose_holes(consumer, usage, ids(3, 9), 1).pages.tolist() == [9]


@pytest.mark.requirement("C8")
def test_a_choice_among_pages_that_only_host_copies_use_is_the_band_s_own_order() -> None:
    """With a thousand backups open it must not cost more than with none."""
    usage = PageUsage(ForwardSteps(), 10)
    usage.record(HostCopy("backup", Access.READ, ImmediateEvent(STREAM)), ids(3, 4))
    assert not usage.steers_choice
    usage.fence(ids(4))
    assert not usage.steers_choice
    choice = choose_holes(Consumer.ZERO, usage, ids(4, 3, 2), 2)
    assert (choice.pages.tolist(), choice.clear_count) == ([4, 3], 2)
    assert len(clearance(Consumer.ZERO, usage, choice.pages).stream_waits) == 1


@pytest.mark.requirement("C8", "L6")
def test_the_choice_follows_retirement_and_clearance_is_read_after_it() -> None:
    """A page behind a forward that has retired is as good as any; what the chosen pages must clear is theirs alone."""
    steps, usage = vacated_band()
    assert choose_holes(Consumer.ZERO, usage, ids(1, 2, 0), 3).pages.tolist() == [0, 1, 2]
    steps.wait_queued(steps.recorded(0).event)
    assert choose_holes(Consumer.ZERO, usage, ids(1, 2, 0), 3).pages.tolist() == [1, 0, 2]
    assert clearance(Consumer.ZERO, usage, ids(1, 0)).stream_waits == ()
    assert clearance(Consumer.ZERO, usage, ids(2)).stream_waits == (steps.recorded(1).event,)


@pytest.mark.requirement("L5")
def test_of_several_forwards_the_newest_is_waited_for_and_of_one_event_one_wait_is_queued() -> None:
    """Forwards run in order on one stream, so its event covers the rest; two copies may share a finish event."""
    steps, usage = vacated_band()
    event = ImmediateEvent(STREAM)
    usage.record(HostCopy("one", Access.READ, event), ids(1, 2))
    usage.record(HostCopy("two", Access.WRITE, event), ids(2, 6))
    found = clearance(Consumer.ZERO, usage, ids(0, 1, 2, 6))
    assert found.free_to_go.tolist() == [0]
    assert found.stream_waits == (event, steps.recorded(1).event)
    received = clearance(Consumer.NETWORK_RECEIVE, usage, ids(1))
    assert received.stream_waits == (event,)
    assert received.publish_after == 0


@pytest.mark.requirement("L5")
def test_what_only_an_excluded_page_carries_binds_nobody() -> None:
    """It is not written, so its transfer need not be waited for, least of all on the host."""
    _, usage = vacated_band()
    usage.fix("relief", ids(3, 1))
    found = clearance(Consumer.ZERO, usage, ids(0, 1, 3, 4))
    assert found.excluded.tolist() == [1, 3]
    assert found.host_waits == ()
    assert len(found.stream_waits) == 1
    assert found.free_to_go.tolist() == [0]


@pytest.mark.requirement("L4", "L5")
def test_a_transfer_that_a_page_and_a_fence_both_name_is_waited_for_once() -> None:
    """A band that grows back over what it gave away meets the same send twice; the host waits for it, and ends it, once."""
    usage = PageUsage(ForwardSteps(), 10)
    send = NetworkTransfer("send", Access.READ)
    usage.record(send, ids(8, 9))
    usage.fence(ids(9))
    usage.fence(ids(8))
    found = clearance(Consumer.ZERO, usage, ids(7, 8, 9))
    assert found.host_waits == (send,)
    assert found.free_to_go.tolist() == [7]


@pytest.mark.requirement("L6")
def test_a_wait_on_another_stream_retires_no_forward() -> None:
    """What the schedule stream writes is not behind it."""
    device = ModelledDevice(160)
    steps = ForwardSteps()
    usage = PageUsage(steps, 10)
    device.submit(device.forward_stream, "forward 0")
    recorded = steps.forward_recorded(steps.forward_launched(), device.record_event(device.forward_stream))
    usage.record_forward_writes(recorded, ids())
    usage.vacate(ids(1))
    found = clearance(Consumer.ZERO, usage, ids(1))
    assert queue_stream_waits(found, usage, device, device.create_stream("side")) == 1
    assert steps.retired_through == -1
    assert queue_stream_waits(found, usage, device, device.schedule_stream) == 1
    assert steps.retired_through == 0
    assert usage.take_ready_vacated().tolist() == [1]


# ── decisions on a device that answers as it likes ──

PAGE_COUNT = 10
GRID = UnitGrid(0, 16)


class Allocator:
    """A small band that takes, frees, moves, backs up and sends by a drawn program; it notes every decision."""

    def __init__(self, device: ModelledDevice, program_seed: int) -> None:
        self.device = device
        self.draw = random.Random(program_seed)
        self.steps = ForwardSteps()
        self.usage = PageUsage(self.steps, PAGE_COUNT, grid=GRID)
        self.pending = PendingPages()
        self.copies = device.create_stream("copies")
        self.holes = list(range(PAGE_COUNT))
        self.live: list[int] = []
        self.in_flight: list = []
        self.transfers: dict = {}
        self.decisions: list = []

    def step(self) -> None:
        actions = [
            self.launch,
            self.process,
            self.take,
            self.free,
            self.move,
            self.back_up,
            self.send,
            self.end,
        ]
        self.draw.choice(actions)()
        self.holes += self.usage.take_ready_vacated().tolist()
        self.decisions.append((tuple(self.holes), tuple(self.live), self.steps.retired_through))

    def launch(self) -> None:
        if len(self.in_flight) > 2:
            return
        device = self.device
        device.wait_event(device.forward_stream, device.record_event(device.schedule_stream))
        record = self.steps.forward_launched()
        spans = device.unit_spans(GRID, np.array(self.live, np.int64))
        # A page under a copy or transfer holds finished tokens: no forward writes it.
        written = clearance(Consumer.FORWARD, self.usage, np.array(self.live[-1:], np.int64)).free_to_go
        device.submit(
            device.forward_stream,
            f"forward {record.forward}",
            reads=spans,
            writes=device.unit_spans(GRID, written),
        )
        event = device.record_event(device.forward_stream)
        self.usage.record_forward_writes(self.steps.forward_recorded(record, event), written)
        self.in_flight.append((record, event))

    def process(self) -> None:
        if not self.in_flight:
            return
        record, event = self.in_flight.pop(0)
        self.device.wait_on_host(event)
        self.steps.host_synchronised(event)
        self.steps.forward_processed(record)
        self.holes += self.pending.release_through(record.forward).tolist()

    def take(self) -> None:
        holes = np.array(self.holes, np.int64)
        vacated = self.usage.vacated_pages()
        chosen = choose_holes(
            Consumer.ZERO, self.usage, np.concatenate([holes, vacated]), self.draw.randint(1, 4)
        ).pages
        found = clearance(Consumer.ZERO, self.usage, chosen)
        self.wait_for(found.host_waits)
        queue_stream_waits(found, self.usage, self.device, self.device.schedule_stream)
        self.usage.take_vacated(chosen[np.isin(chosen, self.usage.vacated_pages())])
        self.holes = [page for page in self.holes if page not in chosen]
        self.live += chosen.tolist()
        self.device.zero_units(self.device.schedule_stream, GRID, chosen)
        self.decisions.append((chosen.tolist(), len(found.stream_waits), len(found.host_waits)))

    def free(self) -> None:
        count = min(len(self.live), self.draw.randint(1, 3))
        freed = [self.live.pop(self.draw.randrange(len(self.live))) for _ in range(count)]
        newest = self.steps.newest_recorded
        if newest is None:
            self.holes += freed
        else:
            self.pending.add(np.array(freed, np.int64), newest)

    def move(self) -> None:
        if not self.live or not self.holes:
            return
        source = ids(self.draw.choice(self.live))
        target = choose_holes(Consumer.SCHEDULE_COPY, self.usage, np.array(self.holes, np.int64), 1).pages
        if not len(target):
            return
        stream = self.device.schedule_stream
        writers = self.usage.writers(source)
        self.wait_for(writers.transfers)
        if writers.forward is not None:
            self.device.wait_event(stream, writers.forward.event)
            self.steps.wait_queued(writers.forward.event)
        found = clearance(Consumer.SCHEDULE_COPY, self.usage, target)
        self.wait_for(found.host_waits)
        queue_stream_waits(found, self.usage, self.device, stream)
        self.device.copy_units(stream, GRID, source, target)
        self.holes.remove(int(target[0]))
        self.live[self.live.index(int(source[0]))] = int(target[0])
        self.holes += self.usage.vacate(source).tolist()

    def back_up(self) -> None:
        if not self.live:
            return
        pages = ids(self.draw.choice(self.live))
        for stream in (self.device.forward_stream, self.device.schedule_stream):
            self.device.wait_event(self.copies, self.device.record_event(stream))
        self.device.submit(self.copies, "backup", reads=self.device.unit_spans(GRID, pages))
        self.usage.record(HostCopy("backup", Access.READ, self.device.record_event(self.copies)), pages)

    def send(self) -> None:
        if not self.live or self.in_flight:
            return
        pages = ids(self.draw.choice(self.live))
        self.device.wait_on_host(self.device.record_event(self.device.schedule_stream))
        transfer = NetworkTransfer("send", Access.READ)
        self.transfers[transfer] = self.device.start_transfer(
            "send", reads=self.device.unit_spans(GRID, pages)
        )
        self.usage.record(transfer, pages)

    def end(self) -> None:
        """The round in which all ranks agree comes when the program says, not when the device does."""
        signals = self.usage.signals()
        if not signals:
            return
        signal = self.draw.choice(signals)
        if isinstance(signal, NetworkTransfer):
            self.wait_for((signal,))
        else:
            self.device.wait_on_host(signal.finish)
            self.usage.end(signal)

    def wait_for(self, transfers: tuple[NetworkTransfer, ...]) -> None:
        for transfer in transfers:
            self.device.wait_on_host(self.transfers.pop(transfer))
            self.usage.end(transfer)


def decisions(device: ModelledDevice, program_seed: int) -> list:
    """What an allocator decides in 120 steps; a race on the way raises."""
    allocator = Allocator(device, program_seed)
    for _ in range(120):
        allocator.step()
    device.run_all()
    return allocator.decisions


@pytest.mark.requirement("C8", "L6")
@pytest.mark.parametrize("program_seed", range(12))
def test_a_device_whose_query_answers_at_random_gives_identical_decisions(program_seed: int) -> None:
    """Ranks see events at different times; what they hand out must not depend on it. And no schedule of it races."""
    expected = decisions(ModelledDevice(PAGE_COUNT * 16), program_seed)
    for device_seed in range(5):
        device = ModelledDevice(PAGE_COUNT * 16, seed=device_seed, random_queries=True)
        assert decisions(device, program_seed) == expected


@pytest.mark.requirement("L6")
def test_the_comparison_above_notices_a_decision_that_follows_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weakened on purpose: a forward retires only where its wait was really queued, so a fired event changes what is free."""

    def follows_the_event(found, usage, device, stream) -> int:
        queued = 0
        for event in found.stream_waits:
            if not device.query_event(event):
                device.wait_event(stream, event)
                usage.steps.wait_queued(event)
                queued += 1
        return queued

    monkeypatch.setitem(globals(), "queue_stream_waits", follows_the_event)
    differing = 0
    for program_seed, device_seed in product(range(12), range(5)):
        expected = decisions(ModelledDevice(PAGE_COUNT * 16), program_seed)
        device = ModelledDevice(PAGE_COUNT * 16, seed=device_seed, random_queries=True, raise_races=False)
        differing += decisions(device, program_seed) != expected
    assert differing
