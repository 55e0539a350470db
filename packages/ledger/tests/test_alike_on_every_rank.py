"""Decisions on a device that answers as it likes: ranks see events at different times and decide alike (L6, C8, D5)."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from kvtide.device import IntArray, ModelledDevice, UnitGrid
from kvtide.ledger import (
    Access,
    Consumer,
    ForwardSteps,
    HostCopy,
    NetworkTransfer,
    PageUsage,
    PendingPages,
    choose_holes,
    clearance,
    queue_stream_waits,
)


def ids(*pages: int) -> IntArray:
    return np.array(pages, np.int64)


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
        # What is vacated leaves the span, which may grow over it again: then it waits for the forward that a fence names.
        vacated = self.usage.vacated_pages()
        self.usage.fence(vacated)
        self.holes += vacated.tolist()
        holes = np.array(self.holes, np.int64)
        chosen = choose_holes(Consumer.ZERO, self.usage, holes, self.draw.randint(1, 4)).pages
        found = clearance(Consumer.ZERO, self.usage, chosen)
        self.wait_for(found.host_waits)
        queue_stream_waits(found, self.usage, self.device, self.device.schedule_stream)
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
