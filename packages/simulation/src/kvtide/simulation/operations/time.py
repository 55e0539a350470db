"""Time: a rank's device runs ahead of the others, or everything comes to rest."""

from __future__ import annotations

import random

from kvtide.simulation import checks
from kvtide.simulation.actions import Numbers
from kvtide.simulation.operations.choices import one_of
from kvtide.simulation.world import World


class PassTime:
    """Some of what is queued on one rank runs, or its host learns how far it is; the others know nothing of it."""

    name = "pass time"
    weight = 10
    outcomes = frozenset({"the forward is over", "the forward still runs", "all", "nothing queued", "some"})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Which rank, and how many pieces of work; 0 for all. Or whether it only asks for the oldest forward."""
        return {"rank": rng.randrange(2), "work": rng.choice((0, 1, 2, 5)), "asks": rng.choice((0, 0, 1))}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Run ready streams in turn, or query an event; that one was reached may save a wait and change no choice (D5)."""
        rank = one_of(world.ranks, numbers["rank"])
        device = rank.device
        if numbers["asks"] and rank.flying:
            return (
                "the forward is over" if device.query_event(rank.flying[0].end) else "the forward still runs"
            )
        if not numbers["work"]:
            device.run_all()
            return "all"
        for place in range(numbers["work"]):
            ready = device.ready_streams()
            if not ready:
                return "nothing queued"
            device.run_next(ready[place % len(ready)])
        return "some"


class Rest:
    """Every forward is processed, every stream runs dry, and all memory is compared."""

    name = "rest"
    weight = 1
    outcomes = frozenset({"with requests", "empty"})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """No number."""
        return {}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Abandon the open batch, process, compare."""
        checks.at_rest(world)
        return "with requests" if world.requests else "empty"
