"""Frees: requests that end, windows that pass, tails that were reserved in vain. Any of them may come under forwards."""

from __future__ import annotations

import random

import numpy as np

from kvtide.device import IntArray
from kvtide.simulation import use_steps
from kvtide.simulation.actions import Numbers
from kvtide.simulation.bands import NONE, SimulatedBand
from kvtide.simulation.operations.choices import draw_bits, one_of, some_of
from kvtide.simulation.operations.phrases import UNDER, phrases, under
from kvtide.simulation.requests import Request
from kvtide.simulation.world import World

_UNDER_FORWARDS = (*UNDER, "under two forwards", "under three forwards or more")


class Finish:
    """Requests end, or are aborted: all they hold is freed, even under forwards that still include them."""

    name = "finish"
    weight = 150
    outcomes = phrases(_UNDER_FORWARDS, ("", ", in the open batch")) | {"nobody"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """One, or several at once, and whether the loop then looks at what others do with units."""
        figures = world.ranks[0].chain.statistics()
        # Arenas fill up, and stay nearly full: there bands meet.
        if not world.requests or rng.random() > (figures.live_bytes / figures.arena_bytes) ** 3:
            return None
        one = 1 << rng.randrange(len(world.requests))
        return {"requests": rng.choice((one, one, one, draw_bits(rng))), "polls": rng.choice((0, 0, 0, 1))}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Free windows, the owner, state slots, the row; perhaps poll."""
        over = some_of(world.requests, numbers["requests"])
        if not over:
            return "nobody"
        forwards = max(world.forwards_over(request) for request in over)
        is_prepared = any(request in world.batch for request in over)
        world.close(over)
        if numbers.get("polls"):
            use_steps.poll(world)
        outcome = _UNDER_FORWARDS[min(forwards, len(_UNDER_FORWARDS) - 1)]
        return f"{outcome}, in the open batch" if is_prepared else outcome


class Retire:
    """Windows let go of pages that every later query is too far away to see."""

    name = "retire"
    weight = 40
    outcomes = phrases("passed, ", UNDER) | {"nothing passed"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose pages, in which windows."""
        passed = (_out_of_sight(world, band, one) for band in world.windows for one in world.requests)
        if not any(map(len, passed)):
            return None
        everybody = (1 << len(world.requests)) - 1
        return {
            "requests": rng.choice((everybody, draw_bits(rng, len(world.requests)))),
            "bands": draw_bits(rng, len(world.windows)),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Free per window what lies behind the next token's sight, of several rows at once."""
        requests = some_of(world.requests, numbers["requests"])
        count = 0
        for band in some_of(world.windows, numbers["bands"]):
            units = [_out_of_sight(world, band, request) for request in requests]
            gone = np.concatenate([*units, NONE])
            if len(gone):
                world.retire(requests, band, gone)
                count += len(gone)
        if not count:
            return "nothing passed"
        return f"passed, {under(world.flying)}"


class DropTail:
    """Pages behind a request's last token return: slots that were reserved and rejected."""

    name = "drop tail"
    weight = 10
    outcomes = phrases("dropped, ", UNDER) | {"nobody", "in the open batch", "no tail"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose."""
        tokens = world.layout.page_tokens
        has_tail = any(len(one.pages) * tokens - one.length >= tokens for one in world.requests)
        return {"request": rng.randrange(16)} if has_tail else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Free whole columns, windows first."""
        if not world.requests or not world.attention:
            return "nobody"
        request = one_of(world.requests, numbers["request"])
        if request in world.batch:
            return "in the open batch"
        columns = -(-request.length // world.layout.page_tokens)
        gone = request.pages[columns:]
        gone = gone[gone > 0]
        if not len(gone):
            return "no tail"
        for band in sorted(world.attention, key=lambda band: band.is_owner):
            units = band.sub_pages(gone)
            world.free(band, units[world.shadow.bound[band.name][units]])
        request.pages = request.pages[:columns].copy()
        return f"dropped, {under(world.flying)}"


class DropCheckpoints:
    """State slots that a request kept beside its running one return."""

    name = "drop checkpoints"
    weight = 4
    outcomes = phrases("dropped, ", UNDER) | {"none kept"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose."""
        kept = any(len(request.state_slots) > 1 for request in world.requests)
        return {"requests": draw_bits(rng, len(world.requests))} if kept else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Free them in one call."""
        requests = [one for one in some_of(world.requests, numbers["requests"]) if one not in world.batch]
        slots = [slot for request in requests for slot in request.state_slots[1:]]
        if world.state is None or not slots:
            return "none kept"
        world.free(world.state, np.array(slots, np.int64))
        for request in requests:
            del request.state_slots[1:]
        return f"dropped, {under(world.flying)}"


def _out_of_sight(world: World, band: SimulatedBand, request: Request) -> IntArray:
    """Bound pages of one window wholly before what the request's next token reads."""
    units = request.sub_pages(band)
    first_read = request.length - (band.window_tokens or 0) + 1
    is_past = (np.arange(len(units)) + 1) * band.page_tokens <= first_read
    return units[is_past & world.shadow.bound[band.name][units]]
