"""Whole runs over the allocator as it ships."""

from __future__ import annotations

from collections import Counter

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

SEEDS = range(90)
ACTIONS = 200

MET = {
    ("abort", "with work queued"),
    ("admit", "refused"),
    ("ask", "does not fit"),
    ("checkpoint", "kept, moved"),
    ("checkpoint", "kept, settled"),
    ("checkpoint", "copied over, in the open batch"),
    ("drop checkpoints", "dropped, under a forward"),
    ("drop tail", "dropped, under a forward"),
    ("ensure capacity", "made room"),
    ("ensure capacity", "made room, taken"),
    ("ensure capacity", "refused"),
    ("fill", "filled, moved"),
    ("fill", "filled thinly, moved"),
    ("finish", "under three forwards or more"),
    ("finish", "under two forwards, in the open batch"),
    ("flush", "moved, idle"),
    ("flush", "moved, under a forward"),
    ("lull", "a forward reads, flushed"),
    ("fork", "copied, under a forward"),
    ("launch", "another micro-batch has a request of it"),
    ("launch", "launched, pages asked for meanwhile"),
    ("launch", "launched, writes unknown"),
    ("pass time", "the forward is over"),
    ("pass time", "the forward still runs"),
    ("process", "processed, 3 left in flight"),
    ("process", "processed, 1 left in flight, flushed"),
    ("rebind", "settled"),
    ("rehome", "rehomed with a debt, given up"),
    ("rehome", "rehomed, idle"),
    ("rest", "with requests"),
    ("restore", "copied over, under a forward"),
    ("restore", "restored, under a forward"),
    ("retire", "passed, under a forward"),
    ("lull", "a forward reads, flushed, polled"),
    ("what if", "as the clone, moved"),
    ("what if", "refused"),
    *(
        ("grow", f"{cover}: {how}")
        for cover in ("whole", "tails", "reached", "some", "none")
        for how in ("in place", "settled", "moved", "refused")
    ),
    *(
        ("misuse", mistake)
        for mistake in (
            "a copy of what is not bound",
            "a copy onto itself",
            "a free before the windows",
            "a free of a masked row",
            "a free of one unit twice",
            "a free of the sink",
            "a free of what a load has reserved",
            "a free of what is not bound",
            "a free past the last id",
            "a payment onto what is fixed",
            "a take for a page never minted",
            "a take of a page that is bound nowhere",
            "a take of less than nothing",
            "a take of what is bound",
        )
    ),
}
"""What a slice of seeds must have met, or it proves less than it says."""


@pytest.mark.requirement("X1", "V3", "A5", "C1", "C2", "C5", "C10", "C11", "C13", "L2", "L3", "P10")
def test_the_allocator_as_shipped_keeps_every_promise(operations: dict[str, Operation]) -> None:
    """A slice of what runs nightly: no check fails, and every case that the checks are about has come up."""
    coverage: Counter[tuple[str, str]] = Counter()
    facts: Counter[str] = Counter()
    for seed in SEEDS:
        run = run_seed(seed, ACTIONS, operations)
        assert run.failure is None, f"seed {seed}: {run.failure}"
        assert len(run.actions) == ACTIONS
        coverage.update(run.coverage)
        facts.update(run.facts)
    assert set() == MET - set(coverage)
    assert facts["units moved"] > 500
    assert facts["units promised"] > 500
    assert facts["units of older pages bound"] > 100


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
