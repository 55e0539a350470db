"""Matching: how far a prompt is known, and where every sub-pool can restore it (row K8).

The walk compares whole nodes as bytes; then the hit is cut back from the walk's end until full attention, each window's tail and a
checkpoint are there together:

    tokens known    ├──────────────────────────────────────┤  shared
    full            ├──────────────────────────────────────┤
    window            ├──────┤        ├──────────────────┤    tail behind the hit must be whole
    state                  ●             ●            ●       a hit lies on one of these
    hit             ├─────────────────────────────────┤

Nothing here changes the tree.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from kvtide.device import IntArray
from kvtide.storage.tree.nodes import NO_STATE, Node
from kvtide.storage.tree.shape import TreeShape, TreeWindow


class Walk(NamedTuple):
    """The nodes that a prompt runs through, without the root."""

    path: Sequence[Node]
    """In order; of the last, perhaps only some pages."""

    pages: int
    """Pages that are known."""


class Checkpoint(NamedTuple):
    """Where a state would be kept, and the one that is."""

    prefix: Hashable
    """Equal for equal prefixes of one extra key, from whatever node they begin, while the tree is as it is."""

    state: int
    """Its slot; `NO_STATE` where none is kept."""


@attrs.frozen(kw_only=True, eq=False)
class Match:
    """What the tree has of a prompt. It holds until the tree changes."""

    hit_pages: int
    """Pages of the longest prefix that every sub-pool can restore."""

    shared_pages: int
    """Pages of the longest prefix whose tokens are known: a checkpoint taken there would serve the next one like it."""

    restorable_pages: tuple[int, ...]
    """The longest prefix that each slot could restore by itself: which one a hit was lost to."""

    extra_key: Hashable
    """Of the prompt."""

    node: Node
    """Where the hit ends: at its end, or inside it."""

    epoch: int
    """Of the tree."""


def walk(root: Node, raw: bytes, page_bytes: int) -> Walk:
    """Follow `raw`, whole pages of tokens, from a root."""
    path: list[Node] = []
    node, at = root, 0
    while True:
        child = node.children.get(raw[at : at + page_bytes])
        if child is None:
            return Walk(path, at // page_bytes)
        path.append(child)
        if not raw.startswith(child.raw, at):
            return Walk(path, (at + common_pages(child.raw, raw, at, page_bytes) * page_bytes) // page_bytes)
        at += len(child.raw)
        node = child


def common_pages(key: bytes, raw: bytes, at: int, page_bytes: int) -> int:
    """Whole pages that `key` has in common with `raw` from `at` on."""
    count = min(len(key), len(raw) - at) // 8
    differs = np.frombuffer(key, np.int64, count) != np.frombuffer(raw, np.int64, count, at)
    first = int(differs.argmax()) if differs.any() else count
    return first * 8 // page_bytes


def prefix_behind(node: Node, raw: bytes, page_bytes: int) -> Checkpoint:
    """The prefix that `raw` behind `node` makes, named by the deepest whole node that it runs through and the rest behind that."""
    path, pages = walk(node, raw, page_bytes)
    last, end = node, node.end + pages
    for each in path:
        if each.end <= end:
            last = each
    rest = raw[(last.end - node.end) * page_bytes :]
    return Checkpoint((last, rest), NO_STATE if rest else last.state)


def match_along(walked: Walk, root: Node, shape: TreeShape, *, extra_key: Hashable, epoch: int) -> Match:
    """The longest hit of a walk from a root, that of `extra_key`."""
    path, shared = walked
    alone = [_deepest_tail(path, shared, window, place) for place, window in enumerate(shape.windows)]
    restorable = [*([shared] if shape.full is not None else []), *alone]
    pages = min(alone, default=shared)
    if shape.state is not None:
        restorable.append(_deepest_state(path, shared))
    before = -1
    while pages != before:
        before = pages
        pages -= pages % shape.hit_pages
        if shape.state is not None:
            pages = _deepest_state(path, pages)
        for place, window in enumerate(shape.windows):
            pages = _deepest_tail(path, pages, window, place)
    node = root
    for each in path:
        if each.first >= pages:
            break
        node = each
    return Match(
        hit_pages=pages,
        shared_pages=shared,
        restorable_pages=tuple(restorable),
        extra_key=extra_key,
        node=node,
        epoch=epoch,
    )


def _deepest_state(path: Sequence[Node], pages: int) -> int:
    """The deepest checkpoint within `pages`; 0 for none."""
    for node in reversed(path):
        if node.state != NO_STATE and node.end <= pages:
            return node.end
    return 0


def _deepest_tail(path: Sequence[Node], pages: int, window: TreeWindow, place: int) -> int:
    """The longest prefix within `pages` whose window tail is whole."""
    ratio = window.ratio
    while pages:
        first = window.first_unit(pages)
        gap = _last_unit(path, place, ratio, first, pages * ratio, bound=False)
        if gap is None:
            return pages
        # Nothing that ends behind the gap can do. In front of it, tails end at a unit that is there, or are empty.
        before = gap // ratio
        last = _last_unit(path, place, ratio, 0, before * ratio, bound=True)
        pages = max(0 if last is None else (last + 1) // ratio, window.needs_nothing(before))
    return 0


def _last_unit(
    path: Sequence[Node], place: int, ratio: int, first: int, end: int, *, bound: bool
) -> int | None:
    """The last of a window's units `[first, end)` along a path that is bound, or is not; `None` where there is none."""
    for node in reversed(path):
        begin = node.first * ratio
        if begin >= end:
            continue
        span = node.spans[place]
        size = len(span.bound)
        if span.bound_count != (0 if bound else size):
            low, high = max(first - begin, 0), min(end - begin, size)
            found: IntArray = np.flatnonzero(span.bound[low:high] == bound)
            if len(found):
                return begin + low + int(found[-1])
        if begin <= first:
            return None
    return None
