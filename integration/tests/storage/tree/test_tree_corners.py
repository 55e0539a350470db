"""The prefix tree where random lives seldom come: hits cut back twice, fronts that are gone, nodes that nobody needs."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.plan import FullLifetime, WindowLifetime
from kvtide.storage.tree import PrefixTree, TreeShape

from .served import PLANS, Service, plan_of
from .test_tree import tokens


@pytest.mark.requirement("K8", "H4")
def test_a_hit_that_a_window_cuts_back_is_looked_for_a_checkpoint_again() -> None:
    """A state lies at four pages, and the window's tail in front of it is gone; the tail at two pages is whole, but no state lies there."""
    tree = PrefixTree(TreeShape.of(plan_of(FullLifetime(), WindowLifetime(6), has_state=True)))
    lock, prompt = tree.lock(tree.match([])), list(range(16))
    # Pages that go over, and from which on their window units do.
    for first, end, held_from, state in ((0, 2, 0, -1), (2, 4, 4, 1), (4, 8, 5, -1)):
        pages = np.arange(1 + first, 1 + end)
        tree.insert(
            lock, prompt[2 * first : 2 * end], pages, held_from=[held_from], needed_from=[end], state=state
        )
    match = tree.match(prompt)
    assert match.restorable_pages == (8, 8, 4)
    assert match.hit_pages == 0


@pytest.mark.requirement("K8")
def test_of_a_leaf_whose_windows_front_has_retired_the_end_is_counted() -> None:
    """Its last page goes with the window unit there, and that is all that is asked for: the front has none to count."""
    service = Service(PLANS["full and a window"])
    service.serve(tokens("abcdefghijkl"))
    assert service.tree.held_units() == {"full": 6, "window-4": 2}
    freed = service.evict("window-4", 1)
    assert freed is not None
    assert {name: len(units) for name, units in freed.items()} == {"full": 1, "window-4": 1}


@pytest.mark.requirement("K8")
def test_a_node_that_was_cut_for_a_refused_request_is_whole_again() -> None:
    """Refusals come by the thousand while requests wait: each would leave its cut, and matches would walk them all."""
    service = Service(PLANS["full"])
    service.serve(tokens("abcdefghijkl"))
    before = service.tree.statistics()
    lock = service.tree.lock(service.tree.match(tokens("abcdef")))
    assert service.tree.statistics().nodes == before.nodes + 1
    service.tree.unlock(lock)
    assert service.tree.statistics() == before
    service.tree.verify([])


@pytest.mark.requirement("K8")
def test_a_node_of_which_all_was_evicted_under_its_request_goes_with_the_lock() -> None:
    """Without full attention nothing of a node need be left when its request ends, and no eviction would ever come to it."""
    service = Service(PLANS["windows alone"])
    request = service.admit(tokens("abcdefghijkl"), "tenant")
    service.compute(request, 12)
    service.hand_over(request)
    service.tree.advance(request.lock, [6, 6])
    for band, count in service.tree.evictable_units().items():
        assert service.evict(band, count) is not None
    assert not any(service.tree.held_units().values())
    assert service.tree.statistics().nodes == 1, "its request still names it"
    service.finish(request)
    assert service.tree.statistics().nodes == 0
    assert not service.tree._roots, "nor is its key kept"
