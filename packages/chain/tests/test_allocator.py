"""What the allocator promises its callers, one behaviour a test."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvtide.chain import SINK, ChainError, Taken, TakeRefusal
from kvtide.device import NumpyDevice
from kvtide.ledger import ForwardSteps, InvariantError
from kvtide.plan import (
    PageSpan,
)

from .walk import Walk, chain_over, layout_of

THREE_BANDS = {"state": 112, "4": 80, "full": 48}


def ids(*units: int) -> np.ndarray:
    return np.array(units, np.int64)


def taken(walk: Walk, pages: int = 0, slots: int = 0) -> Taken:
    result = walk.take(pages, slots)
    assert isinstance(result, Taken), result
    return result


@pytest.mark.requirement("A2")
def test_ends_hand_out_from_their_anchors_and_a_float_from_the_middle() -> None:
    """Ids rise with address everywhere; where a band starts decides how rarely pages move later."""
    layout = layout_of(THREE_BANDS, 2000)
    walk = Walk(layout)
    taken(walk, pages=2, slots=2)
    full, window = layout.band("full"), layout.band("window-4")
    assert walk.chain.span("state") == PageSpan(first_page=0, end_page=2)
    assert walk.chain.span("full") == PageSpan(first_page=full.page_count - 2, end_page=full.page_count)
    left = layout.band("state").start_byte(2)
    right = layout.arena_bytes
    below = window.start_byte(walk.chain.span("window-4").first_page) - left
    above = right - window.start_byte(walk.chain.span("window-4").end_page)
    assert abs(below - above) <= 2 * window.unit_bytes


@pytest.mark.requirement("C3")
def test_an_empty_float_is_transparent_to_its_neighbours() -> None:
    """Its bytes must serve whoever asks: the ends meet as if it were not there."""
    layout = layout_of(THREE_BANDS, 2000)
    walk = Walk(layout)
    pages = taken(walk, pages=3).pages
    walk.free("window-4", pages.tolist())
    room = layout.band("full").start_byte(walk.chain.span("full").first_page) - layout.prefix_bytes
    assert isinstance(walk.take(0, room // 112), Taken)
    assert walk.chain.statistics().moved_units == 0
    assert isinstance(walk.take(0, 1), TakeRefusal)


@pytest.mark.requirement("C2")
def test_a_free_at_the_frontier_gives_the_bytes_back_at_once() -> None:
    """A neighbour can grow over them without a page moving."""
    walk = Walk(layout_of({"state": 112, "full": 48}, 1500))
    slots = taken(walk, slots=4).state_slots
    walk.free("state", slots[1:].tolist())
    assert walk.chain.span("state").page_count == 1
    walk.free("state", slots[:1].tolist())
    assert walk.chain.span("state").page_count == 0


@pytest.mark.requirement("C2")
def test_holes_are_taken_before_the_frontier_moves() -> None:
    """Growth costs a neighbour's bytes; a hole costs nothing."""
    walk = Walk(layout_of({"state": 112, "full": 48}, 1500))
    slots = taken(walk, slots=4).state_slots
    walk.free("state", slots[:2].tolist())
    again = taken(walk, slots=2).state_slots
    assert walk.chain.physical_units("state", again).tolist() == [0, 1]
    assert walk.chain.span("state").page_count == 4


@pytest.mark.requirement("C5", "C2")
def test_a_refused_take_changes_nothing_and_says_why() -> None:
    """The caller retries later: a half-done take would leak; the text is read at 3 a.m."""
    walk = Walk(layout_of(THREE_BANDS, 900))
    first = taken(walk, pages=2, slots=1)
    walk.launch()
    walk.free("window-4", first.pages[:1].tolist())
    before = walk.chain.statistics()
    cleared = walk.device.cleared
    refusal = walk.take(4, 0)
    assert isinstance(refusal, TakeRefusal)
    assert walk.chain.statistics() == before
    assert walk.device.cleared == cleared, "a refused take queued a wait"
    window = refusal.bands[1]
    assert (window.name, window.asked, window.live, window.free) == ("window-4", 4, 1, 1)
    assert "asked for 4 × 80 bytes of 'window-4'" in str(refusal)
    assert f"together {112 + 5 * 80 + 6 * 48} of" in str(refusal)


@pytest.mark.requirement("C2", "L3")
def test_pending_pages_are_settled_before_the_band_grows() -> None:
    """Capacity counts pages in the same order as a take does: holes, pending, growth."""
    walk = Walk(layout_of({"state": 112, "full": 48}, 1500))
    slots = taken(walk, slots=3).state_slots
    walk.launch()
    walk.free("state", slots[:2].tolist())
    assert walk.chain.statistics().bands[0].pending_units == 2
    taken(walk, slots=1)
    assert walk.device.cleared == 0, "the schedule stream waits the forward"
    assert walk.chain.span("state").page_count == 3
    assert walk.chain.statistics().bands[0].pending_units == 0
    walk.process()
    walk.check()


@pytest.mark.requirement("C2", "L3")
def test_nothing_is_settled_while_holes_suffice() -> None:
    """A settle makes the schedule stream wait a running forward; it is for takes that need it."""
    walk = Walk(layout_of({"state": 112, "full": 48}, 1500))
    slots = taken(walk, slots=4).state_slots
    walk.free("state", slots[:1].tolist())
    walk.launch()
    walk.free("state", slots[1:2].tolist())
    taken(walk, slots=1)
    assert walk.device.cleared == -1
    assert walk.chain.statistics().bands[0].pending_units == 1


@pytest.mark.requirement("L2")
def test_processing_returns_pages_without_a_wait() -> None:
    """The usual way back: the forward is over before anyone needs the page."""
    walk = Walk(layout_of({"state": 112, "full": 48}, 1500))
    slots = taken(walk, slots=2).state_slots
    walk.launch()
    walk.free("state", slots.tolist())
    walk.process()
    assert walk.chain.span("state").page_count == 0
    walk.check()


def test_a_take_that_fits_after_moving_pages_is_served() -> None:
    """The point of the arena: bytes on the wrong side of a band serve whoever asks."""
    layout = layout_of(THREE_BANDS, 2000)
    walk = Walk(layout)
    taken(walk, pages=4)
    room = layout.arena_bytes - layout.prefix_bytes - 4 * (80 + 48) - 80 - 48
    taken(walk, slots=room // 112)
    statistics = walk.chain.statistics()
    assert statistics.rearrangements == 1
    assert statistics.moved_units == statistics.bands[1].moved_units == 4, "the float moved, whole"
    assert statistics.moved_bytes == 4 * 80
    walk.check()


def test_relocated_floats_leave_room_on_both_sides() -> None:
    """A float packed tight against an end would have to move again at that end's next take."""
    layout = layout_of(THREE_BANDS, 3000)
    walk = Walk(layout)
    everything = taken(walk, pages=5)
    walk.free("window-4", everything.pages[1:].tolist())
    walk.free("full", everything.pages[1:].tolist())
    window = layout.band("window-4")
    above = (layout.band("full").start_byte(layout.band("full").page_count - 1)) - window.start_byte(
        walk.chain.span("window-4").end_page
    )
    slots = above // 112 + 1
    below = (window.start_byte(walk.chain.span("window-4").first_page) - layout.prefix_bytes) // 112
    taken(walk, slots=max(slots, below + 1))
    assert walk.chain.statistics().rearrangements == 1
    gap_below = window.start_byte(walk.chain.span("window-4").first_page) - layout.band("state").start_byte(
        walk.chain.span("state").end_page
    )
    gap_above = layout.band("full").start_byte(walk.chain.span("full").first_page) - window.start_byte(
        walk.chain.span("window-4").end_page
    )
    assert abs(gap_below - gap_above) <= 2 * window.unit_bytes


@pytest.mark.requirement("C1")
def test_virtual_page_zero_is_never_minted_and_unbound_pages_read_as_the_sink() -> None:
    """Kernels index with whatever a row holds; nothing may reach another request's page."""
    walk = Walk(layout_of({"4": 80, "full": 48}, 3000))
    pages = taken(walk, pages=10).pages
    assert SINK not in pages
    walk.free("window-4", pages[:3].tolist())
    assert walk.chain.physical_units("window-4", pages[:3]).tolist() == [SINK] * 3
    assert (walk.chain.physical_units("full", pages) != SINK).all()


@pytest.mark.requirement("C1")
def test_an_all_window_model_returns_its_ids_with_the_longest_window() -> None:
    """Mistral 7B v0.1 has no full-attention layer; ids must not run out."""
    walk = Walk(layout_of({"9": 96, "4": 48}, 1500))
    for _ in range(50):
        pages = taken(walk, pages=3).pages.tolist()
        walk.free("window-4", pages)
        walk.free("window-9", pages)
    walk.check()


@pytest.mark.requirement("A8", "A1")
def test_sinks_are_zero_and_stay_zero() -> None:
    """A masked row multiplies what the sink holds by zero: it must be finite."""
    layout = layout_of(THREE_BANDS, 2000)
    walk = Walk(layout)
    taken(walk, pages=4, slots=3)
    assert layout.prefix_bytes == 80 + 48
    assert not walk.device.arena[: layout.prefix_bytes].any()


@pytest.mark.requirement("L8", "C1")
@pytest.mark.parametrize(
    ("band", "units", "text"),
    [
        ("window-4", [1, 1], "cannot free pages [1] of band 'window-4': named twice in one free"),
        (
            "window-4",
            [9],
            "cannot free pages [9] of band 'window-4': not bound (freed twice, or never taken)",
        ),
        ("window-4", [SINK], "cannot free pages [0] of band 'window-4': not bound"),
        ("window-4", [-1], "cannot free pages [-1] of band 'window-4': ids run from 0 to"),
        ("window-4", [10**6], "cannot free pages [1000000] of band 'window-4': ids run from 0 to"),
        ("full", [1], "cannot free pages [1] of band 'full': band 'window-4' still holds them"),
        ("state", [0], "band 'state' holds state slots"),
        ("window-5", [1], "no band 'window-5'; the chain has ['state', 'window-4', 'full']"),
    ],
)
def test_a_wrong_free_is_refused_before_anything_changes(band: str, units: list[int], text: str) -> None:
    """A double free returns a page to two owners; it must be an error, never a tombstone in a free list."""
    walk = Walk(layout_of(THREE_BANDS, 2000))
    taken(walk, pages=3, slots=1)
    before = walk.chain.statistics()
    with pytest.raises(ChainError) as caught:
        walk.chain.free_pages(band, ids(*units))
    assert text in str(caught.value)
    assert walk.chain.statistics() == before
    walk.check()


def test_wrong_slots_and_counts_are_refused() -> None:
    """The other ways to misuse it."""
    walk = Walk(layout_of(THREE_BANDS, 2000))
    with pytest.raises(ChainError, match=r"state slots \[0\] of band 'state': not bound"):
        walk.chain.free_state_slots(ids(0))
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(ChainError, match="counts must be integers of 0 or more"):
            walk.chain.take(pages=wrong)  # type: ignore[arg-type]  # the mistake
    for array in (np.array([[1, 2]]), np.array([1.0]), np.array([1], np.int32)):
        with pytest.raises(ChainError, match="ids must be a one-dimensional int64 array"):
            walk.chain.free_pages("window-4", array)
    taken(walk, pages=1, slots=1)
    attention_only = Walk(layout_of({"full": 48}, 1000))
    with pytest.raises(ChainError, match="the chain has bands"):
        attention_only.chain.take(state_slots=1)
    with pytest.raises(ChainError, match="no state band"):
        attention_only.chain.free_state_slots(ids(0))


@pytest.mark.requirement("L1")
def test_no_page_changes_hands_between_launch_and_recording() -> None:
    """There is no event yet that a freed page could wait for."""
    walk = Walk(layout_of(THREE_BANDS, 2000))
    first = taken(walk, pages=1, slots=1)
    record = walk.steps.forward_launched()
    with pytest.raises(InvariantError, match=r"\[forward.record_before_pages\] a take"):
        walk.chain.take(pages=1)
    with pytest.raises(InvariantError, match=r"\[forward.record_before_pages\] a free"):
        walk.chain.free_pages("window-4", first.pages)
    with pytest.raises(InvariantError, match=r"\[forward.record_before_pages\] a free"):
        walk.chain.free_state_slots(first.state_slots)
    walk.steps.forward_aborted(record)
    walk.check()


@pytest.mark.requirement("C11")
def test_byte_accounting_finds_a_band_in_its_neighbour_and_a_lost_unit() -> None:
    """The check itself must fail when it should."""
    walk = Walk(layout_of(THREE_BANDS, 2000))
    taken(walk, pages=2, slots=2)
    band = walk.chain._bands["state"]
    band.end_page += 1
    with pytest.raises(InvariantError, match=r"chain\.units_counted_once"):
        walk.chain.verify_byte_accounting()
    band.end_page -= 1
    walk.chain.verify_byte_accounting()
    window = walk.chain._bands["window-4"]
    assert window.first_page > window.layout.first_page
    window.pack_into(window.layout.first_page, window.layout.first_page + 2)
    with pytest.raises(InvariantError, match=r"chain\.bytes_conserved"):
        walk.chain.verify_byte_accounting()


def test_mirrors_are_written_only_where_ids_changed() -> None:
    """An upload must not grow with the arena."""
    layout = layout_of({"4": 80, "full": 48}, 300_000)
    device = NumpyDevice(layout.arena_bytes, byte_work=False)
    chain = chain_over(layout, device, ForwardSteps())
    device.upload(device.schedule_stream)
    result = chain.take(pages=5)
    assert isinstance(result, Taken)
    assert device.upload(device.schedule_stream) == 2 * 5
    chain.free_pages("window-4", result.pages[:2])
    assert device.upload(device.schedule_stream) == 2
    assert device.upload(device.schedule_stream) == 0


@pytest.mark.requirement("P8")
def test_the_chain_needs_no_torch() -> None:
    """Capacity tools and other engines run the allocator without it."""
    code = "import sys, kvtide.chain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
