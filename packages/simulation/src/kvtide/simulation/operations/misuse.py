"""Calls that name what they may not: each must raise an error of ours and change nothing, neither tables nor books."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

from kvtide.chain import ChainError
from kvtide.ledger import InvariantError
from kvtide.simulation.actions import Numbers
from kvtide.simulation.bands import SimulatedBand
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.operations.choices import one_of
from kvtide.simulation.operations.mistakes import Call, Mistake
from kvtide.simulation.operations.rehoming_misuse import OF_REHOMING
from kvtide.simulation.operations.unit_misuse import OF_UNITS
from kvtide.simulation.operations.use_misuse import OF_USES, collect
from kvtide.simulation.rank import Rank
from kvtide.simulation.world import World

_KINDS: Mapping[str, Callable[[Mistake], Call | None]] = {**OF_UNITS, **OF_USES, **OF_REHOMING}

_DRAWS = 8
"""Before the operation is passed over."""


class Misuse:
    """One wrong call on every rank."""

    name = "misuse"
    weight = 24
    outcomes = frozenset({"not possible now", *_KINDS})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Which mistake, in which band, with which unit; one that can be made now."""
        for _ in range(_DRAWS):
            kind, band, pick = rng.randrange(len(_KINDS)), rng.randrange(8), rng.randrange(256)
            make = one_of(list(_KINDS.values()), kind)
            if make(Mistake(world, one_of(world.bands, band), pick)) is not None:
                return {"kind": kind, "band": band, "pick": pick}
        return None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Make it, where the state of things lets one make it."""
        name, make = one_of(list(_KINDS.items()), numbers["kind"])
        band = one_of(world.bands, numbers["band"])
        at = Mistake(world, band, numbers["pick"])
        call = make(at)
        if call is None:
            return "not possible now"
        if name in OF_USES:
            world.on_each("a use that is over", partial(collect, at))
        world.unchanged(name, lambda rank: _expect_error(name, band, call, rank))
        return name


def _expect_error(name: str, band: SimulatedBand, call: Call, rank: Rank) -> str:
    before = rank.chain.books()
    try:
        answer = call(rank)
    except (ChainError, InvariantError) as error:
        if rank.chain.books() != before:
            raise CheckFailedError(
                "changed_by_refusal", f"{name} in band {band.name!r} has changed what the chain decides by"
            ) from error
        return str(error)
    raise CheckFailedError("misuse_accepted", f"{name} in band {band.name!r} is accepted with {answer}")
