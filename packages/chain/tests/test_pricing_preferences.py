"""Of the layouts that serve, which one a plan picks: what moves, and where the free bytes stay (C3, C4)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtide.chain.pricing import LayoutPlan, Rearrangement, first_plan, plan
from kvtide.plan import ArenaLayout

from .layout_oracle import Extent, World, arena

LEVEL = arena((1, 1, 1), 100)
"""An end, a float and an end of one-byte units: a page's number is its byte."""


def span(found: LayoutPlan | None, place: int) -> tuple[int, int]:
    assert found is not None
    return found.spans[place].first_page, found.spans[place].end_page


def price(
    layout: ArenaLayout,
    bands: Sequence[tuple[int, str]],
    demand: Sequence[int],
    *,
    quarantined: Sequence[Extent] = (),
    network: Sequence[Extent] = (),
    around_network: bool = False,
) -> LayoutPlan | None:
    world = World(layout, tuple(bands), tuple(network), tuple(quarantined))
    return first_plan(world.snapshot, demand, around_network=around_network)


@pytest.mark.requirement("C3", "C4")
@pytest.mark.parametrize(
    ("first_page", "demand", "grown"),
    [
        (20, (0, 5, 0), (20, 35)),
        (70, (0, 5, 0), (65, 80)),
        (45, (0, 5, 0), (45, 60)),
        (70, (40, 5, 0), (65, 80)),
        (70, (50, 5, 0), (70, 85)),
        (70, (60, 5, 20), (65, 80)),
        (70, (66, 5, 16), None),
        (70, (66, 5, 10), (70, 85)),
        (30, (0, 5, 58), (25, 40)),
    ],
)
def test_a_float_grows_toward_the_larger_gap_that_its_neighbours_leave(
    first_page: int, demand: tuple[int, int, int], grown: tuple[int, int] | None
) -> None:
    """Growing the other way would strand the larger gap behind it; but first of all the whole demand must fit."""
    world = World(LEVEL, ((0, ""), (first_page, "l" * 10), (100, "")))
    found = plan(world.snapshot, demand, Rearrangement.NO_MOVE)
    assert (span(found, 1) if found else None) == grown


@pytest.mark.requirement("C4")
def test_blocked_bytes_bound_a_gap() -> None:
    """A gap behind quarantined bytes is no gap of this float."""
    bands = [(0, ""), (20, "l" * 10), (100, "")]
    assert span(price(LEVEL, bands, (0, 5, 0)), 1) == (20, 35)
    assert span(price(LEVEL, bands, (0, 5, 0), quarantined=[(40, 41)]), 1) == (15, 30)
    bands = [(0, ""), (70, "l" * 10), (100, "")]
    assert span(price(LEVEL, bands, (0, 5, 0)), 1) == (65, 80)
    assert span(price(LEVEL, bands, (0, 5, 0), quarantined=[(59, 60)]), 1) == (70, 85)
    for touching in [(69, 70), (80, 81)]:
        found = price(LEVEL, bands, (0, 5, 0), quarantined=[touching])
        assert found is not None
        assert found.step is Rearrangement.NO_MOVE


@pytest.mark.requirement("C3", "C4")
def test_an_empty_float_is_placed_in_the_middle_of_its_region() -> None:
    """Room to grow at both sides; the region is what its neighbours leave once they have what they ask for."""
    assert span(price(LEVEL, [(0, "l" * 10), (0, ""), (80, "l" * 20)], (0, 10, 0)), 1) == (40, 50)
    assert span(price(LEVEL, [(0, "l" * 10), (0, ""), (80, "l" * 20)], (10, 10, 30)), 1) == (30, 40)


@pytest.mark.requirement("C3", "C4")
@pytest.mark.parametrize(
    ("quarantined", "placed"),
    [([(44, 45)], (45, 55)), ([(44, 45), (50, 60)], (60, 70)), ([(30, 75)], (15, 25))],
)
def test_an_empty_float_is_placed_elsewhere_where_the_middle_is_blocked(
    quarantined: list[Extent], placed: tuple[int, int]
) -> None:
    """At the next clear page above the middle, or in the middle of what is left: blocked bytes take its place, not the answer."""
    assert (
        span(price(LEVEL, [(0, "l" * 10), (0, ""), (80, "l" * 20)], (0, 10, 0), quarantined=quarantined), 1)
        == placed
    )


@pytest.mark.requirement("C3")
def test_an_empty_float_is_transparent() -> None:
    """Its neighbours meet over it; where it stands costs them nothing."""
    found = price(LEVEL, [(0, ""), (0, ""), (100, "")], (60, 0, 40))
    assert found is not None
    assert found.step is Rearrangement.NO_MOVE
    assert [span(found, place) for place in (0, 2)] == [(0, 60), (60, 100)]


@pytest.mark.requirement("C3")
def test_a_float_of_pending_pages_alone_stays_until_a_relayout_parks_it() -> None:
    """Somebody may still touch them, so it is not empty; once settled it keeps nothing, moves nothing and leaves its bytes."""
    bands = [(0, ""), (40, "." * 20), (100, "")]
    world = World(LEVEL, tuple(bands))
    assert plan(world.snapshot, (50, 0, 0), Rearrangement.FLUSH_ENDS) is None
    found = price(LEVEL, bands, (50, 0, 0))
    assert found is not None
    assert (found.relocated, found.moved_bytes, span(found, 1)) == ((1,), 0, (0, 0))


@pytest.mark.requirement("C4")
def test_only_the_ends_that_must_are_flushed() -> None:
    """Either end's holes would do, so the one that moves fewer bytes is compacted, and the other left alone."""
    layout = arena((2, 1, 1), 100)
    bands = [(0, "l" * 10 + "." * 10), (0, ""), (48, "." * 12 + "l" * 40)]
    found = price(layout, bands, (0, 10, 0))
    assert found is not None
    assert (found.step, found.flushed, found.moved_bytes) == (Rearrangement.FLUSH_ENDS, (2,), 12)
    assert span(found, 0) == (0, 20)
    bands = [(0, "l" * 5 + "." * 15), (0, ""), (48, "." * 12 + "l" * 40)]
    found = price(layout, bands, (0, 10, 0))
    assert found is not None
    assert (found.flushed, found.moved_bytes) == ((0,), 10)
    found = price(layout, bands, (0, 48, 0))
    assert found is not None
    assert (found.flushed, found.moved_bytes) == ((0, 2), 22)


@pytest.mark.requirement("C4")
def test_a_flushed_end_reaches_to_its_outermost_fixed_page() -> None:
    """A fixed page does not move, so the frontier cannot retreat past it."""
    bands = [(0, "l...X....l"), (0, ""), (100, "")]
    assert span(price(LEVEL, bands, (0, 0, 92)), 0) == (0, 5)
    assert span(price(LEVEL, bands, (0, 0, 95)), 0) == (0, 5)
    assert price(LEVEL, bands, (0, 0, 96)) is None
    assert price(LEVEL, bands, (3, 0, 95)) is None


@pytest.mark.requirement("C4")
def test_the_float_with_fewer_live_bytes_is_relocated() -> None:
    """Both could make room; the bound counts what they hold, not how far they go."""
    layout = arena((1, 4, 2, 1), 100)
    found = price(layout, [(0, ""), (5, "lll"), (25, "llll"), (100, "")], (0, 0, 0, 55))
    assert found is not None
    assert (found.relocated, found.moved_bytes) == ((2,), 8)
    found = price(layout, [(0, ""), (5, "l.."), (25, "llll"), (100, "")], (25, 0, 0, 0))
    assert found is not None
    assert (found.relocated, found.moved_bytes) == ((1,), 4)


@pytest.mark.requirement("C4")
def test_a_float_slides_and_stretches_around_its_fixed_pages() -> None:
    """Everything but the fixed pages is packed; they stay inside its span, wherever that goes."""
    bands = [(0, ""), (40, "l...X...l...X..l"), (100, "")]
    found = price(LEVEL, bands, (44, 0, 0))
    assert found is not None
    assert (found.relocated, found.moved_bytes, span(found, 1)) == ((1,), 3, (44, 53))
    assert price(LEVEL, bands, (45, 0, 0)) is None
    found = price(LEVEL, bands, (42, 11, 0))
    assert found is not None
    assert span(found, 1)[0] >= 42
    assert span(found, 1)[1] >= 53


@pytest.mark.requirement("C4")
def test_floats_that_move_share_the_free_bytes() -> None:
    """Bytes are spread only among those that are relocated; one that stays, and the ends, stay."""
    layout = arena((1, 1, 1, 1, 1), 200)
    bands = [(0, "l" * 10), (20, "l" * 20), (42, "l" * 20), (170, "l" * 10), (190, "l" * 10)]
    found = price(layout, bands, (40, 0, 0, 0, 0))
    assert found is not None
    assert found.relocated == (1, 2)
    gaps = [found.spans[place + 1].first_page - found.spans[place].end_page for place in range(3)]
    assert max(gaps) - min(gaps) <= 1
    assert sum(gaps) == 170 - 50 - 40
    assert span(found, 3) == (170, 180)


@pytest.mark.requirement("C4")
def test_a_float_that_stays_parts_those_that_move() -> None:
    """The bytes at either side of it are shared by the floats of that side alone."""
    layout = arena((1, 1, 1, 1, 1), 200)
    bands = [(0, "l" * 10), (15, "l" * 10), (80, "l" * 50), (170, "l" * 10), (200, "")]
    found = price(layout, bands, (30, 0, 0, 0, 25))
    assert found is not None
    assert found.relocated == (1, 3)
    assert [span(found, place) for place in (1, 2, 3)] == [(55, 65), (80, 130), (147, 157)]


@pytest.mark.requirement("C4", "T3")
def test_transfers_stay_where_they_are_while_any_layout_allows_it() -> None:
    """Around them a dearer layout is taken, or none; without, they move like any page, since the host may wait."""
    bands = [(0, "l.N"), (0, ""), (95, "....l")]
    found = price(LEVEL, bands, (0, 0, 97))
    assert found is not None
    assert (found.flushed, found.moved_bytes) == ((0,), 1)
    assert price(LEVEL, bands, (0, 0, 97), around_network=True) is None
    bands = [(0, ""), (10, "lN"), (20, "l" * 5), (100, "")]
    layout = arena((1, 1, 1, 1), 100)
    found = price(layout, bands, (18, 0, 0, 0))
    assert found is not None
    assert (found.relocated, found.moved_bytes) == ((1,), 2)
    assert price(layout, bands, (18, 0, 0, 0), around_network=True) is None
    bands = [(0, ""), (10, "ln"), (12, "l" * 5), (100, "")]
    found = price(layout, bands, (0, 1, 0, 83))
    assert found is not None
    assert found.step is Rearrangement.NO_MOVE
    found = price(layout, bands, (10, 1, 0, 82), around_network=True)
    assert found is not None
    assert (found.relocated, found.moved_bytes) == ((2,), 5)


@pytest.mark.requirement("C4", "T3")
def test_no_band_extends_into_bytes_that_a_send_reads_while_any_layout_allows_it() -> None:
    """The fenced bytes bound every band, as quarantined ones do; without `around_network` they are free."""
    bands = [(0, "l" * 10), (30, "l" * 10), (90, "l" * 10)]
    fence = [(12, 13)]
    assert span(price(LEVEL, bands, (10, 0, 0), network=fence), 0) == (0, 20)
    assert price(LEVEL, bands, (10, 0, 0), network=fence, around_network=True) is None
    assert span(price(LEVEL, bands, (2, 0, 0), network=fence, around_network=True), 0) == (0, 12)
    assert price(LEVEL, bands, (10, 0, 0), quarantined=fence) is None


@pytest.mark.requirement("C4", "T3")
def test_a_page_that_was_moved_away_under_a_send_is_no_free_unit_around_transfers() -> None:
    """A take of it would wait on the host for the send, so around transfers the band grows instead."""
    bands = [(0, "ln"), (0, ""), (100, "")]
    assert span(price(LEVEL, bands, (1, 0, 0)), 0) == (0, 2)
    assert span(price(LEVEL, bands, (1, 0, 0), around_network=True), 0) == (0, 3)


def test_equal_prices_are_decided_alike_and_with_the_fewest_bands() -> None:
    """No rank may choose another layout: of equal bytes the fewest bands move, and those of lower places."""
    bands = [(0, "." * 10), (40, "l" * 10), (90, "." * 10)]
    found = price(LEVEL, bands, (45, 0, 40))
    assert found is not None
    assert (found.flushed, found.relocated) == ((), (1,))
    bands = [(0, "l" * 10 + "." * 10), (0, ""), (80, "." * 10 + "l" * 10)]
    found = price(LEVEL, bands, (0, 65, 0))
    assert found is not None
    assert (found.flushed, found.moved_bytes) == ((0,), 10)
