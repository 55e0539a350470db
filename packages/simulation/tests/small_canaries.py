"""Faults to plant under the exhaustive search: each breaks one rule, most of them one that a random run rarely needs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import attrs
import numpy as np
import pytest

from kvtide.chain import ChainAllocator, TakeRefusal
from kvtide.device import IntArray
from kvtide.ledger import Clear, Consumer, FencedBytes, ForwardSteps, Hazard, PageUsage, PendingPages
from kvtide.simulation.exhaustive.ordered_device import OrderedDevice

# Deep inside, where the rules stand: the faces export no band and no relief.
Band: Any = import_module("kvtide.chain.band").Band
Rehoming: Any = import_module("kvtide.chain.rehoming").Rehoming
Relief: Any = import_module("kvtide.chain.relief").Relief
VirtualPages: Any = import_module("kvtide.chain.id_space").VirtualPages
ZeroDebts: Any = import_module("kvtide.chain.takes").ZeroDebts
clearing: Any = import_module("kvtide.ledger.clearing")

Patch = pytest.MonkeyPatch


@attrs.frozen
class SmallCanary:
    """A fault, the shape that it is looked for in, the check that must find it, and after how many actions."""

    shape: str
    check: str
    length: int
    plant: Callable[[Patch], None]


def without(owner: Any, name: str, answer: Any = None) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, lambda *args, **named: answer)


def settles_wait_for_nothing(patch: Patch) -> None:
    settle = PendingPages.settle
    patch.setattr(PendingPages, "settle", lambda pages, count: (settle(pages, count)[0], None))


def frees_forget_the_forward(patch: Patch) -> None:
    patch.setattr(Band, "_let_go", lambda band, units: band._add_holes(units))


def weakened(consumer: Consumer, hazard: Hazard) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        row = clearing._ANSWERS[consumer].copy()
        row[hazard] = Clear.NONE
        patch.setitem(clearing._ANSWERS, consumer, row)

    return plant


def a_refusal_mints_a_page(patch: Patch) -> None:
    make_room = ChainAllocator._make_room

    def make_room_and_mint(chain: ChainAllocator, asked: Any) -> Any:
        made = make_room(chain, asked)
        if isinstance(made, TakeRefusal):
            chain._pages.mint(1)
        return made

    patch.setattr(ChainAllocator, "_make_room", make_room_and_mint)


def fixed_units_are_priced_as_movable(patch: Patch) -> None:
    look = Band.snapshot

    def snapshot(band: Any, *, holds_stay: bool) -> Any:
        return look(band, holds_stay=holds_stay)._replace(fixed=())

    patch.setattr(Band, "snapshot", snapshot)


def moves_leave_the_wait_for_writers_out(patch: Patch) -> None:
    patch.setattr(Band, "_wait_writers", lambda band, units: None)
    patch.setattr(PageUsage, "_check_moved", lambda usage, sources: None)


def sub_pages_of_a_page_count_once(patch: Patch) -> None:
    def unbound(pages: Any, virtual: IntArray, ratio: int) -> None:
        if pages._bound_counts is not None:
            left = np.unique(virtual // ratio)
            pages._bound_counts[left] -= 1
            pages._space.give_back(left[pages._bound_counts[left] == 0])

    patch.setattr(VirtualPages, "unbound", unbound)


def says_nothing(owner: Any, name: str) -> Callable[[Patch], None]:
    """A call that changes capacity, and does not move the epoch for it."""

    def plant(patch: Patch) -> None:
        call = getattr(owner, name)

        def call_silently(books: Any, *args: Any) -> Any:
            before = books.epoch
            result = call(books, *args)
            books.epoch -= books.epoch > before
            return result

        patch.setattr(owner, name, call_silently)

    return plant


def a_flush_moves_everything(patch: Patch) -> None:
    patch.setattr(PageUsage, "stopping", lambda usage, sources: np.zeros(len(sources), np.bool_))


def rehomed_pages_are_counted_nowhere(patch: Patch) -> None:
    def carry_out(planned: Any, pages: Any, ratio: int) -> None:
        planned.band.ids.unbind(planned.sources, planned.units)
        planned.band.ids.bind(planned.targets, planned.units)

    patch.setattr(Rehoming, "carry_out", carry_out)


SMALL_CANARIES = {
    "nothing is zeroed": SmallCanary("float", "lost_write", 1, without(OrderedDevice, "zero_units")),
    "a move copies nothing": SmallCanary("float", "lost_write", 3, without(OrderedDevice, "copy_units")),
    "settles wait for nothing": SmallCanary("two-bands", "unordered_overlap", 4, settles_wait_for_nothing),
    "a freed unit is a hole at once": SmallCanary(
        "window-and-full", "byte_accounting", 3, frees_forget_the_forward
    ),
    "zeroing ignores who reads vacated bytes": SmallCanary(
        "float", "unordered_overlap", 4, weakened(Consumer.ZERO, Hazard.FORWARD)
    ),
    "zeroing ignores backups": SmallCanary(
        "window-and-full", "unordered_overlap", 4, weakened(Consumer.ZERO, Hazard.COPY_READ)
    ),
    "fences are forgotten": SmallCanary("two-bands", "unordered_overlap", 4, without(FencedBytes, "add")),
    "moves do not wait for writers": SmallCanary(
        "float", "unordered_overlap", 3, moves_leave_the_wait_for_writers_out
    ),
    "a flush moves what a load has reserved": SmallCanary(
        "two-bands", "unexpected_error", 4, a_flush_moves_everything
    ),
    "a refusal mints a page": SmallCanary("two-bands", "changed_by_refusal", 3, a_refusal_mints_a_page),
    "everything is said to fit": SmallCanary(
        "window-only", "capacity_answer", 1, without(Relief, "fits", True)
    ),
    "fixed units are priced as movable": SmallCanary(
        "two-bands", "capacity_answer", 3, fixed_units_are_priced_as_movable
    ),
    "virtual pages are lost": SmallCanary(
        "window-and-full", "ledger_leak", 1, without(VirtualPages, "give_back")
    ),
    "sub-pages of one page count once": SmallCanary(
        "window-only", "ledger_leak", 1, sub_pages_of_a_page_count_once
    ),
    "rehomed pages are counted nowhere": SmallCanary(
        "window-only", "ledger_leak", 3, rehomed_pages_are_counted_nowhere
    ),
    "debts of rehomed pages stay behind": SmallCanary(
        "window-and-full", "lost_write", 3, without(ZeroDebts, "rename")
    ),
    "a launch that is given up stays open": SmallCanary(
        "two-bands", "changed_by_refusal", 2, without(ForwardSteps, "forward_aborted")
    ),
    "frees say nothing": SmallCanary("two-bands", "unexpected_error", 3, says_nothing(Band, "free")),
    "new holes say nothing": SmallCanary(
        "two-bands", "unexpected_error", 4, says_nothing(Band, "_add_holes")
    ),
    "uses say nothing": SmallCanary("two-bands", "unexpected_error", 2, says_nothing(PageUsage, "record")),
    "ends of holds say nothing": SmallCanary(
        "two-bands", "unexpected_error", 2, says_nothing(PageUsage, "release_hold")
    ),
}
