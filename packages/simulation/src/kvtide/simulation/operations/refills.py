"""Units that are written anew where they are: a state restored from host memory, a receive that is tried again (rows H2, T4).

No take has cleared such units, so whoever writes them asks the ledger: `CLEARANCE` as a load or a peer's write has it.
"""

from __future__ import annotations

import random

from kvtide.ledger import Consumer
from kvtide.simulation import use_steps
from kvtide.simulation.actions import Numbers
from kvtide.simulation.operations.choices import ALL, draw_bits, one_of
from kvtide.simulation.operations.named_units import (
    able_to_be_refilled,
    draw_names,
    named,
    named_parts,
    refillable,
)
from kvtide.simulation.operations.phrases import UNDER, phrases, under
from kvtide.simulation.operations.transfers import STILL_READ, hold
from kvtide.simulation.uses import Kind
from kvtide.simulation.world import World

MOST_REFILLS = 4
"""Of one kind at a time."""


class RefillByLoad:
    """A copy from host memory onto what requests hold, while forwards over them go on."""

    name = "refill by load"
    weight = 20
    outcomes = phrases("queued, ", UNDER) | {"nothing to fill", "all of it stays"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose, in which bands, which."""
        return draw_names(rng, world, refillable)

    def apply(self, world: World, numbers: Numbers) -> str:
        """Wait for transfers on the host, for the rest on the copy's stream; leave alone what is fixed."""
        parts = named(world, refillable, numbers)
        allowed = use_steps.make_way(world, Consumer.HOST_LOAD, parts)
        if not allowed:
            return "nothing to fill" if not parts else "all of it stays"
        use_steps.refill(world, world.uses.open(Kind.LOAD, allowed))
        return f"queued, {under(world.flying)}"


class RefillByPeer:
    """A peer writes once more what an idle request holds: its units are held, and its request waits."""

    name = "refill by peer"
    weight = 30
    outcomes = frozenset({"nobody", "nothing to fill", "all of it stays", "held", STILL_READ})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose, in which bands, which."""
        if not able_to_be_refilled(world):
            return None
        return {
            "request": rng.randrange(16),
            "bands": rng.choice((ALL, draw_bits(rng, len(world.bands)))),
            "bits": rng.choice((ALL, draw_bits(rng))),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Wait for transfers on the host, hold, and record a gate."""
        requests = able_to_be_refilled(world)
        if not requests:
            return "nobody"
        request = one_of(requests, numbers["request"])
        parts = named_parts(world, [request], refillable, numbers["bands"], numbers["bits"])
        allowed = use_steps.make_way(world, Consumer.NETWORK_RECEIVE, parts)
        if not allowed:
            return "nothing to fill" if not parts else "all of it stays"
        use = world.uses.open(Kind.RECEIVE, allowed)
        return "held" if hold(world, use, request) else STILL_READ
