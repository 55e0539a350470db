"""What the prefix tree costs: a prompt of 32k tokens matched and handed over, and 10,000 pages evicted, in a tree of 10,000 nodes.

The model has full attention, a window and state, on pages of 16 tokens; the tree holds conversations whose turns are nodes, many of
them below one system prompt. Prints a markdown table of medians in µs of thread CPU time beside a floor: the bytes of the prompt
compared or copied once, and pages concatenated. The chain is not asked: the evictions stop at a count. `--profile` prints where the time of an eviction goes.
"""

import argparse
import cProfile
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    plan_kv_storage,
)
from kvtide.storage.tree import CostAware, EvictionPolicy, LeastRecentlyUsed, PrefixTree, TreeLock, TreeShape

PAGE, PROMPT_TOKENS, WINDOW, GRID = 16, 32_768, 1_024, 1_024
NODES, NODE_PAGES = 10_000, 64
EVICTED_PAGES = 10_000
SAMPLES = 21


def shape() -> TreeShape:
    """Full attention, a window and state."""
    layers = [
        KVLayerDecl(0, (KVPart(MLAGeometry(512, 64, DType.BFLOAT16), FullLifetime()),)),
        KVLayerDecl(1, (KVPart(MLAGeometry(512, 64, DType.BFLOAT16), WindowLifetime(WINDOW)),)),
        KVLayerDecl(
            2, (KVPart(StateGeometry((TensorDecl("s", (65_536,), DType.BFLOAT16),)), StateLifetime(GRID)),)
        ),
    ]
    return TreeShape.of(plan_kv_storage(layers, page_tokens=PAGE))


class Grown:
    """A tree of many conversations, and the ids that stand in for a chain's."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.tree = PrefixTree(shape(), policy)
        self.random = np.random.default_rng(1)
        self.next_page = self.next_slot = 1
        system = self.random.integers(0, 200_000, NODE_PAGES * PAGE)
        while self.tree.statistics().nodes < NODES:
            turns = int(self.random.integers(4, 40))
            user = self.random.integers(0, 200_000, turns * NODE_PAGES * PAGE)
            self.serve(np.concatenate([system, user]))

    def admit(self, tokens: np.ndarray) -> TreeLock:
        """Match and lock."""
        lock = self.tree.lock(self.tree.match(tokens))
        self.tree.accept(lock)
        self.tree.state_copied(lock)
        return lock

    def hand_over(self, lock: TreeLock, tokens: np.ndarray) -> None:
        """Give the tree all of `tokens` behind the lock, with a checkpoint at the end."""
        first, end = lock.pages, len(tokens) // PAGE
        pages = np.arange(self.next_page, self.next_page + end - first)
        self.next_page += end - first
        floor = max(0, len(tokens) - WINDOW + 1) // PAGE
        self.tree.insert(
            lock,
            tokens[first * PAGE :],
            pages,
            held_from=[floor],
            needed_from=[floor],
            state=self.next_slot,
        )
        self.next_slot += 1

    def serve(self, tokens: np.ndarray) -> None:
        """A conversation, turn by turn."""
        lock = self.admit(tokens)
        for end in range(lock.pages + NODE_PAGES, len(tokens) // PAGE + 1, NODE_PAGES):
            self.hand_over(lock, tokens[: end * PAGE])
        self.tree.unlock(lock)


def median(prepare: Callable[[], Callable[[], object]]) -> float:
    """Median µs of what `prepare` returns, prepared anew each time."""
    spent = []
    for _ in range(SAMPLES):
        action = prepare()
        before = time.thread_time_ns()
        action()
        spent.append((time.thread_time_ns() - before) / 1000)
    return statistics.median(spent)


def rows(policy: EvictionPolicy) -> list[tuple[str, float, float]]:
    """What, µs, and the floor's µs."""
    grown = Grown(policy)
    tree, draw = grown.tree, grown.random
    known = draw.integers(0, 200_000, PROMPT_TOKENS)
    grown.serve(known)
    raw = known.tobytes()
    compared = median(lambda: lambda: raw.startswith(raw[:-8]))
    copied = median(lambda: known.tobytes)
    found, running = [], list[TreeLock]()

    def match() -> Callable[[], object]:
        return lambda: tree.match(known)

    def hand_over(known_pages: int) -> Callable[[], object]:
        """A prompt whose first pages are known, its system prompt at least, handed over in one piece."""
        fresh = draw.integers(0, 200_000, PROMPT_TOKENS)
        fresh[: known_pages * PAGE] = known[: known_pages * PAGE]
        lock = tree.lock(tree.match(fresh[: NODE_PAGES * PAGE if known_pages else 0]))
        tree.accept(lock)
        tree.state_copied(lock)
        running.append(lock)
        return lambda: grown.hand_over(lock, fresh)

    def lock_and_unlock() -> Callable[[], object]:
        matched = tree.match(known)

        def both() -> None:
            lock = tree.lock(matched)
            tree.accept(lock)
            tree.state_copied(lock)
            tree.unlock(lock)

        return both

    deep = tree.match(known).node
    depth = 0
    while deep.parent is not None:
        deep, depth = deep.parent, depth + 1
    found.append((f"match, all of it known, {depth} nodes deep", median(match), compared))
    found.append(("lock and unlock of that hit", median(lock_and_unlock), 0.0))
    found.append(("insert, nothing known", median(lambda: hand_over(0)), copied))
    found.append(("insert, half of it known: duplicates freed", median(lambda: hand_over(1024)), copied))

    def evict() -> Callable[[], object]:
        while tree.evictable_units()["full"] < 40 * EVICTED_PAGES:
            grown.serve(draw.integers(0, 200_000, 30 * NODE_PAGES * PAGE))
        return lambda: tree.evict(lambda units: units["full"] >= EVICTED_PAGES)

    parts = [np.arange(NODE_PAGES) for _ in range(EVICTED_PAGES // NODE_PAGES)]
    found.append(
        (f"evict {EVICTED_PAGES:,} pages", median(evict), median(lambda: lambda: np.concatenate(parts)))
    )
    tree.verify(running)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", action="store_true", help="print where the time of an eviction goes")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if arguments.profile:
        grown = Grown(LeastRecentlyUsed())
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(20):
            grown.tree.evict(lambda units: units["full"] >= EVICTED_PAGES)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(14)
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, pinned to one; ", end="")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}")
    print("\n| policy | operation | µs | floor, µs |")
    print("| - | - | -: | -: |")
    for policy in (LeastRecentlyUsed(), CostAware()):
        for what, spent, floor in rows(policy):
            print(f"| {type(policy).__name__} | {what} | {spent:.0f} | {floor:.0f} |")


if __name__ == "__main__":
    main()
