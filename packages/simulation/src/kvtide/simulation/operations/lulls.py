"""Lulls: nothing is left in flight, what ends then leaves holes, and the loop has time while the next forward only reads.

A server that only prefills has most of them: its requests leave for peers that decode, some are called off on the way, and the loop
flushes under what engines still read. What it leaves there is vacated, and free only once they are done.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from kvtide.simulation import use_steps
from kvtide.simulation.actions import Numbers
from kvtide.simulation.operations.capacity import EnsureCapacity, draw_units
from kvtide.simulation.operations.choices import ALL, draw_bits, some_of
from kvtide.simulation.operations.forwards import MANY_MOVES, flush
from kvtide.simulation.operations.named_units import able_to_leave, everything, named_parts
from kvtide.simulation.operations.phrases import phrases
from kvtide.simulation.operations.transfers import leave
from kvtide.simulation.requests import BatchEntry, Request
from kvtide.simulation.uses import Use
from kvtide.simulation.world import World


class Lull:
    """Everything in flight is processed, requests leave, some end; a forward may read, the loop flushes, and then polls or makes room."""

    name = "lull"
    weight = 24
    outcomes = phrases(
        ("idle", "a forward reads"),
        (", nothing to move", ", flushed"),
        ("", ", polled", ", room asked for"),
    )

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Who leaves, who ends, who reads, what comes then. Units that end while they are fixed or sent stay, and flushes go around them."""
        if len(world.requests) < 2:
            return None
        places = range(len(world.requests))
        staying = [place for place in places if has_staying(world, world.requests[place])]
        some_leave = rng.random() < 0.5
        return {
            "leaving": draw_bits(rng, len(places)) if some_leave else 0,
            "requests": draw_bits(rng, len(places)) if some_leave else 1 << rng.choice(staying or places),
            "readers": draw_bits(rng, len(places)),
            "then": rng.randrange(3),
            **draw_units(rng, world),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Give up the open batch, process, send, free, launch, flush; end what is over on every rank, or ensure capacity."""
        world.abandon()
        while world.flying:
            world.process()
        ending = some_of(world.requests, numbers["requests"])
        left = send_whole(world, some_of(able_to_leave(world), numbers.get("leaving", 0)))
        world.close([request for request in ending if request in world.requests])
        for use in left:
            if use.parked in ending:
                use_steps.give_up(world, use)
        readers = some_of(world.requests, numbers["readers"])
        if readers:
            world.launch([BatchEntry(one, one.length, one.length) for one in readers])
        outcome = "a forward reads" if readers else "idle"
        outcome += ", flushed" if flush(world, MANY_MOVES) else ", nothing to move"
        if not readers and any(band.vacated_units for band in world.ranks[0].chain.statistics().bands):
            # Nothing is in flight, so nobody but a send can still read what was left.
            world.facts["vacated under a send"] += 1
        if numbers["then"] == 1:
            use_steps.poll(world)
            return f"{outcome}, polled"
        if numbers["then"]:
            EnsureCapacity().apply(world, {**numbers, "take": 0})
            return f"{outcome}, room asked for"
        return outcome


def send_whole(world: World, requests: Sequence[Request], *, closes: bool = False) -> list[Use]:
    """All that idle requests hold begins to be sent; hosts wait for the gates. `closes` as of `leave`."""
    uses = []
    for request in requests:
        use = leave(world, request, named_parts(world, [request], everything, ALL, ALL), closes=closes)
        for rank in world.ranks:
            rank.device.wait_on_host(use.gates[rank.place])
        use_steps.begin_transfer(world, use)
        uses.append(use)
    world.facts["requests left"] += len(uses)
    return uses


def has_staying(world: World, request: Request) -> bool:
    """Whether anything of it is fixed, or under a transfer."""
    return any(
        np.isin(part.units, request.bound(part.band, world.shadow)).any()
        for use in world.uses.uses
        if use.is_fixed or use.is_touched
        for part in use.parts
    )
