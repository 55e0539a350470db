"""Snapshots: what is told of a chain, and what admission may make of it (C4, K5)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.chain.errors import ChainError
from kvtide.chain.pricing import ChainSnapshot, Rearrangement, feasible, first_plan, plan, reclaimed_snapshot
from kvtide.plan import PageSpan

from .layout_oracle import Oracle, World, arena, band_snapshot
from .small_worlds import Question, questions

LEVEL = arena((1, 1, 1), 100)


def test_a_world_in_letters_is_counted_as_it_reads() -> None:
    """The tests' own notation, on which everything else rests."""
    snapshot = band_snapshot(3, "lX.xNn.")
    assert (snapshot.first_page, snapshot.end_page, snapshot.occupied, snapshot.free) == (3, 10, 4, 3)
    assert snapshot.fixed == (PageSpan(first_page=4, end_page=5), PageSpan(first_page=6, end_page=7))
    assert snapshot.network == (PageSpan(first_page=7, end_page=9),)
    assert snapshot.network_free == 1


@pytest.mark.requirement("C4")
@settings(deadline=None, max_examples=max(150, settings().max_examples))
@given(question=questions())
def test_pricing_knows_no_hole_by_its_place(question: Question) -> None:
    """Two chains that differ in where their holes lie are priced alike, byte for byte."""
    world, demand = question
    snapshot = world.snapshot
    for around_network in (False, True):
        assert first_plan(snapshot, demand, around_network=around_network) == first_plan(
            shuffled(world).snapshot, demand, around_network=around_network
        )


def shuffled(world: World) -> World:
    """Live and free pages of each span in another order, the others where they were."""
    bands = []
    for first_page, letters in world.bands:
        movable = iter(sorted(letter for letter in letters if letter in "l."))
        bands.append((first_page, "".join(next(movable) if letter in "l." else letter for letter in letters)))
    return world._replace(bands=tuple(bands))


@pytest.mark.requirement("C4", "K5")
@settings(deadline=None, max_examples=max(200, settings().max_examples))
@given(question=questions(), data=st.data())
def test_a_reclaimed_snapshot_fits_what_the_chain_fits_once_the_units_are_freed(
    question: Question, data: st.DataObject
) -> None:
    """Admission credits what the cache could evict, before anything is evicted and whichever pages those turn out to be."""
    world, demand = question
    bands, evictable = [], []
    for first_page, letters in world.bands:
        places = [place for place, letter in enumerate(letters) if letter in "lN"]
        freed = data.draw(st.lists(st.sampled_from(places), unique=True)) if places else []
        evictable.append(len(freed))
        bands.append(
            (first_page, "".join("." if place in freed else letter for place, letter in enumerate(letters)))
        )
    freed_world = world._replace(bands=tuple(bands))
    could = Oracle(freed_world, demand).least_cost()[-1] is not None
    assert feasible(reclaimed_snapshot(world.snapshot, evictable), demand) == could


@pytest.mark.requirement("C4")
def test_a_band_that_keeps_nothing_is_as_empty_as_a_new_one() -> None:
    """A float becomes transparent, so its bytes are credited in place and not only by a relayout; a fixed page holds it there."""
    snapshot = World(LEVEL, ((0, "ll"), (40, "l.l"), (96, "llll"))).snapshot
    emptied = reclaimed_snapshot(snapshot, (2, 2, 4))
    assert emptied.bands == tuple(band_snapshot(first_page, "") for first_page in (0, 0, 100))
    assert plan(emptied, (60, 0, 40), Rearrangement.NO_MOVE) is not None
    fixed = World(LEVEL, ((0, ""), (40, "lX"), (100, ""))).snapshot
    assert plan(reclaimed_snapshot(fixed, (0, 1, 0)), (42, 0, 0), Rearrangement.RELAYOUT) is None
    pending = World(LEVEL, ((0, ""), (40, ".."), (100, ""))).snapshot
    assert reclaimed_snapshot(pending, (0, 0, 0)) == pending
    assert reclaimed_snapshot(snapshot, (0, 1, 0)).bands[1] == (40, 43, 1, 2, (), (), 0)


@pytest.mark.parametrize("evictable", [(3, 0, 0), (0, 2, 0), (0, -1, 0), (0, 0)])
def test_more_than_a_band_could_free_is_refused(evictable: tuple[int, ...]) -> None:
    """Fixed pages are nobody's to evict; a credit that is not there would admit what cannot be served."""
    snapshot = World(LEVEL, ((0, "ll"), (40, "lX"), (100, ""))).snapshot
    with pytest.raises(ChainError, match="cannot credit"):
        reclaimed_snapshot(snapshot, evictable)


@pytest.mark.parametrize("demand", [(1, 2), (1, 2, 3, 4), (0, -1, 0)])
def test_a_demand_that_is_not_one_count_a_band_is_refused(demand: tuple[int, ...]) -> None:
    """A mistake of the caller's, not a lack of room."""
    snapshot = World(LEVEL, ((0, ""), (0, ""), (100, ""))).snapshot
    for ask in (
        lambda: plan(snapshot, demand, Rearrangement.RELAYOUT),
        lambda: feasible(snapshot, demand),
        lambda: first_plan(snapshot, demand, around_network=True),
    ):
        with pytest.raises(ChainError, match="one a band"):
            ask()


def test_extents_may_come_in_any_order_and_overlap() -> None:
    """Two sends may read one page, and fences are added as they come."""
    bands = World(LEVEL, ((0, "l"), (0, ""), (100, ""))).snapshot.bands
    tidy = ChainSnapshot(LEVEL, bands, (), ((20, 30), (50, 70)))
    untidy = ChainSnapshot(LEVEL, bands, ((50, 60),), ((55, 70), (25, 30), (20, 27), (21, 22), (90, 90)))
    for demand in [(19, 0, 0), (20, 0, 0), (0, 20, 0), (0, 21, 0), (0, 0, 30), (0, 20, 30), (0, 0, 31)]:
        assert first_plan(tidy, demand, around_network=True) == first_plan(
            untidy, demand, around_network=True
        )
