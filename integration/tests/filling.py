"""The allocator that ships, over an arena of real size without bytes, filled with requests at their peaks or below."""

from __future__ import annotations

import random
from collections.abc import Mapping

import attrs
import numpy as np

from kvtide.chain import BandTake, ChainAllocator, Taken, TakeRefusal
from kvtide.device import IntArray, NumpyDevice
from kvtide.ledger import ForwardSteps
from kvtide.plan import ArenaLayout, SubPoolKind
from kvtide.sizing import KVDemand, mirror_lengths


@attrs.frozen(eq=False)
class Shape:
    """What a demand comes to in the allocator's terms."""

    slots: int
    """State slots."""

    pages: int
    """Virtual pages."""

    parts: Mapping[str, int]
    """(Sub-)pages of each window: the last of those of `pages`."""


@attrs.define(eq=False)
class Held:
    """What one request has of its shape."""

    shape: Shape
    slots: IntArray
    pages: IntArray
    """Virtual pages, by position."""

    parts: dict[str, IntArray]
    """Virtual (sub-)pages bound in each window, by position."""

    @property
    def is_at_peak(self) -> bool:
        """Whether it has all of it."""
        return len(self.pages) == self.shape.pages and all(
            len(self.parts[name]) == count for name, count in self.shape.parts.items()
        )


class Filling:
    """Requests in one allocator."""

    def __init__(self, layout: ArenaLayout) -> None:
        """Empty."""
        device = NumpyDevice(layout.arena_bytes, byte_work=False)
        lengths = mirror_lengths(layout, max_running_requests=1, pages_per_row=1)
        self.chain = ChainAllocator(layout, device, device.create_mirrors(lengths), ForwardSteps())
        self.layout = layout
        self._ratios = {band.name: layout.sub_page_ratio(band) for band in layout.bands}
        # The band that every virtual page is bound in, if there is one.
        owner = layout.owner
        self._owner = owner if owner is not None and layout.band(owner).kind is SubPoolKind.FULL else None

    def shape(self, demand: KVDemand) -> Shape:
        """What `demand` comes to."""
        slots, parts = 0, {}
        for (name, ratio), units in zip(self._ratios.items(), demand.units, strict=True):
            if not ratio:
                slots = units
            else:
                parts[name] = units
        if self._owner is not None:
            return Shape(slots, parts.pop(self._owner), parts)
        # A page is there because some window holds a part of it.
        pages = (-(-units // self._ratios[name]) for name, units in parts.items())
        return Shape(slots, max(pages, default=0), parts)

    def units(self, demand: KVDemand, count: int) -> dict[str, int]:
        """Units of `count` requests, by band."""
        return {name: count * units for name, units in zip(self._ratios, demand.units, strict=True)}

    def live_units(self) -> dict[str, int]:
        """Units in use, by band."""
        return {band.name: band.live_units for band in self.chain.statistics().bands}

    # ── whole requests ──

    def take(self, shape: Shape, count: int = 1) -> list[Held] | TakeRefusal:
        """`count` requests at their peaks, in one take, all of them or none."""
        taken = self._take(shape.slots, shape.pages, shape.parts, count)
        return taken if isinstance(taken, TakeRefusal) else self._each(taken, shape, shape.parts, count)

    def take_all(self, shape: Shape, count: int) -> list[Held]:
        """`count` requests at their peaks, one after the other; fails where one is refused."""
        held: list[Held] = []
        while len(held) < count:
            taken = self.take(shape, min(count - len(held), 1 + count // 500))
            assert not isinstance(taken, TakeRefusal), f"after {len(held)} of {count} requests: {taken}"
            held += taken
        return held

    def free(self, request: Held) -> None:
        """All that a request has."""
        for name, parts in request.parts.items():
            self.chain.free_pages(name, parts)
        if self._owner is not None:
            self.chain.free_pages(self._owner, request.pages)
        if len(request.slots):
            self.chain.free_state_slots(request.slots)

    # ── piece by piece ──

    def begin(self, shape: Shape) -> Held:
        """A request with its state slots and nothing else yet."""
        nothing = dict.fromkeys(shape.parts, 0)
        (request,) = self._each(self._taken(shape.slots, 0, nothing), shape, nothing, 1)
        return request

    def grow(self, request: Held, pages: int) -> None:
        """The request goes on by `pages` virtual pages; windows first retire what would go beyond their peaks."""
        shape = request.shape
        pages = min(pages, shape.pages - len(request.pages))
        fresh = {name: min(most, pages * self._ratios[name]) for name, most in shape.parts.items()}
        for name, units in fresh.items():
            parts = request.parts[name]
            retired = max(0, len(parts) + units - shape.parts[name])
            if retired:
                self.chain.free_pages(name, parts[:retired])
                request.parts[name] = parts[retired:]
        (piece,) = self._each(self._taken(0, pages, fresh), shape, fresh, 1)
        request.pages = np.concatenate([request.pages, piece.pages])
        for name, parts in piece.parts.items():
            request.parts[name] = np.concatenate([request.parts[name], parts])

    def wander(self, shape: Shape, count: int, rng: random.Random) -> list[Held]:
        """Requests come, grow and go in random order, never more than `count`, until `count` stand at their peaks."""
        at_peak: list[Held] = []
        growing: list[Held] = []
        leaving = count // 2
        while len(at_peak) < count:
            may_begin = len(at_peak) + len(growing) < count
            if not growing or (may_begin and rng.random() < 0.5):
                growing.append(self.begin(shape))
            request = growing.pop(rng.randrange(len(growing)))
            self.grow(request, rng.randint(1, 1 + shape.pages // 2))
            if leaving and rng.random() < 0.3:
                leaving -= 1
                self.free(request)
            else:
                (at_peak if request.is_at_peak else growing).append(request)
        return at_peak

    # ── helpers ──

    def _taken(self, slots: int, pages: int, parts: Mapping[str, int]) -> Taken:
        taken = self._take(slots, pages, parts, 1)
        assert isinstance(taken, Taken), f"a request below its peak was refused: {taken}"
        return taken

    def _take(self, slots: int, pages: int, parts: Mapping[str, int], count: int) -> Taken | TakeRefusal:
        """For `count` requests alike, `pages` new virtual pages each, of which each window binds the last `parts`."""
        bands = {}
        for name, units in parts.items():
            whole = pages * self._ratios[name]
            assert units <= whole, "a window holds no page that full attention does not"
            tails = np.arange(count)[:, None] * whole + np.arange(whole - units, whole)
            bands[name] = BandTake(fresh=tails.reshape(-1))
        return self.chain.take(pages=pages * count, state_slots=slots * count, bands=bands)

    def _each(self, taken: Taken, shape: Shape, parts: Mapping[str, int], count: int) -> list[Held]:
        """What a take of `count` requests alike gave each of them."""
        pages, slots = taken.pages.reshape(count, -1), taken.state_slots.reshape(count, -1)
        return [
            Held(shape, slots[place], pages[place], self._tails(pages[place], parts))
            for place in range(count)
        ]

    def _tails(self, pages: IntArray, parts: Mapping[str, int]) -> dict[str, IntArray]:
        """The last (sub-)pages of `pages`, so many of each window's."""
        tails = {}
        for name, units in parts.items():
            every = (pages[:, None] * self._ratios[name] + np.arange(self._ratios[name])).reshape(-1)
            tails[name] = every[len(every) - units :]
        return tails


def assert_full(filling: Filling, demand: KVDemand) -> None:
    """One request more is refused, by the question and by the take alike, and nothing has changed by asking."""
    held = filling.live_units()
    assert not filling.chain.units_fit(filling.units(demand, 1))
    refusal = filling.take(filling.shape(demand))
    assert isinstance(refusal, TakeRefusal)
    assert not refusal.is_final
    assert filling.live_units() == held
