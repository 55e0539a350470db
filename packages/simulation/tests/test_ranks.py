"""Runs of one rank, of two and of three: however many there are, each is compared with the first."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from kvtide.chain import Taken
from kvtide.simulation import (
    CheckFailedError,
    Operation,
    Rank,
    Scenario,
    World,
    run_actions,
    run_seed,
)
from kvtide.simulation.checks import after_action
from kvtide.simulation.scenario import BandDraft


def scenario(rank_count: int) -> Scenario:
    return Scenario(
        bands=(BandDraft(kind="full", entry_bytes=32),),
        arena_bytes=512,
        row_count=2,
        overlap=2,
        declares_read_end=True,
        rank_seeds=tuple(range(rank_count)),
        random_queries=True,
    )


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("rank_count", [1, 2, 3])
def test_a_run_has_as_many_ranks_as_its_scenario(rank_count: int, operations: dict[str, Operation]) -> None:
    """A shrink goes down to one rank, on which most faults show as well; what is drawn means the same on any number."""
    for seed in range(8):
        drawn = run_seed(seed, 120, operations)
        fewer = attrs.evolve(drawn.scenario, rank_seeds=tuple(range(seed, seed + rank_count)))
        assert len(World(fewer).ranks) == rank_count
        run = run_actions(fewer, drawn.actions, operations)
        assert run.failure is None
        assert len(run.actions) == len(drawn.actions)


def took_a_page(rank: Rank) -> None:
    assert isinstance(rank.chain.take(pages=1), Taken)


def zeroed_more(rank: Rank) -> None:
    taken = rank.chain.take(pages=1)
    assert isinstance(taken, Taken)
    rank.chain.free_pages("full", taken.pages)
    rank.chain.flush_opportunistic()


def retired_more(rank: Rank) -> None:
    rank.steps.retired_through += 1


@pytest.mark.requirement("X1", "C10")
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize(
    ("went_astray", "why"),
    [
        (took_a_page, "of band 'full' is unit"),
        (zeroed_more, "counts"),
        (retired_more, "forwards have retired through 0 on rank"),
    ],
)
def test_every_rank_is_compared_with_the_first(
    place: int, went_astray: Callable[[Rank], None], why: str
) -> None:
    """One that no check looks at may decide as it likes, and nobody would know."""
    world = World(scenario(3))
    after_action(world)
    went_astray(world.ranks[place])
    with pytest.raises(CheckFailedError, match=why) as found:
        after_action(world)
    assert found.value.check == "rank_divergence"
    assert f"rank {place}" in str(found.value)
