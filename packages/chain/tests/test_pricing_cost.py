"""What a price costs: flat in pages, linear in bands, and next to nothing for blocked bytes out of the way (C4, D11).

Counted in bytecode instructions, which no clock disturbs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest

from kvtide.chain.pricing import BandSnapshot, ChainSnapshot, Rearrangement, feasible, first_plan, plan

from .layout_oracle import arena


def instructions(action: Callable[[], object]) -> int:
    """Bytecode instructions that `action` executes once it is warm, in every Python function that it calls."""
    for _ in range(20):
        action()  # Python adapts code that runs often, and then counts its instructions differently
    count = 0

    def trace(frame: FrameType, what: str, _: object) -> object:
        nonlocal count
        frame.f_trace_opcodes = True
        count += what == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def chain(bands: int, scale: int, *, fences: int = 0) -> ChainSnapshot:
    """Floats of 20 × scale units, half of them free, with gaps of 30 × scale; ends of 10 × scale."""
    layout = arena((16,) * bands, 16 * 50 * bands * scale)
    held = []
    for place, band in enumerate(layout.bands):
        units = (20 if 0 < place < bands - 1 else 10) * scale
        first_page = (
            0 if not place else band.page_count - units if place == bands - 1 else (50 * place + 15) * scale
        )
        held.append(BandSnapshot(first_page, first_page + units, units // 2, units // 2))
    # In the gap above the grow-up end, out of reach of what is asked.
    start = layout.bands[0].start_byte(held[0].end_page)
    extents = tuple((start + 16 * at, start + 16 * at + 1) for at in range(5, 5 + fences))
    return ChainSnapshot(layout, tuple(held), (), extents)


def demands(bands: int, scale: int) -> dict[Rearrangement | None, tuple[int, ...]]:
    """One that is served in place, one that a relayout serves, and one that nothing does."""
    return {
        Rearrangement.NO_MOVE: (0, *[15 * scale] * (bands - 2), 0),
        Rearrangement.RELAYOUT: (70 * scale, *[0] * (bands - 2), 0),
        None: (45 * bands * scale, *[0] * (bands - 2), 0),
    }


@pytest.mark.requirement("C4")
@pytest.mark.parametrize("bands", [3, 6])
@pytest.mark.parametrize("step", [Rearrangement.NO_MOVE, Rearrangement.RELAYOUT, None])
def test_a_price_is_flat_in_pages(bands: int, step: Rearrangement | None) -> None:
    """A thousand pages or ten million: the same instructions, whatever the answer."""
    counts = []
    for scale in (10, 1000, 100_000):
        snapshot, demand = chain(bands, scale), demands(bands, scale)[step]
        found = first_plan(snapshot, demand, around_network=False)
        assert (found.step if found else None) is step
        counts.append(instructions(partial(first_plan, snapshot, demand, around_network=True)))
    assert max(counts) <= 1.02 * min(counts), counts


@pytest.mark.requirement("C4")
def test_a_question_is_linear_in_bands() -> None:
    """`feasible` and the plan in place look at each band a fixed number of times."""
    fits, in_place = [], []
    for bands in (10, 20, 30):
        snapshot, asked = chain(bands, 10), demands(bands, 10)
        fits.append(instructions(partial(feasible, snapshot, asked[None])))
        in_place.append(
            instructions(partial(plan, snapshot, asked[Rearrangement.NO_MOVE], Rearrangement.NO_MOVE))
        )
    for few, more, many in (fits, in_place):
        assert many - more <= 1.02 * (more - few)


@pytest.mark.requirement("C4")
def test_fewest_bytes_keeps_few_ways() -> None:
    """At most two more a band, so at most quadratic; a search of all choices would double with each band."""
    counts = []
    for bands in (8, 16, 32):
        snapshot, asked = chain(bands, 10), demands(bands, 10)[Rearrangement.RELAYOUT]
        counts.append(instructions(partial(plan, snapshot, asked, Rearrangement.RELAYOUT)))
    assert counts[2] < 4.5 * counts[1] < 4.5 * 4.5 * counts[0]


@pytest.mark.requirement("C4")
def test_fences_out_of_the_way_cost_their_merging_and_no_more() -> None:
    """Fences are brought in order once; no band walks over those that it does not meet."""
    few, more, many = (
        instructions(partial(plan, snapshot, demands(6, 1000)[Rearrangement.NO_MOVE], Rearrangement.NO_MOVE))
        for snapshot in (chain(6, 1000, fences=count) for count in (100, 200, 300))
    )
    assert many - more <= 1.02 * (more - few)
    assert more - few <= 100 * 50
