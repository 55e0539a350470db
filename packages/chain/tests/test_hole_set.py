"""The set of holes beside a sorted list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.chain import hole_set
from kvtide.chain.hole_set import HoleSet
from kvtide.chain.units import run_of, units_of

PAGES = 1500


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reserve that fills and runs out within a few operations."""
    monkeypatch.setattr(hole_set, "_RESERVE_PAGES", 70)
    monkeypatch.setattr(hole_set, "_FIRST_BLOCKS", 2)


@pytest.mark.requirement("C2", "C13")
@settings(max_examples=150, deadline=None)
@given(data=st.data(), from_high_end=st.booleans())
def test_holes_come_out_nearest_the_anchor_whatever_went_before(
    data: st.DataObject, from_high_end: bool
) -> None:
    """A hole lost is a leak, one handed out twice is two owners; the order keeps live pages together."""
    holes, model = HoleSet(PAGES, from_high_end=from_high_end), set[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(
            st.sampled_from(["add few", "add many", "add run", "take", "remove", "clear", "clone"])
        )
        if action.startswith("add"):
            if action == "add run":
                first = data.draw(st.integers(0, PAGES - 1))
                wanted = list(range(first, data.draw(st.integers(first, PAGES - 1)) + 1))
            else:
                draw = np.random.default_rng(data.draw(st.integers(0, 10**6)))
                wanted = draw.permutation(PAGES)[: 20 if action == "add few" else 700].tolist()
            new = [page for page in wanted if page not in model]
            holes.add(units_of(np.array(new, np.int64)))
            model.update(new)
        elif action == "take" and model:
            count = data.draw(st.integers(1, len(model)))
            expected = sorted(model, reverse=from_high_end)[:count]
            assert holes.nearest(count).tolist() == expected
            assert holes.take(count).tolist() == expected
            model.difference_update(expected)
        elif action == "remove" and model:
            gone = data.draw(st.lists(st.sampled_from(sorted(model)), unique=True, max_size=20))
            holes.remove(units_of(np.array(gone, np.int64)))
            model.difference_update(gone)
        elif action == "clear":
            first = data.draw(st.integers(0, PAGES))
            end = data.draw(st.integers(first, PAGES))
            assert holes.within(first, end).tolist() == sorted(model & set(range(first, end)))
            holes.clear(first, end)
            model -= set(range(first, end))
        elif action == "clone":
            holes, original = holes.clone(), holes
            original.take(len(original))
        assert len(holes) == len(model)
    page = data.draw(st.integers(0, PAGES))
    assert holes.run_above(page, PAGES) == next(
        (n for n in range(PAGES - page) if page + n not in model), PAGES - page
    )
    assert holes.run_below(page, 0) == next((n for n in range(page) if page - 1 - n not in model), page)
    assert holes.take(len(model)).tolist() == sorted(model, reverse=from_high_end)


@pytest.mark.parametrize("from_high_end", [False, True])
def test_a_run_and_a_list_of_the_same_pages_are_one(from_high_end: bool) -> None:
    """Long runs travel as slices, in either direction, to the very ends of a band."""
    for first, end in [(0, 600), (PAGES - 600, PAGES), (0, PAGES)]:
        for run in (run_of(first, end), run_of(end - 1, first - 1, -1)):
            assert isinstance(units_of(run.ids).where, slice)
            as_run, as_list = (
                HoleSet(PAGES, from_high_end=from_high_end),
                HoleSet(PAGES, from_high_end=from_high_end),
            )
            as_run.add(run)
            for piece in np.array_split(np.random.default_rng(1).permutation(run.ids), 9):
                as_list.add(units_of(piece))
            assert as_run.take(len(run.ids)).tolist() == as_list.take(len(run.ids)).tolist()
