"""What one decode iteration costs a scheduler in kvtide: everything that `KVStorage` does for it on the host, with overlap.

256 requests decode one token each, forward after forward: an admission is asked and refused, a step prepared, launched and
recorded, the one before it processed and advanced over, and window pages that fell behind retire. Prints a markdown table of
medians in µs of thread CPU time on one core, by page size, by context length and by arena size; `chain.py` has the floor of the
books among them. On the CPU device an upload and the zeroing of pages are done at once, and counted; what a forward does on its
own stream, the translation of its ids first, is not run. `--profile PAGE` prints where the time goes.
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
from kvtide.sizing import ServingPolicy
from kvtide.storage import AdmissionRefusal, KVStorage, PreparedStep, build_kv_storage

REQUESTS, CHUNK_TOKENS, WINDOW_TOKENS = 256, 8192, 128
PAGE_SIZES = (1, 16, 64)
ITERATIONS = 256
VERBS = ("admit", "prepare", "launch", "record", "process", "advance")


Answer = TypeVar("Answer")


class Case(NamedTuple):
    """One column of the table."""

    page_tokens: int
    context_tokens: int
    budget_bytes: int


CASES = (
    *(Case(page, 4096, 400_000_000) for page in PAGE_SIZES),
    Case(16, 1024, 400_000_000),
    Case(16, 16_384, 400_000_000),
    Case(16, 4096, 2_000_000_000),
)


def small_storage(case: Case) -> KVStorage:
    """Books of a model with one small layer of each kind: what the host does depends on no layer's width."""
    part = MHAGeometry(kv_heads=1, key_dim=8, value_dim=8, dtype=DType.BFLOAT16)
    state = StateGeometry((TensorDecl("state", (64,), DType.FLOAT32),))
    parts = [
        KVPart(part, FullLifetime()),
        KVPart(part, WindowLifetime(WINDOW_TOKENS)),
        KVPart(state, StateLifetime()),
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
        policy=ServingPolicy(overlap=True),
    )


class Loop:
    """The host's part of an overlap loop whose forwards compute nothing."""

    def __init__(self, case: Case) -> None:
        self.storage = storage = small_storage(case)
        prompt = case.context_tokens - ITERATIONS
        rows = storage.admit(np.full(REQUESTS, prompt), np.full(REQUESTS, 3 * ITERATIONS))
        assert not isinstance(rows, AdmissionRefusal), rows
        self.rows = rows
        self.spent = dict.fromkeys(VERBS, 0)
        self.last: PreparedStep | None = None
        for start in range(0, prompt, CHUNK_TOKENS // REQUESTS * 16):
            count = min(prompt - start, CHUNK_TOKENS // REQUESTS * 16)
            self.iterate(np.full(REQUESTS, count))

    def iterate(self, counts: np.ndarray) -> None:
        """One iteration: N + 1 is launched, then N is processed."""
        storage = self.storage
        answer = self.timed("admit", lambda: storage.admit([512], [512]))
        assert isinstance(answer, AdmissionRefusal)
        step = self.timed("prepare", lambda: storage.prepare_step(self.rows, counts))
        assert isinstance(step, PreparedStep), step
        self.timed("launch", lambda: storage.launch_forward(step))
        self.timed("record", lambda: storage.record_forward(step))
        if self.last is not None:
            last = self.last
            self.timed("process", lambda: storage.forward_processed(last))
            self.timed("advance", lambda: storage.advance(last))
        self.last = step

    def timed(self, name: str, call: Callable[[], Answer]) -> Answer:
        """Call, and add up what it took."""
        begin = time.thread_time_ns()
        answer = call()
        self.spent[name] += time.thread_time_ns() - begin
        return answer


def figures(case: Case) -> dict[str, float]:
    """Median µs of each verb, and of all together, over groups of iterations."""
    loop = Loop(case)
    one = np.ones(REQUESTS, np.int64)
    samples: dict[str, list[float]] = {name: [] for name in (*loop.spent, "all")}
    group = 16
    for _ in range(ITERATIONS // group):
        loop.spent = dict.fromkeys(loop.spent, 0)
        for _ in range(group):
            loop.iterate(one)
        for name, spent in loop.spent.items():
            samples[name].append(spent / group / 1000)
        samples["all"].append(sum(loop.spent.values()) / group / 1000)
    return {name: statistics.median(found) for name, found in samples.items()}


def print_table() -> None:
    """A row a verb, a column a case."""
    found = {case: figures(case) for case in CASES}
    heads = [
        f"page {case.page_tokens}, {case.context_tokens:,} tokens, {case.budget_bytes / 1e9:g} GB"
        for case in CASES
    ]
    print("| µs | " + " | ".join(heads) + " |")
    print("| - |" + " -: |" * len(heads))
    for name in (*VERBS, "all"):
        print(f"| {name} | " + " | ".join(f"{found[case][name]:.3g}" for case in CASES) + " |")


def profile(page_tokens: int) -> None:
    """Print where the time of decode iterations goes."""
    loop = Loop(Case(page_tokens, 4096, 400_000_000))
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
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    if arguments.profile:
        profile(arguments.profile)
        return
    print(
        f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}, torch {torch.__version__}; thread CPU time\n"
    )
    print_table()


if __name__ == "__main__":
    main()
