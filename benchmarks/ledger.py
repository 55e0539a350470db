"""What the ledger adds to a decode step: recording a forward of 256 requests over three bands, processing it, clearance.

Prints a markdown table of medians in µs of thread CPU time, each beside a bare floor: the calls that the same work needs with
nothing around them. `--profile` prints where the time of one step goes.
"""

import argparse
import cProfile
import os
import platform
import pstats
import statistics
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvtide.device import ImmediateEvent, ImmediateStream, IntArray
from kvtide.ledger import (
    Access,
    Consumer,
    FencedBytes,
    ForwardSteps,
    HostCopy,
    NetworkTransfer,
    PageUsage,
    PendingPages,
    choose_holes,
    clearance,
)

BANDS, REQUESTS, PAGES = 3, 256, 1 << 17
OPEN_USES, PAGES_EACH = 1000, 100
STREAM = ImmediateStream("any")
INNER, SAMPLES = 100, 61


class Engine:
    """A ledger of three bands, with a forward in flight, and `open_uses` copies and transfers in each band."""

    def __init__(self, open_uses: int) -> None:
        self.steps = ForwardSteps()
        self.bands = [PageUsage(self.steps, PAGES, name=f"band {n}") for n in range(BANDS)]
        self.pending = [PendingPages() for _ in range(BANDS)]
        draw = np.random.default_rng(1)
        self.writes = [draw.permutation(PAGES)[:REQUESTS] for _ in range(BANDS)]
        used = draw.permutation(PAGES)[: OPEN_USES * PAGES_EACH]
        for usage in self.bands:
            for use in range(open_uses):
                pages = used[use * PAGES_EACH : (use + 1) * PAGES_EACH]
                signal = (
                    NetworkTransfer(f"send {use}", Access.READ)
                    if use % 4 == 0
                    else HostCopy(f"backup {use}", Access.READ, ImmediateEvent(STREAM))
                )
                usage.record(signal, pages)
        clear = np.setdiff1d(np.arange(PAGES), used)
        self.clear_pages = draw.permutation(clear)[:REQUESTS]
        """Pages that no use names."""
        self.many_pages = draw.permutation(clear)[:10_000]
        """Many that no use names."""
        self.some_used = np.concatenate([self.clear_pages[:-16], used[: 16 * PAGES_EACH : PAGES_EACH]])
        """The same, sixteen of them under a use each."""
        self.record = self.steps.forward_launched()
        self.event = ImmediateEvent(STREAM)
        self.steps.forward_recorded(self.record, self.event)

    def record_forward(self) -> None:
        record = self.steps.forward_launched()
        event = ImmediateEvent(STREAM)
        recorded = self.steps.forward_recorded(record, event)
        for usage, pages in zip(self.bands, self.writes, strict=True):
            usage.record_forward_writes(recorded, pages)
        self.next = record, event

    def process_forward(self) -> None:
        self.steps.host_synchronised(self.event)
        self.steps.forward_processed(self.record)
        for pending in self.pending:
            pending.release_through(self.record.forward)
        self.record, self.event = self.next

    def clear(self, *pages: IntArray) -> None:
        """Ask each band about its pages; the last array serves the bands that are left."""
        for place, usage in enumerate(self.bands):
            clearance(Consumer.ZERO, usage, pages[min(place, len(pages) - 1)])

    def open_and_end(self, pages: IntArray) -> None:
        backup = HostCopy("backup", Access.READ, self.event)
        self.bands[0].record(backup, pages)
        self.bands[0].end(backup)

    def choose(self) -> None:
        for usage in self.bands:
            choose_holes(Consumer.ZERO, usage, self.some_used, REQUESTS)


class Crowded:
    """One band that shares its arena with another, which has fenced what 1,000 backups read; a send and many holes."""

    def __init__(self) -> None:
        steps = ForwardSteps()
        fences = FencedBytes(steps)
        left, self.band = (PageUsage(steps, PAGES, fences=fences) for _ in range(2))
        for use in range(OPEN_USES):
            backup = HostCopy(f"backup {use}", Access.READ, ImmediateEvent(STREAM))
            pages = np.arange(3 * use, 3 * use + 2)
            left.record(backup, pages)
            left.fence(pages)
        self.pages = np.random.default_rng(2).permutation(PAGES - 10_000)[:REQUESTS] + 10_000
        self.holey = PageUsage(steps, PAGES)
        self.holey.record(NetworkTransfer("send", Access.READ), np.arange(PAGES_EACH))
        self.holes = np.arange(100_000)

    def clear(self) -> None:
        clearance(Consumer.ZERO, self.band, self.pages)

    def choose_among_many(self) -> None:
        choose_holes(Consumer.ZERO, self.holey, self.holes, REQUESTS)


class Floor:
    """The bare calls: a queue in, a queue out, one look-up a page and one test whether any hits, for each band."""

    def __init__(self, engine: Engine) -> None:
        self.pages = engine.clear_pages
        self.first = [np.zeros(PAGES, np.int64) for _ in range(BANDS)]
        self.queues = [deque([(ImmediateEvent(STREAM), self.pages)]) for _ in range(BANDS)]

    def record_forward(self) -> None:
        event = ImmediateEvent(STREAM)
        for queue in self.queues:
            queue.append((event, self.pages))

    def process_forward(self) -> None:
        for queue in self.queues:
            queue.popleft()

    def clear(self) -> None:
        for first in self.first:
            np.flatnonzero(first[self.pages])

    def look_up(self) -> None:
        np.flatnonzero(self.first[0][self.pages])

    def open_and_end(self, pages: IntArray) -> None:
        self.first[0][pages] = 1
        self.first[0][pages] = 0


def step(engine: Engine, *pages: IntArray) -> Callable[[], None]:
    def one() -> None:
        engine.record_forward()
        engine.process_forward()
        engine.clear(*pages)

    return one


def medians(actions: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median µs of each, the actions interleaved so that all see the same machine."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(SAMPLES):
        for name, action in actions.items():
            before = time.thread_time_ns()
            for _ in range(INNER):
                action()
            samples[name].append((time.thread_time_ns() - before) / INNER / 1000)
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    quiet, busy = Engine(0), Engine(OPEN_USES)
    floor, crowded = Floor(quiet), Crowded()

    def floor_step() -> None:
        floor.record_forward()
        floor.process_forward()
        floor.clear()

    def record_and_process(books: Engine | Floor) -> None:
        books.record_forward()
        books.process_forward()

    if arguments.profile:
        profile = cProfile.Profile()
        one = step(busy, busy.some_used)
        profile.enable()
        for _ in range(20_000):
            one()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(14)
        return

    found = medians(
        {
            "floor": floor_step,
            "quiet": step(quiet, quiet.clear_pages),
            "busy": step(busy, busy.clear_pages),
            "hit in one": step(busy, busy.some_used, busy.clear_pages),
            "hit": step(busy, busy.some_used),
            "floor books": lambda: record_and_process(floor),
            "books": lambda: record_and_process(quiet),
            "floor clearance": floor.clear,
            "clearance busy": lambda: busy.clear(busy.clear_pages),
            "clearance hit": lambda: busy.clear(busy.some_used),
            "choice hit": busy.choose,
            "floor look-up": floor.look_up,
            "fences": crowded.clear,
            "many holes": crowded.choose_among_many,
            "use of 100": lambda: busy.open_and_end(busy.clear_pages[:100]),
            "floor use of 100": lambda: floor.open_and_end(busy.clear_pages[:100]),
            "use of 10,000": lambda: busy.open_and_end(busy.many_pages),
            "floor use of 10,000": lambda: floor.open_and_end(busy.many_pages),
        }
    )
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, pinned to one; ", end="")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}")
    print("\n| what | µs | floor, µs | ratio |\n| - | -: | -: | -: |")
    for what, name, beside in (
        ("record + process + clearance, no use open", "quiet", "floor"),
        ("the same, 1,000 uses of 100 pages open in each band, none met", "busy", "floor"),
        ("the same, in one band 16 of the 256 pages under a use each", "hit in one", "floor"),
        ("the same in all three bands", "hit", "floor"),
        ("record + process alone", "books", "floor books"),
        ("clearance alone, uses open, none met", "clearance busy", "floor clearance"),
        ("clearance alone, 16 pages under a use", "clearance hit", "floor clearance"),
        ("choice of 256 holes, 16 under a use", "choice hit", "floor clearance"),
        ("clearance in one band, 1,000 fences of another open, none met", "fences", "floor look-up"),
        ("choice of 256 among 100,000 holes in one band, a send open", "many holes", "floor look-up"),
        ("open and end a use of 100 pages in one band, 1,000 others open", "use of 100", "floor use of 100"),
        ("open and end a use of 10,000 pages", "use of 10,000", "floor use of 10,000"),
    ):
        print(f"| {what} | {found[name]:.1f} | {found[beside]:.1f} | {found[name] / found[beside]:.1f} |")


if __name__ == "__main__":
    main()
