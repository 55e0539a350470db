"""What one decode iteration costs a scheduler in kvtide: everything that `KVStorage` does for it on the host, with overlap.

256 requests decode one token each, forward after forward: an admission is asked and refused, a step prepared, launched, its ids
resolved, the step recorded, the one before it processed and advanced over, and window pages that fell behind retire. Prints a markdown
table of medians in µs of thread CPU time on one core, by page size, by context length, by arena size, with rows that begin their pages
in turn, and with those and a checkpoint every 64 tokens of each; below, the floor: the bare calls of a static split in the same run.
On the CPU device an upload, the zeroing of pages, the copies of states and the translation of ids are done at once, and counted; of
`resolve` nearly all is that work. `--profile PAGE` prints where the time goes, with `--checkpoints` of the last column.
"""

import argparse
import cProfile
import logging
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import structlog
import torch

from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MHAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    plan_kv_storage,
)
from kvtide.sizing import CheckpointStrategy, ServingPolicy
from kvtide.storage import AdmissionRefusal, KVStorage, PreparedStep, build_kv_storage

REQUESTS, CHUNK_TOKENS, WINDOW_TOKENS = 256, 8192, 128
PAGE_SIZES = (1, 16, 64)
BUDGET_BYTES = 400_000_000
ITERATIONS = 256
GRID_TOKENS = 64
VERBS = ("admit", "prepare", "launch", "resolve", "record", "process", "advance")
FLOORS = ("floor of all but resolve", "floor of resolve")
NEVER_RESOLVED = "all but resolve, never resolved"
ROWS = (*VERBS, "all", "all but resolve", NEVER_RESOLVED, *FLOORS)


Answer = TypeVar("Answer")


class Case(NamedTuple):
    """One column of the table."""

    page_tokens: int = 16
    context_tokens: int = 4096
    budget_bytes: int = BUDGET_BYTES
    is_spread: bool = False
    """Whether prompts end one token after the other, so that each iteration begins as many pages, and reaches as many checkpoints."""
    has_checkpoints: bool = False

    @property
    def head(self) -> str:
        """Over its column."""
        larger = self.budget_bytes // BUDGET_BYTES
        return (
            f"page {self.page_tokens}, {self.context_tokens // 1024}k tokens"
            + f", {larger} times the arena" * (larger > 1)
            + ", in turn" * self.is_spread
            + ", with checkpoints" * self.has_checkpoints
        )


CASES = (
    *(Case(page_tokens=page) for page in PAGE_SIZES),
    Case(context_tokens=1024),
    Case(context_tokens=16_384),
    Case(budget_bytes=5 * BUDGET_BYTES),
    Case(is_spread=True),
    Case(is_spread=True, has_checkpoints=True),
)


def small_storage(case: Case) -> KVStorage:
    """Books of a model with one small layer of each kind: what the host does depends on no layer's width."""
    part = MHAGeometry(kv_heads=1, key_dim=8, value_dim=8, dtype=DType.BFLOAT16)
    state = StateGeometry((TensorDecl("state", (64,), DType.FLOAT32),))
    parts = [
        KVPart(part, FullLifetime()),
        KVPart(part, WindowLifetime(WINDOW_TOKENS)),
        KVPart(state, StateLifetime(GRID_TOKENS)),
    ]
    plan = plan_kv_storage(
        [KVLayerDecl(layer, (each,)) for layer, each in enumerate(parts)], page_tokens=case.page_tokens
    )
    return build_kv_storage(
        plan,
        budget_bytes=case.budget_bytes,
        max_running_requests=REQUESTS,
        max_context_tokens=case.context_tokens + 2 * ITERATIONS,
        chunk_tokens=CHUNK_TOKENS,
        policy=ServingPolicy(
            overlap=True,
            strategy=CheckpointStrategy.EXTRA_BUFFER if case.has_checkpoints else CheckpointStrategy.NONE,
        ),
    )


class Loop:
    """The host's part of an overlap loop whose forwards compute nothing."""

    def __init__(self, case: Case) -> None:
        self.storage = storage = small_storage(case)
        prompts = case.context_tokens - ITERATIONS - (np.arange(REQUESTS) % GRID_TOKENS) * case.is_spread
        draw = np.random.default_rng(0)
        rows = storage.admit(
            prompts,
            np.full(REQUESTS, 3 * ITERATIONS),
            prompts=[draw.integers(0, 50_000, count) for count in prompts] if case.has_checkpoints else None,
        )
        assert not isinstance(rows, AdmissionRefusal), rows
        self.rows = rows
        self.chosen = np.zeros(REQUESTS, np.int64) if case.has_checkpoints else None
        self.spent = dict.fromkeys(VERBS, 0)
        self.last: PreparedStep | None = None
        chunk = CHUNK_TOKENS // REQUESTS * 16
        for start in range(0, int(prompts.max()), chunk):
            self.iterate(np.minimum(prompts - start, chunk))

    def iterate(self, counts: np.ndarray, *, resolves: bool = True) -> None:
        """One iteration: N + 1 is launched, then N is processed."""
        storage = self.storage
        answer = self.timed("admit", lambda: storage.admit([512], [512]))
        assert isinstance(answer, AdmissionRefusal)
        step = self.timed("prepare", lambda: storage.prepare_step(self.rows, counts))
        assert isinstance(step, PreparedStep), step
        unresolved = self.timed("launch", lambda: storage.launch_forward(step))
        if resolves:
            self.timed("resolve", unresolved.resolve)
        self.timed("record", lambda: storage.record_forward(step))
        if self.last is not None:
            last = self.last
            self.timed("process", lambda: storage.forward_processed(last))
            self.timed("advance", lambda: storage.advance(last, self.chosen))
        self.last = step

    def timed(self, name: str, call: Callable[[], Answer]) -> Answer:
        """Call, and add up what it took."""
        begin = time.thread_time_ns()
        answer = call()
        self.spent[name] += time.thread_time_ns() - begin
        return answer


class Floor:
    """The bare calls of the same decode steps: a table of pages and a stack a band, which never run out. No ids, rules or checks."""

    def __init__(self, case: Case) -> None:
        self.page_tokens = page = case.page_tokens
        self.rows = np.arange(REQUESTS)
        prompts = case.context_tokens - ITERATIONS - (self.rows % GRID_TOKENS) * case.is_spread
        self.lengths = prompts
        columns = -(-(case.context_tokens + 2 * ITERATIONS) // page)
        self.tables = [np.zeros((REQUESTS, columns), np.int32) for _ in range(2)]
        self.stacks = [np.arange(REQUESTS * columns, dtype=np.int32) for _ in self.tables]
        self.tops = [REQUESTS * columns] * 2
        self.on_device = torch.zeros((2, REQUESTS, columns), dtype=torch.int32)
        self.slots = torch.arange(REQUESTS)

    def serve(self) -> None:
        """Take, upload, retire what the step before has left behind."""
        begins = self.rows[self.lengths % self.page_tokens == 0]
        columns = self.lengths[begins] // self.page_tokens
        changed = []
        for band, table in enumerate(self.tables):
            if len(begins):
                self.tops[band] -= len(begins)
                pages = self.stacks[band][self.tops[band] : self.tops[band] + len(begins)]
                table[begins, columns] = pages
                changed.append(pages)
        if len(begins):
            rows, places, bands = (
                torch.from_numpy(np.tile(begins, 2)),
                torch.from_numpy(np.tile(columns, 2)),
                torch.arange(2).repeat_interleave(len(begins)),
            )
            self.on_device[bands, rows, places] = torch.from_numpy(np.concatenate(changed))
        self.lengths = self.lengths + 1
        behind = self.lengths - WINDOW_TOKENS
        retired = self.rows[(behind % self.page_tokens == 0) & (behind > 0)]
        if len(retired):
            pages = self.tables[1][retired, behind[retired] // self.page_tokens - 1]
            self.stacks[1][self.tops[1] : self.tops[1] + len(retired)] = pages
            self.tops[1] += len(retired)

    def resolve(self) -> None:
        """What kernels index by, of tables that hold physical pages."""
        held = int(self.lengths.max()) // self.page_tokens + 1
        rows, positions = torch.from_numpy(self.rows), torch.from_numpy(self.lengths)
        for table in self.on_device:
            pages = table[:, :held].index_select(0, rows).to(torch.int64)
            pages[rows, positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens
        self.slots.index_select(0, rows)


def figures(case: Case) -> dict[str, float]:
    """Median µs of each verb, of all together and of the floor, over groups of iterations."""
    loop, floor = Loop(case), Floor(case)
    one = np.ones(REQUESTS, np.int64)
    samples: dict[str, list[float]] = {name: [] for name in ROWS}
    group = 16
    for _ in range(ITERATIONS // group):
        loop.spent = dict.fromkeys(loop.spent, 0)
        for _ in range(group):
            loop.iterate(one)
        for name, spent in loop.spent.items():
            samples[name].append(spent / group / 1000)
        samples["all"].append(sum(loop.spent.values()) / group / 1000)
        samples["all but resolve"].append(samples["all"][-1] - samples["resolve"][-1])
        spent_below = [0, 0]
        for _ in range(group):
            for place, part in enumerate((floor.serve, floor.resolve)):
                begin = time.thread_time_ns()
                part()
                spent_below[place] += time.thread_time_ns() - begin
        for name, below in zip(FLOORS, spent_below, strict=True):
            samples[name].append(below / group / 1000)
    # As on a device with a processor of its own: here the ids that are read push the thread's own data out of the caches.
    for _ in range(ITERATIONS // group):
        loop.spent = dict.fromkeys(loop.spent, 0)
        for _ in range(group):
            loop.iterate(one, resolves=False)
        samples[NEVER_RESOLVED].append(sum(loop.spent.values()) / group / 1000)
    return {name: statistics.median(found) for name, found in samples.items()}


def print_table() -> None:
    """A row a verb, a column a case."""
    found = {case: figures(case) for case in CASES}
    print("| µs | " + " | ".join(case.head for case in CASES) + " |")
    print("| - |" + " -: |" * len(CASES))
    for name in ROWS:
        print(f"| {name} | " + " | ".join(f"{found[case][name]:.3g}" for case in CASES) + " |")


def print_together() -> None:
    """What the iteration costs in which all rows come to a checkpoint."""
    loop = Loop(Case(has_checkpoints=True))
    one, costs = np.ones(REQUESTS, np.int64), []
    for _ in range(3 * GRID_TOKENS):
        loop.spent = dict.fromkeys(loop.spent, 0)
        loop.iterate(one)
        costs.append(sum(loop.spent.values()) / 1000)
    costs.sort()
    # Copied behind one iteration, handed over behind the next.
    print(
        f"\nAll rows at one checkpoint: {costs[-2] / 1000:.3g} ms; any other iteration: {statistics.median(costs):.3g} µs."
    )


def profile(page_tokens: int, *, has_checkpoints: bool) -> None:
    """Print where the time of decode iterations goes."""
    loop = Loop(Case(page_tokens, is_spread=has_checkpoints, has_checkpoints=has_checkpoints))
    one = np.ones(REQUESTS, np.int64)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(ITERATIONS):
        loop.iterate(one)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", type=int, metavar="PAGE", help="where the time of an iteration goes")
    parser.add_argument(
        "--checkpoints", action="store_true", help="with --profile: rows in turn, and checkpoints"
    )
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if arguments.profile:
        profile(arguments.profile, has_checkpoints=arguments.checkpoints)
        return
    print(
        f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}, torch {torch.__version__}; thread CPU time; "
        f"load {os.getloadavg()[0]:.1f}\n"
    )
    print_table()
    print_together()


if __name__ == "__main__":
    main()
