"""What prefix trees of today get wrong, and what goes first, one test each."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.plan import ChunkLifetime, FullLifetime, WindowLifetime
from kvtide.storage import StorageError
from kvtide.storage.tree import CostAware, LeastRecentlyUsed, PrefixTree, TreeShape

from .served import PAGE, PLANS, Service, plan_of


def tokens(*parts: str) -> list[int]:
    """One token a letter."""
    return [ord(letter) for letter in "".join(parts)]


SYSTEM = "you are a model"[:12]


# ── what a hit is ──


@pytest.mark.requirement("K8", "H4")
def test_a_hit_ends_where_every_kind_restores() -> None:
    """Full attention knows twelve tokens, the window's tail ends at twelve, the only checkpoint lies at eight."""
    service = Service(PLANS["full, two windows of small pages, state"])
    service.serve(tokens(SYSTEM), hand_over_at=(8,))
    assert service.tree.match(tokens(SYSTEM)).hit_pages == 12 // PAGE
    service.tree.evict(lambda units: units["state"] >= 1)
    match = service.tree.match(tokens(SYSTEM))
    assert match.hit_pages < match.shared_pages
    assert dict(zip(service.shape.bands, match.restorable_pages, strict=True))["full"] == match.shared_pages


@pytest.mark.requirement("K8")
def test_a_hit_lost_to_a_checkpoint_in_the_unique_suffix_is_had_once_somebody_stops_where_prompts_part() -> (
    None
):
    """The state of the first prompt lies behind its own suffix, which nobody shares; the match says where one would serve."""
    service = Service(PLANS["full and state"])
    service.serve(tokens(SYSTEM, "abcd"))
    match = service.tree.match(tokens(SYSTEM, "efgh"))
    assert (match.hit_pages, match.shared_pages) == (0, len(SYSTEM) // PAGE)
    assert service.serve(tokens(SYSTEM, "efgh"), hand_over_at=(match.shared_pages * PAGE,)) == 0
    assert service.serve(tokens(SYSTEM, "ijkl")) == len(SYSTEM)


@pytest.mark.requirement("K8")
def test_a_checkpoint_stays_at_the_length_that_its_state_has_seen() -> None:
    """A state of eight tokens must not come to stand for twelve, whichever of the two the tree learned of first."""
    service = Service(PLANS["full and state"])
    service.serve(tokens(SYSTEM))
    service.serve(tokens(SYSTEM[:8]))
    # Each of these is compared with the bytes of its own length by `check_hit`.
    assert service.serve(tokens(SYSTEM, "x")) == 12
    assert service.serve(tokens(SYSTEM[:8], "x")) == 8
    assert service.serve(tokens(SYSTEM[:10], "x")) == 8


@pytest.mark.requirement("K8", "K7")
def test_window_units_that_were_retired_do_not_come_back_by_way_of_the_tree() -> None:
    """Their pages are somebody else's by now: what the tree gets is what is still bound, and no hit ends before it."""
    service = Service(PLANS["full and a window"])
    service.serve(tokens("abcdefghijkl"))
    held = service.tree.held_units()
    assert held["full"] == 6
    assert held["window-4"] == 2
    assert service.tree.match(tokens("abcdefgh")).hit_pages == 0
    assert service.tree.match(tokens("abcdefghijkl")).hit_pages == 6


@pytest.mark.requirement("K8")
def test_a_tombstone_is_filled_by_whoever_computes_its_tokens_again() -> None:
    """The request's own window pages are rehomed to the tree's ids; its full pages are duplicates and return."""
    service = Service(PLANS["full and a window"])
    service.serve(tokens("abcdefghijkl"))
    request = service.admit(tokens("abcdefgh"))
    service.compute(request, 8)
    live = {band.name: band.live_units for band in service.chain.statistics().bands}
    service.hand_over(request)
    now = {band.name: band.live_units for band in service.chain.statistics().bands}
    assert live["full"] - now["full"] == 4
    assert live["window-4"] == now["window-4"]
    service.finish(request)
    assert service.serve(tokens("abcdefgh", "x")) == 8


@pytest.mark.requirement("K8")
def test_a_hit_at_the_end_of_a_stretch_needs_no_unit_of_it() -> None:
    """Nothing is kept of the chunks' memory, and of fourteen tokens the first eight can be gone on from all the same."""
    tree = PrefixTree(TreeShape.of(PLANS["full and chunks"]))
    lock = tree.lock(tree.match([]))
    tree.insert(lock, list(range(14)), np.arange(1, 8), held_from=[7], needed_from=[7])
    assert tree.match(list(range(14))).hit_pages == 8 // PAGE
    assert tree.match(list(range(6))).hit_pages == 0


@pytest.mark.requirement("K8")
def test_two_salts_never_share() -> None:
    """What one tenant has computed tells nothing to another, not even by how fast an answer comes."""
    service = Service(PLANS["full, two windows of small pages, state"])
    service.serve(tokens(SYSTEM), "tenant a")
    assert service.serve(tokens(SYSTEM), "tenant b") == 0
    assert service.serve(tokens(SYSTEM)) == 0
    assert service.serve(tokens(SYSTEM, "x"), "tenant a") == len(SYSTEM)


@pytest.mark.requirement("K8", "L2")
def test_a_node_that_a_running_forward_reads_is_evicted_and_its_pages_pend() -> None:
    """Eviction waits for no forward; whoever takes the pages does, by a stream."""
    service = Service(PLANS["full"], arena_bytes=512)
    service.serve(tokens(SYSTEM))
    record = service.steps.forward_launched()
    recorded = service.steps.forward_recorded(
        record, service.device.record_event(service.device.forward_stream)
    )
    service.chain.forward_recorded(recorded, {})
    assert service.evict("full", 6) is not None
    figures = service.chain.statistics().bands[0]
    assert figures.live_units == 0
    assert figures.pending_units == 6
    service.steps.host_synchronised(recorded.event)
    service.steps.forward_processed(record)
    service.chain.forward_processed(recorded.forward)
    assert service.chain.statistics().bands[0].pending_units == 0


@pytest.mark.requirement("K8")
def test_what_is_locked_is_not_evicted_sub_pool_by_sub_pool() -> None:
    """A running request keeps its whole prefix, of its window the tail, and of its checkpoint nothing once the copy is queued."""
    service = Service(PLANS["full, two windows of small pages, state"])
    service.serve(tokens(SYSTEM), hand_over_at=(4, 8))
    request = service.admit(tokens(SYSTEM, "x"))
    assert request.computed == 12
    held, evictable = service.tree.held_units(), service.tree.evictable_units()
    assert evictable["full"] == 0
    assert evictable["state"] == held["state"] == 3
    assert held["window-6"] - evictable["window-6"] == 5
    assert held["window-3"] - evictable["window-3"] == 2
    assert service.evict("full", 1) is None
    service.tree.advance(request.lock, [10, 12])
    assert service.tree.evictable_units()["window-6"] == held["window-6"] - 2
    assert service.tree.evictable_units()["window-3"] == held["window-3"]
    service.finish(request)
    assert service.tree.evictable_units() == service.tree.held_units()


@pytest.mark.requirement("K5", "K8")
def test_a_window_unit_that_two_count_on_is_counted_again() -> None:
    """Whoever advances takes another unit, and the others still need this one, whether they computed it or were given it."""
    service = Service(PLANS["full and a window"])
    first = service.admit(tokens("abcdefghijkl"))
    service.compute(first, 8)
    service.hand_over(first)
    assert service.tree.units_counted_on_again()["window-4"] == 0
    second = service.admit(tokens("abcdefghz"))
    assert second.computed == 8
    assert service.tree.units_counted_on_again()["window-4"] == 2
    third = service.admit(tokens("abcdefghy"))
    assert third.computed == 8
    assert service.tree.units_counted_on_again()["window-4"] == 4
    service.compute(first, 4)
    assert service.tree.units_counted_on_again()["window-4"] == 2
    for request in (first, second):
        service.finish(request)
    assert service.tree.units_counted_on_again()["window-4"] == 0
    service.finish(third)


# ── what goes first ──


@pytest.mark.requirement("K8")
def test_no_more_is_evicted_than_is_asked_for() -> None:
    """Of the last victim the end goes, so the longest prefix that can stay does; `fits_after_frees` is asked seldom."""
    service = Service(PLANS["full"])
    service.serve(list(range(100)))
    service.serve(list(range(200, 300)))
    asked = []

    def is_enough(units: dict[str, int]) -> bool:
        asked.append(units["full"])
        return units["full"] >= 57

    freed = service.tree.evict(is_enough)
    assert freed is not None
    assert len(freed["full"]) == 57
    assert len(asked) < 16
    assert service.tree.match(list(range(100))).hit_pages == 0
    assert service.tree.match(list(range(200, 300))).hit_pages == 43


@pytest.mark.requirement("K8")
def test_a_refused_eviction_changes_nothing() -> None:
    """The walk took everything off its queue before it gave up."""
    service = Service(PLANS["full, two windows of small pages, state"])
    service.serve(tokens(SYSTEM), hand_over_at=(4, 8))
    service.serve(tokens(SYSTEM[:8], "abcd"))
    before = service.tree.statistics()
    assert service.tree.evict(lambda units: units["full"] > 99) is None
    assert service.tree.statistics() == before
    freed = service.tree.evict(lambda units: units["full"] >= before.held_units["full"])
    assert freed is not None
    assert {name: len(units) for name, units in freed.items()} == dict(before.held_units)


@pytest.mark.requirement("K8")
def test_what_was_not_used_for_longest_goes_first() -> None:
    """Used by a hit, that is; a prefix that others go on from stays while they do."""
    service = Service(PLANS["full"], LeastRecentlyUsed())
    for last in "abc":
        service.serve(tokens(SYSTEM, last, last))
    service.serve(tokens(SYSTEM, "aa", "x"))
    service.evict("full", 1)
    assert [service.tree.match(tokens(SYSTEM, last, last)).hit_pages for last in "abc"] == [7, 6, 7]
    service.evict("full", 1)
    assert [service.tree.match(tokens(SYSTEM, last, last)).hit_pages for last in "abc"] == [7, 6, 6]


@pytest.mark.requirement("K8")
def test_a_window_is_evicted_from_its_front_and_by_its_own_last_use() -> None:
    """A long prompt's pages are used by every hit below it, its early window units by none: they go, and no match is lost."""
    plan = plan_of(FullLifetime(), WindowLifetime(5))
    tree = PrefixTree(TreeShape.of(plan))
    lock = tree.lock(tree.match([]))
    # Nothing was retired: a backend that keeps all of a prompt's window, or several chunks handed over at once.
    tree.insert(lock, list(range(20)), np.arange(1, 11), held_from=[0], needed_from=[0])
    tree.insert(lock, list(range(20, 24)), np.arange(11, 13), held_from=[20 // PAGE], needed_from=[8])
    tree.unlock(lock)
    freed = tree.evict(lambda units: units["window-5"] >= 6)
    assert freed is not None
    assert freed["window-5"].tolist() == [1, 2, 3, 4, 5, 6]
    assert "full" not in freed
    assert tree.match(list(range(24))).hit_pages == 12
    assert tree.match(list(range(20))).hit_pages == 10
    assert tree.match(list(range(14))).hit_pages == 0


@pytest.mark.requirement("K8")
def test_the_cost_aware_policy_lets_go_of_the_bytes_that_are_cheapest_to_have_again() -> None:
    """Of two checkpoints of one size the one that saves eight tokens goes before the one that saves eighty, used later or not."""
    for policy, survivor in ((CostAware(), "dear"), (LeastRecentlyUsed(), "cheap")):
        service = Service(PLANS["full and state"], policy)
        dear, cheap = list(range(80)), list(range(100, 108))
        service.serve(dear)
        service.serve(cheap)
        service.evict("state", 1)
        survived = {"dear": service.tree.match(dear).hit_pages, "cheap": service.tree.match(cheap).hit_pages}
        assert [name for name, pages in survived.items() if pages] == [survivor]


@pytest.mark.requirement("K8")
def test_the_cost_aware_policy_forgets_what_is_dear_and_unused() -> None:
    """What has gone since raises the rank of everything used later, so no prompt stays for ever for having been long."""
    service = Service(PLANS["full and state"], CostAware())
    dear = list(range(80))
    service.serve(dear)
    for number in range(60):
        service.serve(list(range(1000 + 8 * number, 1008 + 8 * number)))
        service.evict("state", 1)
        if not service.tree.match(dear).hit_pages:
            return
    pytest.fail("sixty short prompts did not push the long one out")


@pytest.mark.requirement("K8")
def test_whoever_hands_over_has_used_all_that_lies_in_front() -> None:
    """A long answer keeps its prompt young: once the answer has gone, what was used before it goes before the prompt."""
    service = Service(PLANS["full"])
    service.serve(tokens(SYSTEM))
    answering = service.admit(tokens(SYSTEM, "ab"))
    between = service.admit(tokens("between"))
    service.compute(between, 7)
    service.hand_over(between)
    service.compute(answering, 2)
    service.hand_over(answering)
    service.finish(answering)
    service.evict("full", 1)
    assert service.tree.match(tokens(SYSTEM, "ab")).hit_pages == len(SYSTEM) // PAGE
    service.finish(between)
    service.evict("full", 1)
    assert service.tree.match(tokens(SYSTEM, "ab")).hit_pages == len(SYSTEM) // PAGE
    assert service.tree.match(tokens("between")).hit_pages == 2


@pytest.mark.requirement("K8")
def test_a_checkpoint_that_is_computed_again_was_used() -> None:
    """A prompt that ends where it did before cannot be a hit, and yet it shows that the checkpoint is wanted."""
    service = Service(PLANS["full and state"])
    for prompt in (SYSTEM, "another one."):
        service.serve(tokens(prompt))
        service.serve(tokens(prompt, "abcd"))
    assert service.serve(tokens(SYSTEM)) == 0
    service.evict("state", 1)
    assert service.tree.match(tokens(SYSTEM, "x")).hit_pages == len(SYSTEM) // PAGE
    assert service.tree.match(tokens(SYSTEM, "abcd")).hit_pages == len(SYSTEM) // PAGE, "the older one went"


@pytest.mark.requirement("K8")
def test_a_leaf_that_no_hit_can_end_in_goes_before_anything_else() -> None:
    """Its checkpoint has gone, and now what lay behind it: used lately or not, its pages serve nobody."""
    service = Service(PLANS["full and state"])
    service.serve(tokens("old prompts"[:10]))
    service.serve(tokens(SYSTEM), hand_over_at=(8,))
    # Somebody is about to copy the checkpoint, so none of this can go.
    reader = service.tree.lock(service.tree.match(tokens("old prompts"[:10])))
    service.evict("state", 1)
    latest = service.admit(tokens(SYSTEM, "x"))
    assert latest.computed == len(SYSTEM)
    service.finish(latest)
    service.evict("full", 1)
    assert service.tree.match(tokens(SYSTEM)).shared_pages == 8 // PAGE
    assert service.tree.match(tokens(SYSTEM)).hit_pages == 0
    service.tree.unlock(reader)
    service.evict("full", 1)
    assert service.tree.match(tokens(SYSTEM)).shared_pages == 0
    assert service.tree.match(tokens("old prompts"[:10])).hit_pages == 5


@pytest.mark.requirement("K8")
def test_a_leaf_goes_by_the_last_use_of_its_pages() -> None:
    """Hits at the end of a stretch use none of its units, so these look old; the leaf that is hit must not go for that."""
    tree = PrefixTree(TreeShape.of(plan_of(FullLifetime(), ChunkLifetime(8))))
    for first, number in ((1, 0), (5, 100)):
        lock = tree.lock(tree.match([]))
        pages = np.arange(first, first + 4)
        tree.insert(lock, list(range(number, number + 8)), pages, held_from=[0], needed_from=[4])
        tree.unlock(lock)
    hit = tree.match(list(range(8)))
    assert hit.hit_pages == 4
    used = tree.lock(hit)
    tree.accept(used)
    tree.unlock(used)
    freed = tree.evict(lambda units: units["full"] >= 1)
    assert freed is not None
    assert freed["full"].tolist() == [8]


# ── misuse ──


def test_a_match_is_good_until_the_tree_changes() -> None:
    """Its hit may have been evicted since."""
    service = Service(PLANS["full"])
    match = service.tree.match(tokens(SYSTEM))
    service.serve(tokens(SYSTEM))
    with pytest.raises(StorageError, match="match again"):
        service.tree.lock(match)


def test_what_does_not_go_together_is_refused_with_nothing_changed() -> None:
    """Each error says what was asked; the tree is as it was."""
    service = Service(PLANS["full and a window"])
    tree = service.tree
    lock = tree.lock(tree.match([]))
    pages = np.arange(1, 4)
    with pytest.raises(StorageError, match="3 pages of 5 tokens"):
        tree.insert(lock, [1, 2, 3, 4, 5], pages, held_from=[0], needed_from=[0])
    with pytest.raises(StorageError, match="the tree has 1"):
        tree.insert(lock, list(range(6)), pages, held_from=[], needed_from=[])
    with pytest.raises(StorageError, match="they are held from 2 on"):
        tree.insert(lock, list(range(6)), pages, held_from=[2], needed_from=[1])
    with pytest.raises(StorageError, match="no state"):
        tree.insert(lock, list(range(6)), pages, held_from=[0], needed_from=[0], state=3)
    with pytest.raises(StorageError, match="whole numbers"):
        tree.match([0.5])  # type: ignore[list-item]
    assert tree.statistics().nodes == 0
    tree.unlock(lock)
    with pytest.raises(StorageError, match="unlocked before"):
        tree.unlock(lock)
    assert tree.evict(lambda units: units["full"] >= 1) is None


@pytest.mark.requirement("P5", "P10")
def test_a_node_has_the_plans_slots_in_their_order_with_what_a_hit_needs_of_each() -> None:
    """Full, the primary window, the other windows, state; a window of small pages needs fewer tokens of them than whole pages hold."""
    plan = PLANS["full, two windows of small pages, state"]
    shape = TreeShape.of(plan)
    assert shape.bands == tuple(slot.sub_pool for slot in plan.tree_slots)
    assert [(window.name, window.ratio, window.retained_tokens) for window in shape.windows] == [
        ("window-6", 2, 5),
        ("window-3", 2, 2),
    ]
    assert [window.first_unit(6) for window in shape.windows] == [7, 10]
    chunk = TreeShape.of(PLANS["full and chunks"]).windows[0]
    assert [chunk.first_unit(pages) * PAGE for pages in range(10)] == [0, 0, 0, 0, 8, 8, 8, 8, 16, 16]
