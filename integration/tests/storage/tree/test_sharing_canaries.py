"""Faults that are planted on purpose: what looks at shared prefixes must see each of them, or it would see nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import numpy as np
import pytest

from kvtide.chain import ChainAllocator, ChainError
from kvtide.device import IntArray
from kvtide.ledger import InvariantError
from kvtide.sizing import CheckpointStrategy
from kvtide.storage.handed_pages import HandedPages
from kvtide.storage.prefix_sharing import PrefixSharing
from kvtide.storage.tree import LeastRecentlyUsed, PrefixTree, TreeLock, Worth

from .sharing import SharingWorld, shared_storage
from .test_sharing import PLANS, arena_bytes

Patch = pytest.MonkeyPatch


@attrs.frozen
class Canary:
    """A fault, and how it shows."""

    plant: Callable[[Patch], None]
    plan_name: str
    error: type[Exception]
    text: str


class NewestFirst(LeastRecentlyUsed):
    """What a hit has just been given is the first that would go, if nothing kept it."""

    def rank(self, stamp: float, worth: Worth) -> float:
        return -stamp


def shared_units_are_counted_once(patch: Patch) -> None:
    patch.setattr(PrefixSharing, "units_counted_on_again", lambda _: {})


def states_are_copied_when_their_forward_is_processed(patch: Patch) -> None:
    recorded, advance = PrefixSharing.recorded, PrefixSharing.advance

    def late(sharing: PrefixSharing, rows: IntArray, chosen: IntArray | None) -> None:
        recorded(sharing, rows, sharing._requests.lengths[rows])
        advance(sharing, rows, chosen)

    patch.setattr(PrefixSharing, "recorded", lambda *_: None)
    patch.setattr(PrefixSharing, "advance", late)


def tombstones_are_filled_in_the_books_alone(patch: Patch) -> None:
    patch.setattr(ChainAllocator, "rehome_window", lambda *_: None)


def windows_wait_for_checkpoints(patch: Patch) -> None:
    """And never retire, since none is noted."""
    patch.setattr(PrefixSharing, "latest_checkpoints", lambda _sharing, _rows, _lengths, noted: noted)


def salts_are_ignored(patch: Patch) -> None:
    match = PrefixTree.match
    patch.setattr(PrefixTree, "match", lambda tree, tokens, extra_key=None: match(tree, tokens))


def a_hit_locks_no_window(patch: Patch) -> None:
    lock = PrefixTree.lock

    def without_windows(tree: PrefixTree, match: object) -> TreeLock:
        held = lock(tree, match)  # type: ignore[arg-type]  # passed on
        tree.advance(held, [1 << 30 for _ in tree.shape.windows])
        return held

    patch.setattr(PrefixTree, "lock", without_windows)


def duplicates_are_not_freed(patch: Patch) -> None:
    free = HandedPages.free

    def keep_full(handed: HandedPages, units: Mapping[str, IntArray]) -> None:
        free(handed, {name: ids if name != "full" else np.empty(0, np.int64) for name, ids in units.items()})

    patch.setattr(HandedPages, "free", keep_full)


CANARIES = {
    "shared units are counted once": Canary(
        shared_units_are_counted_once, "full and a window", InvariantError, "storage.promise_kept"
    ),
    "states are copied when their forward is processed": Canary(
        states_are_copied_when_their_forward_is_processed,
        "full and state",
        AssertionError,
        "is of another prefix",
    ),
    "tombstones are filled in the books alone": Canary(
        tombstones_are_filled_in_the_books_alone, "full, two windows, state", ChainError, "still holds them"
    ),
    "windows wait for checkpoints": Canary(
        windows_wait_for_checkpoints, "a window and state", InvariantError, "storage.held_within_promise"
    ),
    "salts are ignored": Canary(salts_are_ignored, "full", AssertionError, "is of another prefix"),
    "a hit locks no window": Canary(a_hit_locks_no_window, "full and a window", AssertionError, "sink"),
    "duplicates are not freed": Canary(duplicates_are_not_freed, "full", AssertionError, ""),
}


@pytest.mark.requirement("K5", "K7", "K8", "K9")
@pytest.mark.parametrize("name", CANARIES)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a few short runs, and for what it is."""
    canary = CANARIES[name]
    canary.plant(monkeypatch)
    plan, strategy = PLANS[canary.plan_name], CheckpointStrategy.EXTRA_BUFFER
    for seed in range(8):
        storage = shared_storage(
            plan,
            arena_bytes(plan, strategy, overlap=True),
            strategy,
            overlap=True,
            eviction_policy=NewestFirst(),
        )
        try:
            SharingWorld(storage, seed).run(60)
        except canary.error as error:
            assert canary.text in str(error)  # noqa: PT017  (which seed fails is not known)
            return
    pytest.fail("eight runs found nothing")
