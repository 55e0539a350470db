"""Whole runs over the allocator as it ships."""

from __future__ import annotations

import attrs
import pytest

from kvtide.simulation import (
    Action,
    CheckFailedError,
    Numbers,
    Operation,
    World,
    run_actions,
    run_seed,
)


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("seed", range(6))
def test_a_seed_and_its_actions_make_the_same_run(seed: int, operations: dict[str, Operation]) -> None:
    """A failure that cannot be had again cannot be mended."""
    run = run_seed(seed, 120, operations)
    assert run_seed(seed, 120, operations) == run
    assert run_actions(run.scenario, run.actions, operations) == run


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("seed", range(8))
def test_any_part_of_a_sequence_can_be_run(seed: int, operations: dict[str, Operation]) -> None:
    """Numbers are read relative to the state they meet; a shrink takes out what it likes."""
    run = run_seed(seed, 120, operations)
    for part in (run.actions[::2], run.actions[1::3], run.actions[60:], run.actions[::-1]):
        assert run_actions(run.scenario, part, operations).failure is None


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("seed", range(6))
def test_numbers_mean_something_in_any_state(seed: int, operations: dict[str, Operation]) -> None:
    """A shrink makes any number smaller, on its own."""
    run = run_seed(seed, 120, operations)
    for smaller in (lambda value: 0, lambda value: value // 2, lambda value: value & (value - 1)):
        actions = [
            attrs.evolve(one, numbers={name: smaller(value) for name, value in one.numbers.items()})
            for one in run.actions
        ]
        assert run_actions(run.scenario, actions, operations).failure is None


def test_an_operation_that_is_not_installed_is_named(operations: dict[str, Operation]) -> None:
    """A case from a machine with more packages says what is missing here."""
    scenario = run_seed(0, 1, operations).scenario
    with pytest.raises(ValueError, match=r"operations \['backup'\] are not installed"):
        run_actions(scenario, [Action("backup", {})], operations)


class Stumble:
    """Fails at its third action, or at the end of a run."""

    name = "stumble"
    weight = 1
    outcomes = frozenset({"stood"})

    def __init__(self) -> None:
        self.count = 0

    def generate(self, rng: object, world: World) -> Numbers | None:
        return {}

    def apply(self, world: World, numbers: Numbers) -> str:
        self.count += 1
        if self.count == 3:
            raise CheckFailedError("lost_write", "it stumbled")
        if numbers.get("leak"):
            world.shadow.bound[world.bands[0].name][1] = True
        return "stood"


def test_a_failure_says_where_it_was_found() -> None:
    """The action's place, or one past the last for what the end of the run finds."""
    known: dict[str, Operation] = {"stumble": Stumble()}
    run = run_seed(0, 10, known)
    assert run.failure is not None
    assert (run.failure.check, run.failure.action_index, len(run.actions)) == ("lost_write", 2, 3)
    assert str(run.failure) == "lost_write at action 2: it stumbled"
    assert run_seed(0, 2, {"stumble": Stumble()}).failure is None


class Wreck:
    """Leaves books that cannot even be read, or draws what it cannot."""

    name = "wreck"
    weight = 1
    outcomes: frozenset[str] = frozenset()

    def __init__(self, where: str) -> None:
        self.where = where

    def generate(self, rng: object, world: World) -> Numbers | None:
        if self.where == "drawing":
            raise ZeroDivisionError("drawn amiss")
        return {}

    def apply(self, world: World, numbers: Numbers) -> str:
        if self.where == "books":
            world.ranks[0].chain._bands = [None]
        raise KeyError("it was wrecked")


@pytest.mark.requirement("X1")
@pytest.mark.parametrize(
    ("where", "raised"), [("books", "KeyError"), ("action", "KeyError"), ("drawing", "ZeroDivisionError")]
)
def test_whatever_is_raised_is_a_failure_of_its_run(where: str, raised: str) -> None:
    """A sweep goes on to its other seeds, and says which one it was; also where nothing can be read afterwards."""
    run = run_seed(0, 10, {"wreck": Wreck(where)})
    assert run.failure is not None
    assert (run.failure.check, run.failure.action_index) == ("unexpected_error", 0)
    assert run.failure.message.startswith(f"{raised}: ")
    assert run.failure.cause.startswith(f"{raised} in ")
    assert run_seed(0, 0, {"wreck": Wreck("action")}).failure is None


def test_an_allocator_that_cannot_be_made_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first action."""
    monkeypatch.setattr("kvtide.simulation.run.World", lambda _: {}[1])
    run = run_seed(0, 10, {"stumble": Stumble()})
    assert run.failure is not None
    assert (run.failure.check, run.failure.action_index, run.actions) == ("unexpected_error", 0, ())
    assert run.facts == {}
