"""What moving costs: urgent compaction, opportunistic flushes, and relief under long and short requests in turn.

Prints markdown tables; times are thread CPU time on one core and hold the planning and the rebinding of ids. The bytes are not
copied: how many there are is said beside. `--json` prints the figures that peers are compared with, a line each.
"""

import argparse
import logging
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import structlog
from chain_books import ENTRY_BYTES, Ours, layers_of, small_model
from models import BUDGET_BYTES, MODELS, Model
from workload import PAGE_SIZES, Figure, IntArray, Shape, print_figures, settle, thread_us

from kvtide.chain import Taken

LIVE_PAGES = (65_536, 1_000_000)
FLUSH_MOVES = 4096


def half_freed(live_pages: int, seed: int) -> Ours:
    """Two bands that fill the arena, `live_pages` each, of which half are then freed in the window at random."""
    prefix_pages = 2
    books = Ours(
        small_model(Shape.WINDOW), 1, arena_bytes=2 * (live_pages + prefix_pages) * ENTRY_BYTES, rows=1
    )
    taken = books.chain.take(pages=live_pages, bands=books.all_written)
    assert isinstance(taken, Taken), taken
    books.chain.written(taken)
    freed = np.random.default_rng(seed).permutation(taken.pages)[: live_pages // 2]
    books.chain.free_pages(books.windows[0][0], freed)
    return books


def compaction_figures(samples: int = 9) -> Iterator[Figure]:
    """A request that needs every free byte, all of which are holes in the other band."""
    for live_pages in LIVE_PAGES:
        times, moves = [], 0
        for seed in range(samples):
            books = half_freed(live_pages, seed)
            asked = {"full": live_pages // 2}
            settle()
            times.append(thread_us(lambda: books.chain.ensure_capacity(asked)))  # noqa: B023 – called at once
            moves = books.chain.statistics().moved_units
        yield Figure(f"urgent compaction, {live_pages:,} pages", 1, statistics.median(times))
        yield Figure(f"urgent compaction, {live_pages:,} pages, moves", 1, moves)


def flush_figures() -> Iterator[Figure]:
    """Flushes of at most 4,096 moves, one after another."""
    books = half_freed(LIVE_PAGES[0], 0)
    settle()
    times = []
    moved = 0
    while True:
        times.append(thread_us(books.chain.flush_opportunistic))
        before, moved = moved, books.chain.statistics().moved_units
        if moved - before < FLUSH_MOVES:
            break
    yield Figure(f"opportunistic flush of {FLUSH_MOVES:,} pages", 1, statistics.median(times[:-1]))


def floor_figures(samples: int = 9) -> Iterator[Figure]:
    """Which pages move where, by masks over all pages: no ids rebound, nothing checked."""
    for live_pages in LIVE_PAGES:
        live = np.ones(live_pages, np.bool_)
        live[np.random.default_rng(0).permutation(live_pages)[: live_pages // 2]] = False
        end = live_pages // 2

        def plan_moves() -> tuple[IntArray, IntArray]:
            return end + np.flatnonzero(live[end:]), np.flatnonzero(~live[:end])  # noqa: B023 – called at once

        times = [thread_us(plan_moves) for _ in range(samples)]
        yield Figure(f"urgent compaction, {live_pages:,} pages", 1, statistics.median(times))


class Alternation(NamedTuple):
    """What a run of long and short requests in turn cost."""

    reliefs: int
    """Takes that had units moved."""

    moved_bytes: int
    written_bytes: int
    """Entries of every token in full attention, those that were bound in windows, and each request's state once."""

    longest_us: float
    """Longest of them, as far as the room was made: question, planning, rebinding."""

    longest_bytes: int
    """What that one moved."""

    mean_use: float
    """Share of the arena in use, over all steps."""


def bursts(model: Model) -> list[tuple[int, int]]:
    """Prompt and output tokens: a burst of long requests, one of short ones, and so on; each burst overfills the arena."""
    draw = np.random.default_rng(3)
    requests: list[tuple[int, int]] = []
    for burst in range(16):
        low, high = (16_000, 60_000) if burst % 2 == 0 else (100, 1000)
        needed = 0
        while needed < 1.5 * BUDGET_BYTES:
            prompt, output = int(draw.integers(low, high)), int(draw.integers(32, 256))
            requests.append((prompt, output))
            needed += model.needed_bytes(prompt + output)
    return requests


class Pressure:
    """Ours under more requests than the arena holds: each is admitted once its prompt fits beside what running ones may yet take."""

    def __init__(self, model: Model, page_tokens: int, rows: int = 6000) -> None:
        self.model = model
        self.books = Ours(
            layers_of(model),
            page_tokens,
            arena_bytes=BUDGET_BYTES,
            rows=rows,
            context_tokens=61_440,
            tails_only=True,
        )
        self.peak_tokens = np.zeros(rows, np.int64)
        self.left: dict[int, int] = {}
        self.reliefs, self.moved_bytes, self.written_bytes = 0, 0, 0
        self.longest_us, self.longest_bytes = 0.0, 0

    def serve(self, requests: Sequence[tuple[int, int]]) -> Alternation:
        """All of `requests`, in order."""
        waiting = list(reversed(requests))
        used = []
        while waiting or self.left:
            while waiting and self._admit(*waiting[-1]):
                waiting.pop()
            self._decode()
            used.append(self.books.chain.statistics().live_bytes / BUDGET_BYTES)
        return Alternation(
            self.reliefs,
            self.moved_bytes,
            self.written_bytes,
            self.longest_us,
            self.longest_bytes,
            statistics.mean(used),
        )

    def _admit(self, prompt: int, output: int) -> bool:
        rows = np.fromiter(self.left, np.int64, len(self.left))
        if not self.books.chain.prealloc_fits(self._peak(prompt + output), self._promised(rows)):
            return False
        model = self.model
        in_window = min(prompt, max(model.window_tokens - 1, 0))
        self._make_room(self.books.prompt_units(prompt))
        row = self.books.admit(prompt)
        self.left[row], self.peak_tokens[row] = output, prompt + output
        self.written_bytes += (
            (prompt + output) * model.full_token_bytes
            + (in_window + output) * model.window_token_bytes
            + model.state_bytes
        )
        return True

    def _decode(self) -> None:
        rows = np.fromiter(self.left, np.int64, len(self.left))
        new_pages = int(np.count_nonzero(self.books.lengths[rows] % self.books.page_tokens == 0))
        self._make_room(dict.fromkeys(self.books.all_written, new_pages))
        self.books.decode(rows)
        for row in rows.tolist():
            self.left[row] -= 1
            if not self.left[row]:
                del self.left[row]
                self.books.finish(row)

    def _make_room(self, units: dict[str, int]) -> None:
        """What the take that follows would do first, timed apart from it."""
        chain = self.books.chain
        spent_us = thread_us(lambda: chain.ensure_capacity(units))
        before, self.moved_bytes = self.moved_bytes, chain.statistics().moved_bytes
        if self.moved_bytes > before:
            self.reliefs += 1
            if spent_us > self.longest_us:
                self.longest_us, self.longest_bytes = spent_us, self.moved_bytes - before

    def _peak(self, tokens: int) -> dict[str, int]:
        """Units that a request of `tokens` holds at most."""
        units = {"full": self._pages(tokens)}
        for name, window in self.books.windows:
            units[name] = min(self._pages(tokens), (window - 1) // self.books.page_tokens + 2)
        return units | ({"state": 1} if self.books.has_state else {})

    def _promised(self, rows: IntArray) -> dict[str, int]:
        """Units that running requests may yet take."""
        books, page_tokens = self.books, self.books.page_tokens
        peak, now = (-(-tokens[rows] // page_tokens) for tokens in (self.peak_tokens, books.lengths))
        units = {"full": int((peak - now).sum())}
        for name, window in books.windows:
            most = np.minimum(peak, (window - 1) // page_tokens + 2)
            units[name] = int(np.maximum(most - (now - books.first_held[name][rows]), 0).sum())
        return units

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.books.page_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", choices=("ours", "floor"), help="a line a figure, of one of the two")
    arguments = parser.parse_args()
    # The engine chooses what is logged; here, nothing that a relief says.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if arguments.json == "floor":
        print_figures(floor_figures())
        return
    if arguments.json == "ours":
        print_figures(compaction_figures())
        print_figures(flush_figures())
        return
    bare = {figure.operation: figure.value for figure in floor_figures()}
    print("| one band, half of its pages free at random | floor, µs | ours, µs |\n| - | -: | -: |")
    for figure in (*compaction_figures(), *flush_figures()):
        floor = bare.get(figure.operation)
        print(f"| {figure.operation} | {'–' if floor is None else f'{floor:,.0f}'} | {figure.value:,.0f} |")
    print(
        "\n| long and short requests in turn | page | reliefs | moved / KV written | longest stall, µs | it moved, MB | arena used |"
    )
    print("| - | -: | -: | -: | -: | -: | -: |")
    for model in MODELS:
        for page_tokens in PAGE_SIZES:
            run = Pressure(model, page_tokens).serve(bursts(model))
            print(
                f"| {model.name} | {page_tokens} | {run.reliefs:,} | {run.moved_bytes / run.written_bytes:.3f} "
                f"| {run.longest_us:,.0f} | {run.longest_bytes / 1e6:,.0f} | {run.mean_use:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
