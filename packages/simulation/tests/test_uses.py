"""Copies, transfers and fixed units in runs: what they meet, and the exhaustive answer."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtide.plan import ArenaLayout
from kvtide.simulation import (
    MUTATIONS,
    Action,
    BandDraft,
    Operation,
    Scenario,
    run_actions,
    run_seed,
)
from kvtide.simulation.reach import Need, some_layout_holds

SEEDS = range(100, 180)
ACTIONS = 200


@pytest.mark.requirement("X1", "V3", "L4", "L5", "C6", "H1", "H2", "T1", "T3", "T4", "T6")
def test_units_that_others_use_are_safe(operations: dict[str, Operation]) -> None:
    """No check fails, over seeds of their own, and there was something to see: reliefs that wait for uses, moves under them."""
    coverage: Counter[tuple[str, str]] = Counter()
    facts: Counter[str] = Counter()
    for seed in SEEDS:
        run = run_seed(seed, ACTIONS, operations)
        assert run.failure is None, f"seed {seed}: {run.failure}"
        coverage.update(run.coverage)
        facts.update(run.facts)
    moved = sum(count for (_, outcome), count in coverage.items() if "moved elsewhere meanwhile" in outcome)
    assert moved > 2
    assert facts["requests left"] > 60
    assert facts["vacated under a send"] > 2
    assert facts["sends waited for"] > 2
    assert facts["receives waited for"] > 2
    assert facts["requests over within a wait"] > 0


SLOTS = Scenario(
    bands=(BandDraft(kind="state", entry_bytes=16),),
    arena_bytes=48,
    row_count=3,
    overlap=1,
    declares_read_end=True,
    rank_seeds=(1, 2),
    random_queries=False,
)
"""Three slots, one a request."""


@pytest.mark.requirement("X1", "X2", "C7", "L4")
def test_what_a_flush_leaves_under_a_send_is_nobodys_before_the_send_is_over(
    operations: dict[str, Operation],
) -> None:
    """By hand: of three slots the innermost is freed, both others are sent, and the outermost one's request is called off.

    A flush moves the middle one in. Its place lies inside the span, for the outermost slot stays, and the next request may not have it.
    """
    admit, end = Action("admit", {}), Action("end use", {"use": 0, "waits": 1, "closes": 0})
    lull = Action("lull", {"leaving": 3, "requests": 2, "readers": 0, "then": 0})
    story = [admit, admit, admit, Action("finish", {"requests": 1}), lull, admit, end, end, admit]
    run = run_actions(SLOTS, story, operations)
    assert run.failure is None
    assert run.coverage["lull", "idle, flushed"] == 1
    assert (run.facts["requests left"], run.facts["vacated under a send"]) == (2, 1)
    assert (run.coverage["admit", "refused"], run.coverage["admit", "admitted"]) == (1, 4)
    with MUTATIONS["vacated.send"].planted():
        broken = run_actions(SLOTS, story, operations).failure
    assert broken is not None
    assert broken.action_index == story.index(lull) + 1


LAYOUT_BANDS = (
    BandDraft(kind="state", entry_bytes=32),
    BandDraft(kind="window", window_tokens=4, entry_bytes=16),
    BandDraft(kind="full", entry_bytes=16),
)
SCENARIO = Scenario(
    bands=LAYOUT_BANDS,
    arena_bytes=512,
    row_count=3,
    overlap=1,
    declares_read_end=True,
    rank_seeds=(1, 2),
    random_queries=False,
)


@pytest.fixture
def layout() -> ArenaLayout:
    return SCENARIO.layout()


def test_the_exhaustive_answer_keeps_to_order_anchors_and_what_stays(layout: ArenaLayout) -> None:
    """By hand: a prefix of 32 bytes, slots of 32, pages of 16 in an arena of 512."""
    state, window, full = layout.bands
    free = layout.arena_bytes - layout.prefix_bytes
    assert (state.unit_bytes, window.unit_bytes, full.unit_bytes, free) == (32, 16, 16, 480)
    none = Need(0)
    assert some_layout_holds(layout, [Need(5), Need(10), Need(10)], [])
    assert not some_layout_holds(layout, [Need(5), Need(10), Need(11)], [])
    # A float that stays in the middle leaves room on both sides, and none of it to the wrong band.
    middle = window.lowest_page_from(256)
    stays = Need(1, (middle,))
    assert some_layout_holds(layout, [Need(7), stays, none], [])
    assert not some_layout_holds(layout, [Need(8), stays, none], [])
    assert some_layout_holds(layout, [none, stays, Need(15)], [])
    assert not some_layout_holds(layout, [none, stays, Need(16)], [])
    # An end spans from its anchor to what stays.
    assert some_layout_holds(layout, [Need(1, (state.first_page + 6,)), none, Need(16)], [])
    assert not some_layout_holds(layout, [Need(1, (state.first_page + 6,)), none, Need(17)], [])
    # Blocked bytes: ends stop before them, a float stands on one side of them.
    blocked = [(256, 272)]
    assert some_layout_holds(layout, [Need(7), Need(15), none], blocked)
    assert not some_layout_holds(layout, [Need(8), none, none], blocked)
    assert not some_layout_holds(layout, [none, Need(16), none], blocked)
    assert not some_layout_holds(layout, [none, none, Need(16)], blocked)
