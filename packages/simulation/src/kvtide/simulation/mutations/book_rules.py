"""Rules of the chain's books: which ids are free, where spans end, what a call may name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtide.device import IntArray
from kvtide.simulation.mutations.mutation import Mutation, Replacement, around, during

_ALLOCATOR = "kvtide.chain:ChainAllocator"
_PAGES = "kvtide.chain.id_space:VirtualPages"
_IDS = "kvtide.chain.id_space:IdSpace"


def _parts_counted_once(original: Replacement) -> Replacement:
    """Sub-pages of one page that go together count as one."""

    def unbound(pages: Any, virtual: IntArray, ratio: int) -> None:
        counts = pages._bound_counts
        if counts is not None:
            before = counts[virtual // ratio] - 1
            original(pages, virtual, ratio)
            counts[virtual // ratio] = before

    return unbound


def _all_but_one(space: Any, ids: IntArray) -> None:
    space._free[space._free_count : space._free_count + len(ids)] = ids[::-1]
    space._free_count += max(0, len(ids) - 1)


def book_rules() -> Iterator[Mutation]:
    """See the module's docstring."""
    yield from _ids()


def _ids() -> Iterator[Mutation]:
    yield Mutation(
        id="ids.parts",
        rule="a virtual page returns once no band binds any part of it, also when parts go together",
        rows=("C1", "P10"),
        plant=around(f"{_PAGES}.unbound", _parts_counted_once),
    )
    yield Mutation(
        id="ids.pages",
        rule="a free gives back every virtual page that is freed",
        rows=("C1",),
        plant=during(f"{_ALLOCATOR}.free_pages", f"{_IDS}.give_back", _all_but_one),
    )
    yield Mutation(
        id="ids.slots",
        rule="a free gives back every virtual state slot that is freed",
        rows=("C1",),
        plant=during(f"{_ALLOCATOR}.free_state_slots", f"{_IDS}.give_back", _all_but_one),
    )
