"""States that the exhaustive search takes for one have one future: it goes on from the first alone (rows X4, C13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtide.chain import ChainAllocator
from kvtide.simulation.exhaustive import SHAPES
from kvtide.simulation.exhaustive.ordered_device import OrderedDevice

from .merged_states import Merged, merged_states


@pytest.mark.requirement("X4", "C13")
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_led_to_a_state_the_same_may_follow(shape: str) -> None:
    """The same actions, each with the same outcome, in the same state or with the same failure."""
    count = 0
    for pair in merged_states(shape, depth=3, one_in=8):
        count += 1
        assert list(pair.first_future) == list(pair.other_future), pair[:2]
        assert pair.first_future == pair.other_future, pair[:2]
    assert count > 50


def without_signature(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OrderedDevice, "signature", lambda device, events: ())


def without(*path: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Books that leave out the part at those places; -1 stands for every band."""

    def left_out(part: Any, places: tuple[int, ...]) -> Any:
        if not places:
            return None
        first, *rest = places
        return tuple(
            left_out(each, tuple(rest)) if first in (place, -1) else each for place, each in enumerate(part)
        )

    def plant(patch: pytest.MonkeyPatch) -> None:
        books = ChainAllocator.books
        patch.setattr(ChainAllocator, "books", lambda chain: left_out(books(chain), path))

    return plant


@pytest.mark.requirement("X4", "C13")
@pytest.mark.parametrize(
    ("plant", "depth"),
    [
        pytest.param(without_signature, 3, id="the order of accesses"),
        pytest.param(without(4, -1, 2), 3, id="what is bound"),
        pytest.param(without(4, -1, 5), 3, id="the ledgers"),
        pytest.param(without(6), 1, id="what is owed"),
    ],
)
def test_a_form_that_leaves_out_what_matters_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the comparison would be of nothing: some states that it takes for one then have different futures."""
    plant(monkeypatch)
    assert any(differ(pair) for pair in merged_states("two-bands", depth))


def differ(pair: Merged) -> bool:
    return list(pair.first_future.items()) != list(pair.other_future.items())
