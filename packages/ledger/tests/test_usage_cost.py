"""What a use costs: O(its pages) to open and to end, O(the pages asked about + the uses found) to ask (L4).

Two measures that no clock disturbs: the bytecode instructions that Python executes, which a loop over pages would multiply,
and the memory that a call asks for at its peak, which a pass over the arena or over all uses would show.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from kvtide.device import ImmediateEvent, ImmediateStream, IntArray, UnitGrid
from kvtide.ledger import (
    Access,
    Consumer,
    ForwardSteps,
    HostCopy,
    NetworkTransfer,
    PageUsage,
    choose_holes,
    clearance,
)
from kvtide.ledger.fenced_bytes import FencedBytes

STREAM = ImmediateStream("any")
ARENA_PAGES = 1 << 20


def instructions(action: Callable[[], object]) -> int:
    """Bytecode instructions that `action` executes, in every Python function that it calls."""
    count = 0

    def trace(frame: FrameType, what: str, _: object) -> object:
        nonlocal count
        frame.f_trace_opcodes = True
        count += what == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def peak_bytes(action: Callable[[], object]) -> int:
    """Memory that `action` holds at most beyond what was held before."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def copy(access: Access = Access.READ) -> HostCopy:
    return HostCopy("copy", access, ImmediateEvent(STREAM))


def busy_band(use_count: int, pages_each: int) -> tuple[PageUsage, list[HostCopy]]:
    """A band of a million pages in which `use_count` backups each read some that no other does."""
    steps = ForwardSteps()
    usage = PageUsage(steps, ARENA_PAGES, grid=UnitGrid(0, 16), fences=FencedBytes(steps))
    copies = [copy() for _ in range(use_count)]
    for place, each in enumerate(copies):
        usage.record(each, np.arange(place * pages_each, (place + 1) * pages_each))
    return usage, copies


def crowded_band(entry_count: int) -> PageUsage:
    """A band in which so many batches are vacated, and so many fences of each kind open, none of them on its last pages."""
    steps = ForwardSteps()
    fences = FencedBytes(steps)
    usage = PageUsage(steps, ARENA_PAGES, grid=UnitGrid(0, 16), fences=fences)
    usage.record(NetworkTransfer("send", Access.READ), np.arange(100))
    recorded = steps.forward_recorded(steps.forward_launched(), ImmediateEvent(STREAM))
    usage.record_forward_writes(recorded, np.arange(10))
    for entry in range(entry_count):
        pages = np.arange(5000 + 4 * entry, 5004 + 4 * entry)
        usage.vacate(pages[:2])
        usage.record(copy(), pages[2:3])
        usage.fence(pages[1:3])
    return usage


def spread(page_count: int) -> IntArray:
    """Pages over the whole band, some of them under a use."""
    return np.arange(page_count) * (ARENA_PAGES // page_count)


OPERATIONS: dict[str, Callable[[PageUsage, IntArray], object]] = {
    "record": lambda usage, pages: usage.record(copy(Access.WRITE), pages),
    "record and end": lambda usage, pages: (usage.record(one := copy(), pages), usage.end(one)),
    "clearance": lambda usage, pages: clearance(Consumer.ZERO, usage, pages),
    "choose": lambda usage, pages: choose_holes(Consumer.ZERO, usage, pages, len(pages) // 2),
    "writers": lambda usage, pages: usage.writers(pages),
    "stopping": lambda usage, pages: usage.stopping(pages),
    "vacate": lambda usage, pages: usage.vacate(pages),
    "vacate and take": lambda usage, pages: (usage.vacate(pages), usage.take_ready_vacated()),
    "fence": lambda usage, pages: usage.fence(pages),
    "fix and unfix": lambda usage, pages: (usage.fix("somebody", pages), usage.unfix("somebody")),
}


@pytest.mark.requirement("L4")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_python_loop_runs_over_pages(operation: str) -> None:
    """A hundred times the pages execute the same instructions, in a band where both meet one and the same use."""
    counts = []
    for page_count in (100, 10_000):
        usage, _ = busy_band(1, 2)
        # Made room for first: growing the index is paid once, not by page.
        warm = copy()
        usage.record(warm, np.arange(20_000))
        usage.end(warm)
        pages = spread(page_count)
        counts.append(instructions(lambda: OPERATIONS[operation](usage, pages)))  # noqa: B023
    assert counts[1] <= counts[0] + 20, "instructions grow with the pages"


@pytest.mark.requirement("L4")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_other_uses_and_a_large_arena_cost_nothing(operation: str) -> None:
    """With 1,000 uses of 100,000 pages elsewhere, the same instructions run, and no memory of their size is touched."""
    pages = np.arange(ARENA_PAGES - 256, ARENA_PAGES)
    counts, peaks = [], []
    for use_count in (1, 1000):
        usage, _ = busy_band(use_count, 100)
        counts.append(instructions(lambda: OPERATIONS[operation](usage, pages)))  # noqa: B023
        usage, _ = busy_band(use_count, 100)
        peaks.append(peak_bytes(lambda: OPERATIONS[operation](usage, pages)))  # noqa: B023
    assert counts[1] <= counts[0] + 20
    assert max(peaks) < 64 * 1024, (
        f"256 pages took {peaks} bytes: the uses hold 800,000, a byte a page 1,000,000"
    )


@pytest.mark.requirement("L4")
@pytest.mark.parametrize("operation", [*OPERATIONS, "vacate and fence", "end with a fence"])
def test_other_batches_and_fences_are_passed_over_without_a_python_loop(operation: str) -> None:
    """With 1,000 vacated batches and 2,000 fences elsewhere the same instructions run; their ranges cost memory by the pass."""
    operations = OPERATIONS | {
        "vacate and fence": lambda usage, pages: (usage.vacate(pages), usage.fence(pages[::2])),
        "end with a fence": lambda usage, pages: (
            usage.record(one := copy(), pages),
            usage.fence(pages),
            usage.end(one),
        ),
    }
    pages = np.arange(ARENA_PAGES - 256, ARENA_PAGES)
    counts, peaks = [], []
    for entry_count in (10, 1000):
        usage = crowded_band(entry_count)
        counts.append(instructions(lambda: operations[operation](usage, pages)))  # noqa: B023
        usage = crowded_band(entry_count)
        peaks.append(peak_bytes(lambda: operations[operation](usage, pages)))  # noqa: B023
    assert counts[1] <= counts[0] + 30
    assert max(peaks) < 128 * 1024


@pytest.mark.requirement("L4", "C8")
def test_a_choice_of_few_among_many_holes_looks_at_few() -> None:
    """A long-running band has a hundred thousand holes; with a send open somewhere the choice must not ask about them all."""
    usage = PageUsage(ForwardSteps(), ARENA_PAGES)
    usage.record(NetworkTransfer("send", Access.READ), np.arange(100))
    holes = np.arange(100_000)
    chosen = choose_holes(Consumer.ZERO, usage, holes, 256)
    assert chosen.pages.tolist() == list(range(100, 356))
    assert peak_bytes(lambda: choose_holes(Consumer.ZERO, usage, holes, 256)) < 64 * 1024


@pytest.mark.requirement("L4")
def test_a_page_under_many_uses_costs_only_whoever_asks_about_it() -> None:
    """A shared prefix is sent to many peers at once: its pages' lists are long, its neighbours' are not."""
    usage = PageUsage(ForwardSteps(), ARENA_PAGES)
    sends = [NetworkTransfer(f"send {n}", Access.READ) for n in range(200)]
    usage.record(sends[0], np.arange(50))
    under_one = instructions(lambda: clearance(Consumer.ZERO, usage, np.arange(50, 100)))
    for send in sends[1:]:
        usage.record(send, np.arange(50))
    under_many = instructions(lambda: clearance(Consumer.ZERO, usage, np.arange(50, 100)))
    found = clearance(Consumer.ZERO, usage, np.arange(0, 100))
    assert found.host_waits == tuple(sends)
    assert found.free_to_go.tolist() == list(range(50, 100))
    assert under_many == under_one
    for send in sends[::-1]:
        usage.end(send)
    assert usage.is_clear


@pytest.mark.requirement("L4")
def test_recording_what_a_forward_writes_costs_the_same_for_any_number_of_pages() -> None:
    """It is on the path of every step: a reference is kept, and the array itself is not even read."""
    counts, peaks = [], []
    for page_count in (1, 100_000):
        steps = ForwardSteps()
        usage = PageUsage(steps, ARENA_PAGES)
        recorded = steps.forward_recorded(steps.forward_launched(), ImmediateEvent(STREAM))
        pages = np.arange(page_count)
        counts.append(instructions(lambda: usage.record_forward_writes(recorded, pages)))  # noqa: B023
        peaks.append(peak_bytes(lambda: usage.record_forward_writes(recorded, pages)))  # noqa: B023
    assert counts[0] == counts[1]
    assert max(peaks) < 1024
