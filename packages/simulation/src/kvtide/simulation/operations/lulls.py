"""Lulls: nothing is left in flight, what ends then leaves holes, and the loop has time while the next forward only reads."""

from __future__ import annotations

import random

import numpy as np

from kvtide.simulation import use_steps
from kvtide.simulation.actions import Numbers
from kvtide.simulation.operations.capacity import EnsureCapacity, draw_units
from kvtide.simulation.operations.choices import draw_bits, some_of
from kvtide.simulation.operations.forwards import MANY_MOVES, flush
from kvtide.simulation.requests import BatchEntry, Request
from kvtide.simulation.world import World


class Lull:
    """Everything in flight is processed and somebody ends; a forward reads, and under it the loop flushes, and then polls or makes room."""

    name = "lull"
    weight = 24

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Who ends, who reads, what comes then. Units that end while they are fixed or sent stay, and flushes go around them."""
        if len(world.requests) < 2:
            return None
        places = range(len(world.requests))
        staying = [place for place in places if has_staying(world, world.requests[place])]
        return {
            "requests": 1 << rng.choice(staying or places),
            "readers": draw_bits(rng, len(world.requests)),
            "then": rng.randrange(3),
            **draw_units(rng, world),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Give up the open batch, process, free, launch, flush; end what is over on every rank, or ensure capacity."""
        world.abandon()
        while world.flying:
            world.process()
        world.close(some_of(world.requests, numbers["requests"]))
        readers = some_of(world.requests, numbers["readers"])
        if readers:
            world.launch([BatchEntry(one, one.length, one.length) for one in readers])
        flushed = "flushed" if flush(world, MANY_MOVES) else "nothing to move"
        outcome = f"{'a forward reads' if readers else 'idle'}, {flushed}"
        if numbers["then"] == 1:
            use_steps.poll(world)
            return f"{outcome}, polled"
        if numbers["then"]:
            return f"{outcome}, {EnsureCapacity().apply(world, {**numbers, 'take': 0})}"
        return outcome


def has_staying(world: World, request: Request) -> bool:
    """Whether anything of it is fixed, or under a transfer."""
    return any(
        np.isin(part.units, request.bound(part.band, world.shadow)).any()
        for use in world.uses.uses
        if use.is_fixed or use.is_touched
        for part in use.parts
    )
