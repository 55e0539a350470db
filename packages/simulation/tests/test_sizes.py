"""Thresholds as small as arenas here: what serves large arenas runs too, and decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import attrs
import pytest

from kvtide.simulation import Operation, load_case, run_actions, run_seed, save_case
from kvtide.simulation.cases import Case
from kvtide.simulation.mutations.mutation import Patch
from kvtide.simulation.sizes import SMALL, sized_for

SEEDS = range(12)
ACTIONS = 200

AT_LARGE = (
    "kvtide.chain.hole_set:HoleSet._holes_in",
    "kvtide.chain.hole_set:HoleSet._flag",
    "kvtide.chain.band_units:BandUnits._leaves_at_once",
    "kvtide.ledger.fenced_bytes:FencedBytes._tidy",
    "kvtide.ledger.vacated_pages:VacatedPages._tidied",
    "kvtide.ledger.use_index:UseIndex._grow",
)
"""Functions whose whole body, or a part told below, is for arenas of many units."""


def counting(patch: Patch, counts: Counter[str]) -> None:
    """Count calls that do something of what `AT_LARGE` names."""

    def counted(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(owner: Any, *args: Any, **named: Any) -> Any:
                before = getattr(owner, "_number_count", 0)
                answer = original(owner, *args, **named)
                does = {
                    "_leaves_at_once": answer is True,
                    "_tidy": getattr(owner, "_number_count", 0) < before,
                    "_flag": bool(args and hasattr(args[0], "__len__") and len(args[0])),
                }
                counts[path] += does.get(path.rpartition(".")[2], True)
                return answer

            return call

        return make

    for path in AT_LARGE:
        patch.around(path, counted(path))


@pytest.mark.requirement("X1")
def test_what_serves_large_arenas_runs_and_decides_nothing(
    patch: Patch, operations: dict[str, Operation]
) -> None:
    """Half of the books of a band is for thousands of units; in arenas of tens it ran in no seed, and any fault in it stood."""
    counts: Counter[str] = Counter()
    counting(patch, counts)
    for seed in SEEDS:
        run = run_seed(seed, ACTIONS, operations)
        runs = [
            run_actions(attrs.evolve(run.scenario, small_thresholds=small), run.actions, operations)
            for small in (False, True)
        ]
        assert run.failure is None
        assert runs[0] == attrs.evolve(runs[1], scenario=runs[0].scenario)
    assert {path for path, count in counts.items() if count} == set(AT_LARGE)


@pytest.mark.requirement("X1")
def test_thresholds_are_put_back(operations: dict[str, Operation]) -> None:
    """A failure in one run leaves the next one alone; every constant that is named is there."""
    scenario = attrs.evolve(run_seed(0, 1, operations).scenario, small_thresholds=True, flush_reach=1)
    hole_set = import_module("kvtide.chain.hole_set")
    before = hole_set._BLOCK_PAGES

    def fail() -> None:
        with sized_for(scenario):
            assert SMALL["kvtide.chain.hole_set._BLOCK_PAGES"] == hole_set._BLOCK_PAGES
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert hole_set._BLOCK_PAGES == before > SMALL["kvtide.chain.hole_set._BLOCK_PAGES"]


@pytest.mark.requirement("X1")
def test_thresholds_are_part_of_a_case(tmp_path: Any, operations: dict[str, Operation]) -> None:
    """They replay with it, and a shrink does without them where it can."""
    run = next(
        run
        for run in (run_seed(seed, 2, operations) for seed in range(50))
        if run.scenario.small_thresholds and run.scenario.flush_reach == 1
    )
    save_case(tmp_path / "case.json", Case.of(run, seed=None))
    assert load_case(tmp_path / "case.json").scenario == run.scenario
    simpler = list(run.scenario.simpler())
    assert attrs.evolve(run.scenario, small_thresholds=False) in simpler
    assert attrs.evolve(run.scenario, flush_reach=16) in simpler
