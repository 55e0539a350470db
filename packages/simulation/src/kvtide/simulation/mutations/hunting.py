"""How many seeds it takes until a check fails under each mutation; a mutation that none finds has survived."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence

import attrs

from kvtide.simulation.actions import Operation
from kvtide.simulation.failures import Failure
from kvtide.simulation.mutations.table import MUTATIONS
from kvtide.simulation.operations import OPERATIONS
from kvtide.simulation.run import run_seed
from kvtide.simulation.sweep import quiet_logs


@attrs.frozen(kw_only=True)
class Hunt:
    """What seeds found of one mutation."""

    mutation: str
    """Its id."""

    seeds_run: int
    """Seeds that were run, the one that found it the last."""

    failure: Failure | None
    """What the last one found; `None` for a mutation that has survived."""

    @property
    def is_as_it_should_be(self) -> bool:
        """Found, or one that no run can find."""
        return (self.failure is None) == bool(MUTATIONS[self.mutation].unreachable)


@attrs.frozen
class _Task:
    mutation: str
    seeds: Sequence[int]
    action_count: int


def chosen_mutations(names: Sequence[str]) -> list[str]:
    """Ids that are one of `names` or begin with one and a dot, in the table's order; all for none. Raises `ValueError` for a name of nothing."""
    for name in names:
        if not any(_is_named(mutation, name) for mutation in MUTATIONS):
            kinds = sorted({mutation.partition(".")[0] for mutation in MUTATIONS})
            raise ValueError(f"no mutation is called {name!r}, or of that kind; kinds are {', '.join(kinds)}")
    return [
        mutation for mutation in MUTATIONS if not names or any(_is_named(mutation, name) for name in names)
    ]


def hunt(
    mutations: Sequence[str], seeds: Sequence[int], action_count: int, *, jobs: int = 1
) -> Iterator[Hunt]:
    """Run `seeds` of `action_count` actions under each mutation until one fails, in the mutations' order, on `jobs` processes.

    What is drawn are this package's own operations, so that the answer does not depend on what else is installed.
    """
    tasks = [_Task(mutation, seeds, action_count) for mutation in mutations]
    if jobs == 1 or len(tasks) == 1:
        yield from map(_run, tasks)
        return
    # A mutation is planted where its runs are: a worker gets its id.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(tasks)), initializer=quiet_logs) as pool:
        yield from pool.imap(_run, tasks)


def own_operations() -> Mapping[str, Operation]:
    """Those that this package brings, by name."""
    return {operation.name: operation for operation in sorted(OPERATIONS, key=lambda one: one.name)}


def _run(task: _Task) -> Hunt:
    operations, failure, count = own_operations(), None, 0
    with MUTATIONS[task.mutation].planted():
        for seed in task.seeds:
            count += 1
            failure = run_seed(seed, task.action_count, operations).failure
            if failure is not None:
                break
    return Hunt(mutation=task.mutation, seeds_run=count, failure=failure)


def _is_named(mutation: str, name: str) -> bool:
    return mutation == name or mutation.startswith(f"{name}.")
