"""Pricing against every layout of small arenas (C4)."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings

from kvtide.chain.pricing import LayoutPlan, feasible, first_plan, plan

from .layout_oracle import STEPS, Oracle
from .small_worlds import Question, every_question, is_sound, questions


def check_question(question: Question) -> None:
    """Every answer about one question, with transfers in the way and without."""
    world, demand = question
    snapshot = world.snapshot
    for around_network in (False, True):
        oracle = Oracle(world, demand, around_network=around_network)
        costs = oracle.least_cost()
        for step, cost in zip(STEPS, costs, strict=True):
            found = plan(snapshot, demand, step, around_network=around_network)
            assert (found is not None) == (cost is not None), (
                f"{question} {step} around={around_network}: {found} {cost}"
            )
            if found is not None:
                check_plan(question, oracle, found)
                assert found.step is step
                assert (found.moved_bytes, rearranged_count(found)) == cost, f"{question} {found}"
        first = first_plan(snapshot, demand, around_network=around_network)
        serving = [step for step, cost in zip(STEPS, costs, strict=True) if cost is not None]
        assert first == (
            plan(snapshot, demand, serving[0], around_network=around_network) if serving else None
        ), question
        if not around_network:
            assert feasible(snapshot, demand) == bool(serving), question


def rearranged_count(found: LayoutPlan) -> int:
    return len(found.flushed) + len(found.relocated)


def check_plan(question: Question, oracle: Oracle, found: LayoutPlan) -> None:
    """The plan is one of the oracle's layouts: each span is a choice of its band, as rearranged as it says, in order."""
    world, _ = question
    edge = world.layout.prefix_bytes
    moved = 0
    for place, (span, choices) in enumerate(zip(found.spans, oracle.choices, strict=True)):
        rearranged = place in found.flushed or place in found.relocated
        fitting = [
            choice
            for choice in choices
            if (choice.first_page, choice.end_page, choice.rearranged)
            == (span.first_page, span.end_page, rearranged)
        ]
        assert fitting, f"{question}: band {place} may not stand at {span} in {found}"
        moved += fitting[0].moved_bytes
        assert fitting[0].step <= STEPS.index(found.step), f"{question}: {found} does more than its step may"
        if fitting[0].bytes_held is not None:
            assert edge <= fitting[0].bytes_held[0], (
                f"{question}: band {place} overlaps a lower one in {found}"
            )
            edge = fitting[0].bytes_held[1]
    assert moved == found.moved_bytes
    assert all(0 < place < len(world.bands) - 1 for place in found.relocated)


@pytest.mark.requirement("C4")
def test_folding_loses_no_layout() -> None:
    """The oracle itself, on a sample: combinations tried one by one give what they give folded over their ends."""
    compared = 0
    for world, demand in itertools.islice(every_question(), 0, None, 17):
        for around_network in (False, True):
            oracle = Oracle(world, demand, around_network=around_network)
            if math.prod(len(choices) for choices in oracle.choices) < 20_000:
                assert oracle.least_cost() == oracle.least_cost_unfolded()
                compared += len(world.bands) > 2
    assert compared > 50


@pytest.mark.requirement("C4")
def test_every_answer_is_that_of_exhaustive_search() -> None:
    """Thousands of arenas, each feature in every place: no layout is missed, none is invented, none is too dear."""
    count = 0
    for question in every_question():
        assert is_sound(question[0])
        check_question(question)
        count += 1
    assert count > 5000


@pytest.mark.requirement("C4")
@settings(deadline=None, max_examples=max(200, settings().max_examples))
@given(question=questions())
def test_drawn_arenas_are_answered_as_exhaustive_search_does(question: Question) -> None:
    """Beyond what was thought of; `--hypothesis-profile nightly` draws thousands."""
    assert is_sound(question[0])
    check_question(question)
