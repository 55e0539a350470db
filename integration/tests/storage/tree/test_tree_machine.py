"""The tree against the dumbest model there is: a dict from prefixes, as tuples of tokens, to what is kept of their last page."""

from __future__ import annotations

from collections.abc import Hashable

import attrs
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtide.storage.tree import CostAware, LeastRecentlyUsed

from .served import NONE, PLANS, Served, Service

Prefix = tuple[Hashable, tuple[int, ...]]


@attrs.define
class Kept:
    """What the tree keeps of one prefix's last page."""

    page: int
    bound: list[list[bool]]
    """By window and unit."""
    state: int = -1


class TreeMachine(RuleBasedStateMachine):
    """Requests of few tokens, so that they meet; evictions of every size."""

    plan_name = "full"

    @initialize(cost_aware=st.booleans())
    def begin(self, cost_aware: bool) -> None:
        self.service = Service(PLANS[self.plan_name], CostAware() if cost_aware else LeastRecentlyUsed())
        self.shape = self.service.shape
        self.kept: dict[Prefix, Kept] = {}

    # ── rules ──

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=26), salt=st.sampled_from((None, None, "b"))
    )
    def admit(self, tokens: list[int], salt: Hashable) -> None:
        expected = self.expected_hit(tokens[:-1], salt)
        request = self.service.admit(tokens, salt)
        assert request.lock.pages == expected

    @precondition(lambda self: self.service.running)
    @rule(number=st.integers(0, 99), count=st.integers(1, 9))
    def compute(self, number: int, count: int) -> None:
        self.service.compute(self.one(number), count)

    @precondition(lambda self: self.service.running)
    @rule(number=st.integers(0, 99), short=st.integers(0, 5))
    def hand_over(self, number: int, short: int) -> None:
        request = self.one(number)
        page = self.shape.page_tokens
        length = max(0, request.computed - short) if self.shape.state is None else request.computed
        first, end = request.lock.pages, length // page
        held, pages = list(request.held_from), list(request.pages)
        self.service.hand_over(request, length)
        if request.lock.pages > first:
            self.note(request, first, end, held, pages)

    @precondition(lambda self: self.service.running)
    @rule(number=st.integers(0, 99), hands_over=st.booleans())
    def finish(self, number: int, hands_over: bool) -> None:
        if hands_over:
            self.hand_over(number, 0)
        self.service.finish(self.one(number))

    @rule(place=st.integers(0, 9), count=st.integers(1, 6))
    def evict(self, place: int, count: int) -> None:
        bands = self.shape.bands
        band = bands[place % len(bands)]
        evictable = self.service.tree.evictable_units()
        freed = self.service.evict(band, count)
        assert (freed is None) == (evictable[band] < count)
        if freed is not None:
            self.let_go(freed)

    @rule()
    def evict_all(self) -> None:
        evictable = self.service.tree.evictable_units()
        freed = self.service.tree.evict(
            lambda units: all(units[band] >= evictable[band] for band in evictable)
        )
        assert freed is not None
        self.service.free(freed)
        assert {band: len(freed.get(band, NONE)) for band in evictable} == evictable
        self.let_go(freed)

    # ── what must hold ──

    @invariant()
    def units_are_exact(self) -> None:
        if not hasattr(self, "service"):
            return
        tree = self.service.tree
        tree.verify([request.lock for request in self.service.running])
        held = dict.fromkeys(self.shape.bands, 0)
        for kept in self.kept.values():
            if self.shape.full is not None:
                held[self.shape.full] += 1
            for window, bound in zip(self.shape.windows, kept.bound, strict=True):
                held[window.name] += sum(bound)
            if self.shape.state is not None:
                held[self.shape.state] += kept.state >= 0
        assert tree.held_units() == held
        needed = self.needed_units()
        assert tree.evictable_units() == {band: held[band] - len(needed[band]) for band in held}
        self.chain_agrees(held)
        self.service.check_running()

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return
        while self.service.running:
            self.service.finish(self.service.running[0])
        self.evict_all()
        assert not any(self.service.tree.held_units().values())
        assert self.service.tree.statistics().nodes == 0
        assert not self.service.tree._roots
        self.chain_agrees(self.service.tree.held_units())
        assert not self.kept

    # ── the model ──

    def one(self, number: int) -> Served:
        return self.service.running[number % len(self.service.running)]

    def expected_hit(self, tokens: list[int], salt: Hashable) -> int:
        page = self.shape.page_tokens
        chain: list[Kept] = []
        while (len(chain) + 1) * page <= len(tokens):
            kept = self.kept.get((salt, tuple(tokens[: (len(chain) + 1) * page])))
            if kept is None:
                break
            chain.append(kept)
        for pages in range(len(chain), 0, -1):
            if self.shape.state is not None and chain[pages - 1].state < 0:
                continue
            if all(
                chain[unit // window.ratio].bound[place][unit % window.ratio]
                for place, window in enumerate(self.shape.windows)
                for unit in range(window.first_unit(pages), pages * window.ratio)
            ):
                return pages
        return 0

    def note(self, request: Served, first: int, end: int, held: list[int], pages: list[int]) -> None:
        page = self.shape.page_tokens
        for place in range(first, end):
            prefix = (request.extra_key, tuple(request.tokens[: (place + 1) * page]))
            own = [
                [place * window.ratio + unit >= first_held for unit in range(window.ratio)]
                for window, first_held in zip(self.shape.windows, held, strict=True)
            ]
            # Without full attention a page that binds nothing has gone back to the chain.
            is_live = self.shape.full is not None or any(map(any, own))
            own_page = pages[place] if is_live else 0
            kept = self.kept.setdefault(prefix, Kept(own_page, [[False] * len(bound) for bound in own]))
            kept.page = kept.page or own_page
            kept.bound = [
                [a or b for a, b in zip(*pair, strict=True)] for pair in zip(kept.bound, own, strict=True)
            ]
            assert request.pages[place] == kept.page
            if self.shape.state is not None and place == end - 1 and kept.state < 0:
                kept.state = self.service.tree.match(
                    request.tokens[: end * page], request.extra_key
                ).node.state
                assert kept.state >= 0

    def let_go(self, freed: dict[str, np.ndarray]) -> None:
        needed = self.needed_units()
        for window_place, window in enumerate(self.shape.windows):
            gone = set(freed.get(window.name, NONE).tolist())
            assert not gone & needed[window.name]
            for kept in self.kept.values():
                for unit in range(window.ratio):
                    virtual = kept.page * window.ratio + unit
                    if kept.bound[window_place][unit] and virtual in gone:
                        kept.bound[window_place][unit] = False
                        gone.remove(virtual)
            assert not gone, "what is freed was held"
        if self.shape.state is not None:
            gone = set(freed.get(self.shape.state, NONE).tolist())
            for kept in self.kept.values():
                if kept.state in gone:
                    gone.remove(kept.state)
                    kept.state = -1
            assert not gone
        if self.shape.full is not None:
            gone = set(freed.get(self.shape.full, NONE).tolist())
            assert not gone & needed[self.shape.full]
            self.kept = {prefix: kept for prefix, kept in self.kept.items() if kept.page not in gone}
        else:
            for kept in self.kept.values():
                if not any(map(any, kept.bound)):
                    kept.page = 0
            # Whether a prefix of which nothing is left is still known is the tree's business.
            self.kept = {prefix: kept for prefix, kept in self.kept.items() if self.is_known(prefix)}
        for salt, tokens in self.kept:
            front = tokens[: -self.shape.page_tokens]
            assert not front or (salt, front) in self.kept, "what is kept hangs together"

    def is_known(self, prefix: Prefix) -> bool:
        match = self.service.tree.match(list(prefix[1]), prefix[0])
        return match.shared_pages * self.shape.page_tokens == len(prefix[1])

    def needed_units(self) -> dict[str, set[int]]:
        needed: dict[str, set[int]] = {band: set() for band in self.shape.bands}
        for request in self.service.running:
            pages = request.pages[: request.lock.pages]
            if self.shape.full is not None:
                needed[self.shape.full] |= set(pages)
            for window, begin in zip(self.shape.windows, request.lock.begins, strict=True):
                needed[window.name] |= {
                    pages[unit // window.ratio] * window.ratio + unit % window.ratio
                    for unit in range(begin, len(pages) * window.ratio)
                }
        return needed

    def chain_agrees(self, held: dict[str, int]) -> None:
        """The chain holds what the tree and the requests hold, and nothing else."""
        live = {band.name: band.live_units for band in self.service.chain.statistics().bands}
        own = dict.fromkeys(held, 0)
        for request in self.service.running:
            if self.shape.full is not None:
                own[self.shape.full] += len(request.pages) - request.lock.pages
            for window, first in zip(self.shape.windows, request.held_from, strict=True):
                own[window.name] += max(0, len(request.pages) * window.ratio - first)
            if self.shape.state is not None:
                own[self.shape.state] += 1
        assert live == {band: held[band] + own[band] for band in held}


@pytest.mark.requirement("K8", "K11")
@pytest.mark.parametrize("plan_name", PLANS)
def test_the_tree_is_a_dict_of_prefixes(plan_name: str) -> None:
    """Hits, locks, duplicates, rehomed windows and evictions over every kind of plan; units are exact after every step."""
    machine = type("Machine", (TreeMachine,), {"plan_name": plan_name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None)
    )
