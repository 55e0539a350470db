"""Window pages that come to stand for other virtual pages: nothing is taken, moved or forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.chain import SINK, BandTake, ChainError
from kvtide.ledger import Access, HostCopy, InvariantError

from .books import books_of
from .test_takes import RATIO, Bytes, ids, mixed_layout

WINDOW = "window-16"


def sub_pages(*pages: int) -> np.ndarray:
    return (ids(*pages)[:, None] * RATIO + np.arange(RATIO)).reshape(-1)


def two_holders(*, full: bool = True) -> tuple[Bytes, np.ndarray, np.ndarray]:
    """Four virtual pages: the first two have let go of their window pages, which the others still bind."""
    world = Bytes(mixed_layout(full=full))
    pages = world.take(pages=4).pages
    world.chain.free_pages(WINDOW, sub_pages(*pages[:2].tolist()))
    return world, pages[:2], pages[2:]


@pytest.mark.requirement("K8")
def test_a_window_page_stands_for_another_virtual_page_with_its_bytes_in_place() -> None:
    """A prefix tree takes a request's window pages over under its own ids; what they hold is the point."""
    world, tree, request = two_holders()
    sources, targets = sub_pages(*request.tolist()), sub_pages(*tree.tolist())
    world.fill(WINDOW, sources, 7)
    physical = world.chain.physical_units(WINDOW, sources)
    before = world.chain.statistics()
    world.chain.rehome_window(WINDOW, sources, targets)
    assert (world.chain.physical_units(WINDOW, targets) == physical).all()
    assert (world.chain.physical_units(WINDOW, sources) == SINK).all()
    assert (world.bytes_of(WINDOW, targets) == 7).all()
    assert world.chain.statistics() == before
    world.device.upload(world.device.schedule_stream)
    mirror = world.device.tables[f"ids:{WINDOW}"]
    assert (mirror[targets] == physical).all()
    assert (mirror[sources] == SINK).all()
    # The request's own pages may return now: no window holds them.
    world.chain.free_pages("full", request)
    world.chain.verify_byte_accounting()


@pytest.mark.requirement("K8")
def test_without_an_owner_a_page_returns_when_its_last_window_page_is_rehomed() -> None:
    """All-window models have no free of full attention that would give the id back."""
    world, tree, request = two_holders(full=False)
    free_ids = world.chain.statistics().free_page_ids
    world.chain.free_pages("window-64", request)
    assert world.chain.statistics().free_page_ids == free_ids
    world.chain.rehome_window(WINDOW, sub_pages(*request.tolist()), sub_pages(*tree.tolist()))
    assert world.chain.statistics().free_page_ids == free_ids + 2
    world.chain.free_pages("window-64", tree)
    world.chain.free_pages(WINDOW, sub_pages(*tree.tolist()))
    assert world.chain.statistics().free_page_ids == free_ids + 4


@pytest.mark.requirement("K8", "L4")
def test_uses_go_on_under_the_new_id() -> None:
    """A backup that reads the page when it is rehomed still keeps its next writer waiting."""
    world, tree, request = two_holders()
    sources, targets = sub_pages(*request.tolist()), sub_pages(*tree.tolist())
    copy = HostCopy("backup", Access.READ, world.device.record_event(world.device.schedule_stream))
    world.chain.uses.begin(copy, {WINDOW: sources})
    world.chain.rehome_window(WINDOW, sources, targets)
    physical = world.chain.physical_units(WINDOW, targets)
    assert copy in world.chain.ledger(WINDOW)
    assert len(world.chain.ledger(WINDOW).hazards_on(physical).places) == len(physical)
    world.chain.uses.end(copy)


@pytest.mark.requirement("K8", "A5")
@given(st.sets(st.integers(0, 2 * RATIO - 1)), st.permutations(range(2 * RATIO)))
def test_zeroing_that_is_owed_stays_owed_under_the_new_id(chosen: set[int], order: list[int]) -> None:
    """A launch that is aborted after the rehoming must still zero what its take left unzeroed."""
    world, tree, request = two_holders()
    world.chain.free_pages(WINDOW, sub_pages(*request.tolist()))
    taken = world.take(
        bands={WINDOW: BandTake(fresh=ids(), held=sub_pages(*request.tolist()), unwritten=ids(0))}
    )
    world.fill(WINDOW, sub_pages(*request.tolist()), 9)
    places = ids(*sorted(chosen))
    sources = sub_pages(*request.tolist())[places]
    targets = sub_pages(*tree.tolist())[ids(*order)][: len(places)]
    world.chain.rehome_window(WINDOW, sources, targets)
    owed = world.chain.statistics().owed_units
    world.chain.pay_zero_debt(taken)
    assert owed == 2 * RATIO - 1
    # The first unit came zeroed, is owed nothing, and was filled since.
    kept = np.concatenate([np.delete(sub_pages(*request.tolist()), places), targets])
    filled = (world.bytes_of(WINDOW, kept) == 9).all(axis=1)
    assert filled.sum() == 1


@pytest.mark.requirement("K8", "L8")
@pytest.mark.parametrize(
    ("band", "sources", "targets", "why"),
    [
        ("full", [3], [1], "only windows bind pages"),
        ("state", [0], [1], "only windows bind pages"),
        ("nowhere", [3], [1], "no band 'nowhere'"),
        (WINDOW, [1 * RATIO], [2 * RATIO], "not bound"),
        (WINDOW, [3 * RATIO], [4 * RATIO], "bound already"),
        (WINDOW, [3 * RATIO], [9 * RATIO], "not minted"),
        (WINDOW, [3 * RATIO, 3 * RATIO], [RATIO, RATIO + 1], "named twice"),
        (WINDOW, [3 * RATIO, 3 * RATIO + 1], [RATIO, RATIO], "named twice"),
        (WINDOW, [3 * RATIO], [RATIO, RATIO + 1], "each source needs one target"),
        (WINDOW, [-1], [RATIO], "ids run from 0"),
    ],
)
def test_what_cannot_be_rehomed_is_refused_with_nothing_changed(
    band: str, sources: list[int], targets: list[int], why: str
) -> None:
    """Every check comes before any change, at every check level."""
    world, tree, _ = two_holders()
    assert tree.tolist() == [1, 2]
    before = books_of(world.chain)
    with pytest.raises(ChainError, match=why):
        world.chain.rehome_window(band, ids(*sources), ids(*targets))
    assert books_of(world.chain) == before


@pytest.mark.requirement("L1")
def test_nothing_is_rehomed_between_a_launch_and_its_recording() -> None:
    """The upload of the launch has gone: a forward would resolve ids that are no more."""
    world, tree, request = two_holders()
    world.steps.forward_launched()
    with pytest.raises(InvariantError, match="record_before_pages"):
        world.chain.rehome_window(WINDOW, sub_pages(*request.tolist()), sub_pages(*tree.tolist()))
