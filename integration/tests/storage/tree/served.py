"""A scheduler in small over the tree and a real chain: requests that match, compute, hand over, and end; every byte is looked at.

A page, window unit or state is filled with a mark of the prompt's prefix that it ends. So a hit that restores anything but its own
prefix is a wrong byte, whatever the books say.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvtide.chain import ChainAllocator, Taken
from kvtide.device import IntArray, NumpyDevice, UnitGrid
from kvtide.ledger import ForwardSteps
from kvtide.plan import (
    ChunkLifetime,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    Lifetime,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    lay_out,
    plan_kv_storage,
)
from kvtide.storage.tree import EvictionPolicy, Match, PrefixTree, TreeLock, TreeShape

PAGE = 2
NONE: IntArray = np.empty(0, np.int64)


def plan_of(
    *lifetimes: Lifetime, has_state: bool = False, page: int = PAGE, window_page: int | None = None
) -> KVStoragePlan:
    """One attention layer a lifetime, and one of state."""
    layers = [
        KVLayerDecl(place, (KVPart(MLAGeometry(16, 0, DType.UINT8), lifetime),))
        for place, lifetime in enumerate(lifetimes)
    ]
    if has_state:
        part = KVPart(StateGeometry((TensorDecl("s", (96,), DType.UINT8),)), StateLifetime(2 * page))
        layers.append(KVLayerDecl(len(layers), (part,)))
    if window_page is None:
        return plan_kv_storage(layers, page_tokens=page)
    return plan_kv_storage(layers, page_tokens=page, window_page_tokens=window_page)


PLANS: Mapping[str, KVStoragePlan] = {
    "full": plan_of(FullLifetime()),
    "full and a window": plan_of(FullLifetime(), WindowLifetime(4)),
    "full, two windows of small pages, state": plan_of(
        FullLifetime(), WindowLifetime(6), WindowLifetime(3), has_state=True, window_page=1
    ),
    "full and state": plan_of(FullLifetime(), has_state=True),
    "full and chunks": plan_of(FullLifetime(), ChunkLifetime(8)),
    "windows alone": plan_of(WindowLifetime(7), WindowLifetime(3)),
    "a window and state": plan_of(WindowLifetime(5), has_state=True),
    "state alone": plan_of(has_state=True),
}
"""By name: every kind of slot, with and without the others."""


@attrs.define(eq=False)
class Served:
    """A request in service."""

    extra_key: Hashable
    tokens: list[int]
    """Computed, and to be computed."""
    lock: TreeLock
    match: Match
    computed: int = 0
    """Tokens that its forwards have written, or that it was given."""
    pages: list[int] = attrs.field(factory=list)
    """Virtual, of all its tokens."""
    held_from: list[int] = attrs.field(factory=list)
    """First unit of each window that it binds itself."""
    slot: int = -1
    """Running state slot."""


class Service:
    """See the module's docstring."""

    def __init__(
        self, plan: KVStoragePlan, policy: EvictionPolicy | None = None, *, arena_bytes: int = 1 << 16
    ) -> None:
        self.plan = plan
        self.shape = TreeShape.of(plan)
        self.tree = PrefixTree(self.shape, policy)
        self.layout = lay_out(plan, arena_bytes)
        self.device = NumpyDevice(self.layout.arena_bytes)
        lengths = {f"ids:{band.name}": self.layout.id_count(band) for band in self.layout.bands}
        self.steps = ForwardSteps()
        self.chain = ChainAllocator(self.layout, self.device, self.device.create_mirrors(lengths), self.steps)
        self.running: list[Served] = []

    # ── a request's life ──

    def admit(self, tokens: list[int], extra_key: Hashable = None) -> Served:
        """Match, lock, copy the checkpoint; every byte of the hit is looked at."""
        match = self.tree.match(tokens[:-1], extra_key)
        lock = self.tree.lock(match)
        self.tree.accept(lock)
        request = Served(extra_key, list(tokens), lock, match, computed=lock.pages * self.shape.page_tokens)
        request.pages = self.tree.pages(lock).tolist()
        request.held_from = [lock.pages * window.ratio for window in self.shape.windows]
        self.check_hit(request)
        if self.shape.state is not None:
            taken = self.chain.take(state_slots=1)
            assert isinstance(taken, Taken)
            request.slot = int(taken.state_slots[0])
            source = self.tree.state_slot(lock)
            assert (source >= 0) == (lock.pages > 0), "a hit lies on a checkpoint"
            if source >= 0:
                self.chain.copy_state_slots(np.array([source], np.int64), taken.state_slots)
            self.tree.state_copied(lock)
        self.running.append(request)
        return request

    def compute(self, request: Served, token_count: int) -> None:
        """Write more of its tokens; windows retire behind the last one."""
        end = min(request.computed + token_count, len(request.tokens))
        new_pages = -(-end // self.shape.page_tokens) - len(request.pages)
        if self.shape.full is not None or self.shape.windows:
            if new_pages > 0:
                taken = self.chain.take(pages=new_pages)
                assert isinstance(taken, Taken)
                request.pages += taken.pages.tolist()
        else:
            request.pages += [0] * max(0, new_pages)
        for token in range(request.computed, end):
            self._write(request, token)
        request.computed = end
        if self.shape.state is not None:
            self._fill(self.shape.state, np.array([request.slot], np.int64), self.mark(request, end))
        self.retire(request, end)

    def retire(self, request: Served, length: int) -> None:
        """Let go of window units that no token from `length` on reads: its own are freed, the tree's no longer needed."""
        floors = self.needed(length)
        self.tree.advance(request.lock, floors)
        for place, (window, floor) in enumerate(zip(self.shape.windows, floors, strict=True)):
            first = request.held_from[place]
            units = np.arange(first, max(first, min(floor, len(request.pages) * window.ratio)))
            if len(units):
                virtual = self._units(request, window.name, units)
                self.chain.free_pages(window.name, virtual)
                request.held_from[place] = int(units[-1]) + 1

    def needed(self, length: int) -> list[int]:
        """First unit of each window that the token behind `length` tokens reads."""
        return [
            window.first_token(length) * window.ratio // window.page_tokens for window in self.shape.windows
        ]

    def hand_over(self, request: Served, length: int | None = None) -> None:
        """Give the tree all that it has computed, or as much as `length` tokens, with its state if it lies there."""
        length = request.computed if length is None else length
        pages = length // self.shape.page_tokens
        first = request.lock.pages
        if pages <= first:
            return
        state = -1
        if self.shape.state is not None:
            if pages * self.shape.page_tokens != request.computed:
                return
            taken = self.chain.take(state_slots=1)
            assert isinstance(taken, Taken)
            self.chain.copy_state_slots(np.array([request.slot], np.int64), taken.state_slots)
            state = int(taken.state_slots[0])
        inserted = self.tree.insert(
            request.lock,
            request.tokens[first * self.shape.page_tokens : pages * self.shape.page_tokens],
            np.array(request.pages[first:pages], np.int64),
            held_from=request.held_from,
            needed_from=self.needed(request.computed),
            state=state,
        )
        for name, (sources, targets) in inserted.rehomed.items():
            self.chain.rehome_window(name, sources, targets)
        self.free(inserted.freed)
        if state >= 0 and not inserted.took_state:
            self.chain.free_state_slots(np.array([state], np.int64))
        request.pages[first:pages] = inserted.pages.tolist()
        request.held_from = [
            max(held, pages * window.ratio)
            for held, window in zip(request.held_from, self.shape.windows, strict=True)
        ]
        assert request.lock.pages == pages

    def finish(self, request: Served) -> None:
        """Free what is its own, and unlock the rest."""
        own = np.array(request.pages[request.lock.pages :], np.int64)
        for place, window in enumerate(self.shape.windows):
            units = np.arange(request.held_from[place], len(request.pages) * window.ratio)
            if len(units):
                self.chain.free_pages(window.name, self._units(request, window.name, units))
        if self.shape.full is not None and len(own):
            self.chain.free_pages(self.shape.full, own)
        if request.slot >= 0:
            self.chain.free_state_slots(np.array([request.slot], np.int64))
        self.tree.unlock(request.lock)
        self.running.remove(request)

    def serve(
        self, tokens: list[int], extra_key: Hashable = None, *, hand_over_at: tuple[int, ...] = ()
    ) -> int:
        """A whole life, handing over at these lengths and at the end; tokens that were a hit."""
        request = self.admit(tokens, extra_key)
        hit = request.computed
        for length in (*(at for at in hand_over_at if at > hit), len(tokens)):
            self.compute(request, length - request.computed)
            self.hand_over(request)
        self.finish(request)
        return hit

    def evict(self, band: str, count: int) -> dict[str, IntArray] | None:
        """Until so many units of a band are free."""
        freed = self.tree.evict(lambda units: units[band] >= count)
        self.free(freed or {})
        return freed

    def free(self, units: Mapping[str, IntArray]) -> None:
        """What the tree lets go of."""
        for name, virtual in units.items():
            if name == self.shape.state:
                self.chain.free_state_slots(virtual)
            else:
                self.chain.free_pages(name, virtual)

    # ── looking ──

    def check_hit(self, request: Served) -> None:
        """Every byte that the hit restores is of its own prefix."""
        pages = request.lock.pages
        for page in range(pages if self.shape.full is not None else 0):
            self._check(request, str(self.shape.full), np.array([page]), 1)
        for window in self.shape.windows:
            units = np.arange(window.first_unit(pages), pages * window.ratio)
            self._check(request, window.name, units, window.ratio)
        if self.shape.state is not None and pages:
            slot = np.array([self.tree.state_slot(request.lock)], np.int64)
            found = self._bytes(self.shape.state, slot)
            assert (found == self.mark(request, pages * self.shape.page_tokens)).all()

    def check_running(self) -> None:
        """Whatever a running request's next token reads is there, with its own bytes."""
        for request in self.running:
            full_pages = request.computed // self.shape.page_tokens
            if self.shape.full is not None:
                self._check(request, self.shape.full, np.arange(full_pages), 1)
            for window, first in zip(self.shape.windows, self.needed(request.computed), strict=True):
                whole = request.computed * window.ratio // self.shape.page_tokens
                self._check(request, window.name, np.arange(first, max(first, whole)), window.ratio)

    def mark(self, request: Served, length: int) -> int:
        """Of a prefix: alike for like prefixes of one extra key."""
        return hash((request.extra_key, tuple(request.tokens[:length]))) % 250 + 1

    def _write(self, request: Served, token: int) -> None:
        for name, ratio in self._attention():
            unit = token * ratio // self.shape.page_tokens
            last = (unit + 1) * self.shape.page_tokens // ratio
            if token + 1 == last:
                virtual = self._units(request, name, np.array([unit]))
                self._fill(name, virtual, self.mark(request, last))

    def _check(self, request: Served, name: str, units: IntArray, ratio: int) -> None:
        if not len(units):
            return
        virtual = self._units(request, name, units)
        found = self._bytes(name, virtual)
        for unit, row in zip(units.tolist(), found, strict=True):
            length = (unit + 1) * self.shape.page_tokens // ratio
            assert (row == self.mark(request, length)).all(), f"{name} unit {unit} is of another prefix"

    def _attention(self) -> list[tuple[str, int]]:
        full = [(self.shape.full, 1)] if self.shape.full is not None else []
        return [*full, *((window.name, window.ratio) for window in self.shape.windows)]

    def _units(self, request: Served, name: str, units: IntArray) -> IntArray:
        ratio = dict(self._attention())[name]
        pages = np.array(request.pages, np.int64)
        virtual: IntArray = pages[units // ratio] * ratio + units % ratio
        return virtual

    def _grid(self, name: str) -> npt.NDArray[np.uint8]:
        band = self.layout.band(name)
        return self.device.units(UnitGrid(band.origin_bytes, band.unit_bytes))

    def _bytes(self, name: str, virtual: IntArray) -> npt.NDArray[np.uint8]:
        physical = self.chain.physical_units(name, virtual)
        assert (physical > (-1 if name == self.shape.state else 0)).all(), f"{name} {virtual} is not bound"
        return self._grid(name)[physical]

    def _fill(self, name: str, virtual: IntArray, value: int) -> None:
        self._grid(name)[self.chain.physical_units(name, virtual)] = value
