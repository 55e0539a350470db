"""Floats are relocated one after another, and none is copied onto bytes another still holds (C6)."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtide.chain.move_order import move_order
from kvtide.chain.pricing import Rearrangement, plan
from kvtide.plan import ArenaLayout, PageSpan

from .layout_oracle import World, arena
from .plan_on_bytes import Bytes, carry_out
from .small_worlds import Question, every_question, questions


def spans_of(*pairs: tuple[int, int]) -> list[PageSpan]:
    return [PageSpan(first_page=first, end_page=end) for first, end in pairs]


@pytest.mark.requirement("C6")
def test_a_float_waits_for_the_neighbour_whose_bytes_it_takes() -> None:
    """Copied in chain order, the first would overwrite the second; copied the other way, the second the first."""
    layout = arena((1, 1, 1, 1), 100)
    spans = spans_of((0, 0), (10, 14), (14, 20), (100, 100))
    assert move_order(layout, spans, spans_of((0, 0), (13, 17), (17, 23), (100, 100)), [1, 2]) == [2, 1]
    assert move_order(layout, spans, spans_of((0, 0), (7, 11), (11, 17), (100, 100)), [1, 2]) == [1, 2]


@pytest.mark.requirement("C6")
def test_one_that_spreads_both_ways_goes_last() -> None:
    """Asked for many units, a float takes bytes of both neighbours: each makes room before it comes."""
    layout = arena((1, 1, 1, 1, 1), 100)
    spans = spans_of((0, 0), (10, 20), (20, 30), (30, 40), (100, 100))
    targets = spans_of((0, 0), (0, 10), (12, 38), (38, 48), (100, 100))
    order = move_order(layout, spans, targets, [1, 2, 3])
    assert order[-1] == 2


@pytest.mark.requirement("C6")
def test_a_float_that_keeps_nothing_leaves_before_others_come() -> None:
    """Its target is empty and said to lie at its anchor, far below; that makes nobody wait, and it waits for nobody."""
    layout = arena((1, 1, 1, 1, 1), 100)
    spans = spans_of((0, 0), (10, 20), (20, 30), (30, 40), (100, 100))
    targets = spans_of((0, 0), (15, 25), (0, 0), (25, 35), (100, 100))
    assert move_order(layout, spans, targets, [3, 1, 2]) == [2, 1, 3]


@st.composite
def shuffles(draw: st.DrawFn) -> tuple[ArenaLayout, list[PageSpan], list[PageSpan]]:
    """Floats of differing units that all go elsewhere, close together, so that most are in somebody's way."""
    count = draw(st.integers(2, 5))
    units = [draw(st.integers(1, 4)) for _ in range(count + 2)]
    layout = arena(units, 60)
    lengths = [draw(st.integers(1, 3)) for _ in range(count)]
    sides = []
    for grown in (0, 2):
        edge, spans = 0, [PageSpan(first_page=0, end_page=0)]
        for place, length in enumerate(lengths, start=1):
            first_page = layout.bands[place].lowest_page_from(edge + draw(st.sampled_from([0, 0, 1, 2, 5])))
            spans.append(
                PageSpan(first_page=first_page, end_page=first_page + length + draw(st.integers(0, grown)))
            )
            edge = layout.bands[place].start_byte(spans[-1].end_page)
        assume(edge <= layout.arena_bytes)
        sides.append(
            [*spans, PageSpan(first_page=layout.bands[-1].page_count, end_page=layout.bands[-1].page_count)]
        )
    return layout, sides[0], sides[1]


@pytest.mark.requirement("C6")
@settings(deadline=None, max_examples=max(300, settings().max_examples))
@given(shuffle=shuffles())
def test_no_float_is_copied_onto_bytes_that_another_holds(
    shuffle: tuple[ArenaLayout, list[PageSpan], list[PageSpan]],
) -> None:
    """On bytes that know whose they are, whatever places and sizes floats come from and go to."""
    layout, spans, targets = shuffle
    world = World(layout, tuple((span.first_page, "l" * span.page_count) for span in spans))
    held = Bytes(world, "")
    places = list(range(1, len(layout.bands) - 1))
    order = move_order(layout, spans, targets, places)
    assert sorted(order) == places
    for place in order:
        held.pack(place, targets[place])
    held.check(targets)


@pytest.mark.requirement("C4", "C6")
def test_plans_of_enumerated_arenas_lose_no_byte_when_carried_out() -> None:
    """Flushes, relocations around fixed pages, then takes: what a plan promises is there, and nothing is overwritten."""
    relocated = set[int]()
    for world, demand in every_question():
        for step in (Rearrangement.FLUSH_ENDS, Rearrangement.RELAYOUT):
            relocated.add(carry_out_if_any(world, demand, step))
    assert {1, 2, 3} <= relocated


@pytest.mark.requirement("C4", "C6")
@settings(deadline=None, max_examples=max(200, settings().max_examples))
@given(question=questions())
def test_plans_of_drawn_arenas_lose_no_byte_when_carried_out(question: Question) -> None:
    """The same, beyond what was thought of."""
    for step in Rearrangement:
        carry_out_if_any(*question, step)


def carry_out_if_any(world: World, demand: tuple[int, ...], step: Rearrangement) -> int:
    """How many floats the plan relocates; 0 where there is no plan."""
    most = 0
    for around_network in (False, True):
        found = plan(world.snapshot, demand, step, around_network=around_network)
        if found is not None:
            carry_out(world, demand, found, around_network=around_network)
            most = max(most, len(found.relocated))
    return most
