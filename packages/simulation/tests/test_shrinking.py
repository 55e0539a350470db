"""Failures become minimal, and files that run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtide.ledger import InvariantError
from kvtide.simulation import (
    Case,
    Numbers,
    Operation,
    Run,
    World,
    load_case,
    run_actions,
    run_seed,
    save_case,
    shrink,
)
from kvtide.simulation.mutations import MUTATIONS
from kvtide.simulation.mutations.mutation import Patch


def failing_run(name: str, patch: Patch, operations: dict[str, Operation]) -> Run:
    MUTATIONS[name].plant(patch)
    runs = (run_seed(seed, 150, operations) for seed in range(20))
    return next(run for run in runs if run.failure is not None)


@pytest.mark.requirement("X1")
@pytest.mark.parametrize(
    ("name", "most_actions", "rank_count"),
    [("wait.settle", 8, 1), ("upload.rows", 4, 1), ("ranks.frees", 3, 2)],
)
def test_a_failure_shrinks_to_a_handful_of_actions_that_are_all_needed(
    name: str, most_actions: int, rank_count: int, patch: Patch, operations: dict[str, Operation]
) -> None:
    """What is left can be read, runs again alike, and none of it can be left out: nor a rank, but where ranks differ."""
    run = failing_run(name, patch, operations)
    small = shrink(run, operations)
    assert run.failure is not None
    assert small.failure is not None
    assert small.failure.check == run.failure.check
    assert len(small.actions) <= min(most_actions, len(run.actions))
    assert len(small.scenario.bands) <= 3
    assert len(small.scenario.rank_seeds) == rank_count
    assert run_actions(small.scenario, small.actions, operations) == small
    for place in range(len(small.actions)):
        rest = run_actions(small.scenario, small.actions[:place] + small.actions[place + 1 :], operations)
        assert rest.failure is None or not rest.failure.is_like(small.failure)
    patch.undo()
    assert run_actions(small.scenario, small.actions, operations).failure is None


def test_a_shrink_that_may_try_nothing_leaves_the_run_as_it_is(
    patch: Patch, operations: dict[str, Operation]
) -> None:
    """Tries bound what a shrink costs."""
    run = failing_run("upload.rows", patch, operations)
    assert shrink(run, operations, most_tries=0) == run
    assert len(shrink(run, operations, most_tries=30).actions) < len(run.actions)


class Slip:
    """Two faults behind one check: many pages break one rule, one page another."""

    name = "slip"
    weight = 1
    outcomes = frozenset({"stood"})

    def __init__(self, slip: Exception) -> None:
        self.slip = slip

    def generate(self, rng: object, world: World) -> Numbers | None:
        return {"pages": 7}

    def apply(self, world: World, numbers: Numbers) -> str:
        if numbers["pages"] > 1:
            raise InvariantError("usage.fixed_page_stays", "the fault that was hunted", "")
        if numbers["pages"]:
            raise self.slip
        return "stood"


@pytest.mark.requirement("X1")
@pytest.mark.parametrize(
    "slip",
    [KeyError("a slip of the scheduler's own"), InvariantError("forward.fresh_event", "another rule", "")],
)
def test_a_shrink_keeps_to_the_fault_that_was_found(slip: Exception) -> None:
    """All that is unexpected is one check; a smaller case of another error would be the wrong case to mend."""
    known: dict[str, Operation] = {"slip": Slip(slip)}
    run = run_seed(0, 5, known)
    small = shrink(run, known)
    assert run.failure is not None
    assert small.failure is not None
    assert run.failure.cause == small.failure.cause == "usage.fixed_page_stays"
    assert [action.numbers["pages"] for action in small.actions] == [2]


@pytest.mark.requirement("X1")
def test_a_case_is_a_file_that_runs_again(
    patch: Patch, operations: dict[str, Operation], tmp_path: Path
) -> None:
    """One action a line, so that people can read and cut it."""
    run = failing_run("upload.rows", patch, operations)
    case = Case.of(run, seed=7)
    path = tmp_path / "case.json"
    save_case(path, case)
    loaded = load_case(path)
    assert loaded == case
    assert run_actions(loaded.scenario, loaded.actions, operations).failure == run.failure
    text = path.read_text(encoding="utf-8")
    assert sum(line.lstrip().startswith('{"do": ') for line in text.splitlines()) == len(run.actions)
    assert '"kvtide-chain": ' in text


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("scenario", "row_count"), 0, "its row_count is 0"),
        (("scenario", "overlap"), True, "its overlap is True"),
        (("scenario", "flush_reach"), "x", "its flush_reach is 'x'"),
        (("scenario", "rank_seeds"), [], r"its rank_seeds are \[\]"),
        (("scenario", "rank_seeds"), ["x"], "its rank_seeds are"),
        (("scenario", "micro_batches"), 1, "its micro_batches is 1"),
        (("scenario", "bands", 0, "kind"), "chunk", "kind is 'chunk'"),
        (("scenario", "bands", 0, "page_tokens"), 0, "page_tokens is 0"),
        (("device",), "tpu", "its device is 'tpu'"),
    ],
)
def test_a_case_that_no_run_could_have_is_refused(
    place: tuple[str | int, ...], value: object, why: str, operations: dict[str, Operation], tmp_path: Path
) -> None:
    """Edited by hand, it would end in an error that reads as the allocator's."""
    path = tmp_path / "case.json"
    save_case(path, Case.of(run_seed(0, 2, operations), seed=0))
    document = json.loads(path.read_text(encoding="utf-8"))
    within: Any = document
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = value
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ValueError, match=why):
        load_case(path)


def test_a_case_that_names_no_device_is_of_modelled_ones(
    operations: dict[str, Operation], tmp_path: Path
) -> None:
    """As all were that were written before there were others."""
    path = tmp_path / "case.json"
    save_case(path, Case.of(run_seed(0, 2, operations), seed=0))
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["device"]
    path.write_text(json.dumps(document), encoding="utf-8")
    assert load_case(path).device == "modelled"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'format'"),
        ('{"format": 99}', "its format is 99, this version reads 1"),
        ('{"format": 1, "scenario": {"bands": []}}', "KeyError"),
    ],
)
def test_a_file_that_is_no_case_is_refused_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    """Files come from other versions and from editors."""
    path = tmp_path / "case.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"case\.json holds no case: ") as error:
        load_case(path)
    assert why in str(error.value)
