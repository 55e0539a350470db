"""Scenarios: the mixes that they draw, their JSON, and what a shrink tries instead."""

from __future__ import annotations

import json
import random

import pytest

from kvtide.plan import PlanError
from kvtide.simulation import Scenario, draw_scenario

SCENARIOS = [draw_scenario(random.Random(seed)) for seed in range(300)]


@pytest.mark.requirement("X1")
def test_all_kinds_of_chain_are_drawn() -> None:
    """What is never drawn is never checked: chains without full attention, without state, of one band, of five."""
    kinds = [tuple(band.kind for band in scenario.bands) for scenario in SCENARIOS]
    assert {len(each) for each in kinds} == {1, 2, 3, 4, 5}
    assert any("full" not in each and "window" in each for each in kinds)
    assert any("full" not in each and each.count("window") == 3 for each in kinds)
    assert any("state" not in each for each in kinds)
    assert {scenario.overlap for scenario in SCENARIOS} == {1, 2, 3, 4}
    assert {scenario.micro_batches for scenario in SCENARIOS} == {True, False}
    assert {scenario.declares_read_end for scenario in SCENARIOS} == {True, False}


@pytest.mark.requirement("X1")
def test_unit_sizes_and_page_sizes_are_mixed() -> None:
    """Sub-pages need windows of smaller pages; alignment needs units that do not divide one another."""
    layouts = [scenario.layout() for scenario in SCENARIOS]
    ratios = {layout.sub_page_ratio(band) for layout in layouts for band in layout.bands}
    assert {1, 2, 4, 8} <= ratios
    several = [{band.unit_bytes for band in layout.bands} for layout in layouts if len(layout.bands) > 2]
    assert sum(len(each) > 2 for each in several) > len(several) / 2


def test_arenas_are_small_enough_to_be_full_soon() -> None:
    """Tens to a few hundred units: a run of some hundred actions must be refused takes."""
    for scenario in SCENARIOS:
        layout = scenario.layout()
        assert 4 <= max(band.capacity_pages for band in layout.bands) <= 3_000
        assert layout.arena_bytes <= 200_000


@pytest.mark.parametrize("scenario", SCENARIOS[:30])
def test_a_scenario_travels_as_json(scenario: Scenario) -> None:
    """A failing case is a file that another machine runs again."""
    assert Scenario.from_document(json.loads(json.dumps(scenario.document()))) == scenario


@pytest.mark.parametrize("scenario", SCENARIOS[:30])
def test_simpler_scenarios_end(scenario: Scenario) -> None:
    """Each is smaller in one way and larger in none, so a shrink cannot go round in circles."""

    def size(each: Scenario) -> list[int]:
        pages = sum(band.page_tokens for band in each.bands)
        switches = sum(
            [each.declares_read_end, each.random_queries, each.waits_for_transfers, each.micro_batches]
        )
        return [
            len(each.bands),
            each.arena_bytes,
            pages,
            each.row_count,
            each.overlap,
            len(each.rank_seeds),
            switches,
        ]

    for simpler in scenario.simpler():
        assert simpler != scenario
        assert all(new <= old for new, old in zip(size(simpler), size(scenario), strict=True))
        try:
            simpler.layout()
        except PlanError:
            continue
