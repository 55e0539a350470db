"""How uses end: agreed on by all ranks, early or late, and units that are fixed for a while."""

from __future__ import annotations

import random

from kvtide.simulation import use_rules, use_steps
from kvtide.simulation.actions import Numbers
from kvtide.simulation.operations.choices import one_of
from kvtide.simulation.operations.named_units import draw_names, live, named
from kvtide.simulation.operations.phrases import UNDER, phrases, under
from kvtide.simulation.operations.transfers import ITS_REQUEST
from kvtide.simulation.uses import Kind, Stage, Use
from kvtide.simulation.world import World

MOST_FIXES = 4
"""At a time."""


class EndUse:
    """A copy is acknowledged, or a transfer released: ranks' devices finished at different times, the ledger is told at one."""

    name = "end use"
    weight = 60
    outcomes = (
        phrases(("backup", "load", "send", "receive"), ": not over on every rank")
        | phrases(("backup over", "load over", "send over"), use_steps.FATES)
        | phrases("send over", use_steps.FATES_OF_PARKED, ITS_REQUEST)
        | phrases("receive over", (use_steps.KEPT, use_steps.FREED))
        | {"none open"}
    )

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Which, and whether hosts wait for it or only look."""
        uses = _ending(world)
        # Some stay open for long, so that much happens over them.
        if not uses or rng.random() > len(uses) / 8:
            return None
        return {"use": rng.randrange(16), "waits": rng.choice((0, 0, 1)), "closes": rng.choice((0, 0, 1))}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Agree, then end it everywhere; a request whose last send it was may end with it."""
        uses = _ending(world)
        if not uses:
            return "none open"
        use = one_of(uses, numbers["use"])
        if numbers["waits"]:
            for rank in world.ranks:
                rank.device.wait_on_host(use.ends[rank.place])
        elif not use_rules.is_over(world, use):
            return f"{use.kind.value}: not over on every rank"
        request = use.parked
        fate = use_steps.end(world, use)
        if request is not None and use.kind is Kind.SEND and numbers["closes"]:
            world.close([request])
            return f"{use.kind.value} over{fate}{ITS_REQUEST}"
        return f"{use.kind.value} over{fate}"


class Fix:
    """Somebody is promised that units stay where they are; they may be freed all the same."""

    name = "fix"
    weight = 28
    outcomes = phrases("fixed, ", UNDER) | {"nothing to fix"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose, in which bands, which."""
        if len(world.uses.of(Kind.FIX, Stage.OPEN)) >= MOST_FIXES:
            return None
        return draw_names(rng, world, live)

    def apply(self, world: World, numbers: Numbers) -> str:
        """Fix them."""
        parts = named(world, live, numbers)
        if not parts:
            return "nothing to fix"
        use_steps.fix(world, world.uses.open(Kind.FIX, parts))
        return f"fixed, {under(world.flying)}"


class Unfix:
    """Such a promise ends, or a quarantine: hosts have seen that the engine touches nothing any more."""

    name = "unfix"
    weight = 24
    outcomes = (
        phrases("no longer fixed", (use_steps.KEPT, use_steps.FREED))
        | phrases("send out of quarantine", use_steps.FATES)
        | phrases("receive out of quarantine", use_steps.FREED)
        | {"nothing fixed"}
    )

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Which."""
        fixed = _fixed(world)
        return {"use": rng.randrange(16)} if fixed and rng.random() < len(fixed) / 4 else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """End it everywhere."""
        fixed = _fixed(world)
        if not fixed:
            return "nothing fixed"
        use = one_of(fixed, numbers["use"])
        what = f"{use.kind.value} out of quarantine" if use.stage is Stage.QUARANTINED else "no longer fixed"
        return f"{what}{use_steps.unfix(world, use)}"


class GiveUp:
    """A request ends whose load, receive or last send is announced or goes on."""

    name = "give up"
    weight = 14
    outcomes = phrases(("send", "receive"), (", announced", ", open")) | {"load, announced", "nobody waits"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Which."""
        return {"request": rng.randrange(16)} if world.uses.parked() else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Withdraw what is announced, free what the request holds."""
        parked = [use for use in world.uses.uses if use.parked is not None]
        if not parked:
            return "nobody waits"
        use = one_of(parked, numbers["request"])
        outcome = f"{use.kind.value}, {use.stage.value}"
        use_steps.give_up(world, use)
        return outcome


def _ending(world: World) -> list[Use]:
    return [use for use in world.uses.uses if use.kind is not Kind.FIX and use.stage is Stage.OPEN]


def _fixed(world: World) -> list[Use]:
    return [use for use in world.uses.uses if use.kind is Kind.FIX or use.stage is Stage.QUARANTINED]
