"""Many seeds, on several processes, summed up."""

from __future__ import annotations

import logging
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs
import structlog

from kvtide.simulation.actions import installed_operations
from kvtide.simulation.run import Run, run_seed
from kvtide.simulation.shrinking import shrink


@attrs.frozen
class SeedRun:
    """One seed's run, and the minimal one it was shrunk to."""

    seed: int
    """Which."""

    run: Run
    """As drawn."""

    shrunk: Run | None
    """`None` where nothing failed, or nobody asked."""


@attrs.frozen
class _Task:
    seed: int
    action_count: int
    minimize: bool


@attrs.define
class Totals:
    """Sums over runs."""

    seeds: int = 0
    """Runs."""

    actions: int = 0
    """Actions carried out."""

    coverage: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """Pair of operation and outcome → how often."""

    facts: Counter[str] = attrs.field(factory=Counter)
    """What happened how often, beside outcomes."""

    failed: list[SeedRun] = attrs.field(factory=list)
    """Seeds that failed."""

    def add(self, result: SeedRun) -> None:
        """Count one run in."""
        self.seeds += 1
        self.actions += len(result.run.actions)
        self.coverage.update(result.run.coverage)
        self.facts.update(result.run.facts)
        if result.run.failure is not None:
            self.failed.append(result)


def sweep(
    seeds: Sequence[int], action_count: int, *, jobs: int = 1, minimize: bool = False
) -> Iterator[SeedRun]:
    """Run seeds of `action_count` actions each on `jobs` processes, and shrink what fails if told to; in the seeds' order."""
    tasks = [_Task(seed, action_count, minimize) for seed in seeds]
    if jobs == 1 or len(tasks) == 1:
        yield from map(_run, tasks)
        return
    # Spawned, not forked: a forked child would inherit whatever threads and locks the caller has.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(tasks)), initializer=quiet_logs) as pool:
        yield from pool.imap(_run, tasks)


def quiet_logs() -> None:
    """Only warnings: a run moves pages thousands of times, and each is logged."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def _run(task: _Task) -> SeedRun:
    operations = installed_operations()
    run = run_seed(task.seed, task.action_count, operations)
    shrunk = shrink(run, operations) if task.minimize and run.failure is not None else None
    return SeedRun(task.seed, run, shrunk)
