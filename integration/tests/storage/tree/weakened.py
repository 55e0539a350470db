"""Rules of the prefix tree and of those who hand over to it, each weakened for the length of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from kvtide.storage.handed_pages import HandedPages
from kvtide.storage.prefix_sharing import PrefixSharing
from kvtide.storage.requests import RequestTable
from kvtide.storage.shared_rows import SharedRows
from kvtide.storage.tracking_slots import TrackingSlots
from kvtide.storage.tree import PrefixTree, matching
from kvtide.storage.tree.locks import Locks
from kvtide.storage.tree.nodes import NO_STATE, WindowSpan
from kvtide.storage.tree.victims import Drawing

Plant = Callable[[pytest.MonkeyPatch], None]


def _window_locks_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowSpan, "evictable", lambda span: np.flatnonzero(span.bound))


def _leaf_locks_ignored(patch: pytest.MonkeyPatch) -> None:
    proper = Drawing.next

    def unlocked(drawing: Drawing) -> Any:
        entries = [entry[3] for entry in drawing._queue._entries]
        before = [node.locks for node in entries]
        for node in entries:
            node.locks = 0
        try:
            return proper(drawing)
        finally:
            for node, locks in zip(entries, before, strict=True):
                node.locks = locks

    patch.setattr(Drawing, "next", unlocked)


def _frees_do_not_pend(patch: pytest.MonkeyPatch) -> None:
    """What an eviction frees is handed out at once, as if no forward that reads it were in flight."""
    proper = PrefixSharing.evict_until

    def at_once(sharing: PrefixSharing, is_enough: Any) -> None:
        steps = sharing._chain.steps
        with pytest.MonkeyPatch.context() as within:
            within.setattr(type(steps), "newest_recorded", property(lambda _: None))
            proper(sharing, is_enough)

    patch.setattr(PrefixSharing, "evict_until", at_once)


def _tail_not_needed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(matching, "_deepest_tail", lambda path, pages, window, place: pages)


def _hit_behind_its_state(patch: pytest.MonkeyPatch) -> None:
    """A hit may end where the tokens are known, with the last checkpoint before."""

    def deepest(path: Sequence[Any], pages: int) -> int:
        return pages if any(node.state != NO_STATE and node.end <= pages for node in path) else 0

    patch.setattr(matching, "_deepest_state", deepest)


def _state_under_a_shorter_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestTable, "state_is_of", lambda table, row, length: True)


def _state_of_a_longer_prefix(patch: pytest.MonkeyPatch) -> None:
    """Whatever checkpoint is on its way counts as the one that has arrived, though that one was forgone."""

    def arrived(tracking: TrackingSlots, row: int, length: int) -> int | None:
        waiting = tracking._on_their_way[row]
        return waiting.popleft()[1] if waiting else None

    patch.setattr(TrackingSlots, "arrived", arrived)


def _gaps_in_what_is_told_ignored(patch: pytest.MonkeyPatch) -> None:
    """A token is taken for the next one that was not known, wherever it lies."""

    def learn(rows: SharedRows, which: Any, lengths: Any, chosen: Any) -> None:
        is_told = chosen >= 0
        rows._tokens[which[is_told], lengths[is_told]] = chosen[is_told]
        rows.known[which[is_told]] += 1

    patch.setattr(SharedRows, "learn", learn)


def _unlocked_twice(patch: pytest.MonkeyPatch) -> None:
    proper = Locks.close

    def twice(locks: Locks, lock: Any) -> Any:
        proper(locks, lock)
        return proper(locks, lock)

    patch.setattr(Locks, "close", twice)


def _floor_waits_for_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint that finds no slot holds the windows back, as if it were still to come."""
    proper = PrefixSharing.latest_checkpoints

    def latest(sharing: PrefixSharing, rows: Any, lengths: Any, noted: Any) -> Any:
        taken = [
            any(length == end for end, _ in sharing.tracking._on_their_way[row])
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        ]
        return np.where(taken, proper(sharing, rows, lengths, noted), noted)

    patch.setattr(PrefixSharing, "latest_checkpoints", latest)


def _slots_beyond_the_price(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint that finds no slot among its row's takes one of whatever is free."""
    patch.setattr(TrackingSlots, "_is_priced", lambda *_: True)


def _pins_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixSharing, "_pin", lambda _: None)


def _rows_keep_their_duplicates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestTable, "replace", lambda *_: None)


def _rows_name_what_they_let_go_of(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandedPages, "forget_let_go", lambda *_: None)


def _tombstones_are_not_filled(patch: pytest.MonkeyPatch) -> None:
    """What is computed again is freed, and the tree takes its own pages for whole."""
    proper = HandedPages._carry_out

    def freed(handed: HandedPages, row: int, first: int, inserted: Any) -> None:
        for name, (sources, _) in inserted.rehomed.items():
            handed._chain.free_pages(name, sources)
        object.__setattr__(inserted, "rehomed", {})
        proper(handed, row, first, inserted)

    patch.setattr(HandedPages, "_carry_out", freed)


def _extra_keys_ignored(patch: pytest.MonkeyPatch) -> None:
    proper_match = PrefixTree.match
    patch.setattr(PrefixTree, "match", lambda tree, tokens, extra_key=None: proper_match(tree, tokens))


def _evicts_too_little(patch: pytest.MonkeyPatch) -> None:
    """The walk stops one question too early."""
    proper = PrefixTree.evict

    def early(tree: PrefixTree, is_enough: Any) -> Any:
        asked: list[None] = []

        def yes(freed: Mapping[str, int]) -> bool:
            asked.append(None)
            return is_enough(freed) or len(asked) > 1

        return proper(tree, yes)

    patch.setattr(PrefixTree, "evict", early)


RULES: Mapping[str, Plant] = {
    plant.__name__.strip("_"): plant
    for plant in (
        _window_locks_ignored,
        _leaf_locks_ignored,
        _frees_do_not_pend,
        _tail_not_needed,
        _hit_behind_its_state,
        _state_under_a_shorter_length,
        _state_of_a_longer_prefix,
        _gaps_in_what_is_told_ignored,
        _unlocked_twice,
        _floor_waits_for_the_checkpoint,
        _slots_beyond_the_price,
        _pins_forgotten,
        _rows_keep_their_duplicates,
        _rows_name_what_they_let_go_of,
        _tombstones_are_not_filled,
        _extra_keys_ignored,
        _evicts_too_little,
    )
}
