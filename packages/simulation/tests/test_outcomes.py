"""What operations may say, and that all of it is said: an outcome that nothing reaches is a case that nothing checks."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtide.simulation import Operation, not_reached, phrases, run_actions, run_seed

from .outcome_stories import STORIES

SEEDS = range(90)
ACTIONS = 200
CUT = range(8)
"""Seeds of which parts are run, too."""


@pytest.mark.requirement("X1", "V3", "A5", "C1", "C2", "C5", "C10", "C11", "C13", "L2", "L3", "P10")
def test_every_outcome_is_reached_and_every_promise_kept(operations: dict[str, Operation]) -> None:
    """A slice of what runs weekly, parts of it, and stories: no check fails, and whatever an operation may meet, some sequence does.

    What is not reached any more, since seeds draw otherwise or an operation says more, wants a story.
    """
    coverage: Counter[tuple[str, str]] = Counter()
    facts: Counter[str] = Counter()
    for seed in SEEDS:
        run = run_seed(seed, ACTIONS, operations)
        assert run.failure is None, f"seed {seed}: {run.failure}"
        assert len(run.actions) == ACTIONS
        coverage.update(run.coverage)
        facts.update(run.facts)
        # Only what was drawn for another state finds nothing to do.
        for part in (run.actions[::-1], run.actions[1::3]) if seed in CUT else ():
            cut = run_actions(run.scenario, part, operations)
            assert cut.failure is None, f"a part of seed {seed}: {cut.failure}"
            coverage.update(cut.coverage)
    for story in STORIES:
        coverage.update(run_actions(story.scenario, story.actions, operations).coverage)
    assert not_reached(operations, coverage) == {}
    assert facts["units moved"] > 500
    assert facts["units promised"] > 500
    assert facts["units of older pages bound"] > 100


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("place", range(len(STORIES)))
def test_a_story_reaches_what_it_is_kept_for(place: int, operations: dict[str, Operation]) -> None:
    """Whatever seeds draw."""
    story = STORIES[place]
    run = run_actions(story.scenario, story.actions, operations)
    assert run.failure is None
    assert story.reaches <= set(run.coverage)


@pytest.mark.requirement("X1")
def test_what_was_never_met_is_told_by_operation(operations: dict[str, Operation]) -> None:
    """In an order that repeats; an operation that met everything is not named."""
    few = {name: operations[name] for name in ("rest", "admit")}
    met = {("rest", "empty"), ("rest", "with requests"), ("admit", "admitted")}
    assert not_reached(few, met) == {"admit": ["no row free", "refused"]}
    assert not_reached(few, set()) == {
        "rest": ["empty", "with requests"],
        "admit": ["admitted", "no row free", "refused"],
    }


def test_phrases_are_all_that_their_parts_can_say() -> None:
    """A part that is a text has no alternative, one of several parts is left out by an empty one."""
    assert phrases("fits") == {"fits"}
    assert phrases(("in", "out"), " of ", ("", "all ")) == {"in of ", "in of all ", "out of ", "out of all "}
