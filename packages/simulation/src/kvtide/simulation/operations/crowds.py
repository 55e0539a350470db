"""Crowds: bands meet over bytes that they left and that somebody still reads, and all that still fits is asked for.

    end     | kept │ moved from, sent │ ← another band grows up to here, and over the bytes only once the send is over
             flush ←──┘ the frontier retreats

Such bytes come about where a flush moves what is sent or read by forwards; they matter only to the last unit that fits.
"""

from __future__ import annotations

import random

from kvtide.chain import BandTake
from kvtide.simulation import use_steps
from kvtide.simulation.actions import Numbers
from kvtide.simulation.bands import SimulatedBand
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.handed import HOW
from kvtide.simulation.operations.capacity import ROOM, EnsureCapacity, most_pages
from kvtide.simulation.operations.choices import draw_bits, one_of, some_of
from kvtide.simulation.operations.forwards import MANY_MOVES, flush
from kvtide.simulation.operations.lulls import send_whole
from kvtide.simulation.operations.named_units import able_to_leave
from kvtide.simulation.operations.phrases import phrases
from kvtide.simulation.requests import BatchEntry, Request
from kvtide.simulation.world import World

ROUNDS = 2
"""Forwards that read, each with a flush behind it: what is left is then read by different ones."""

_WHOLE = 8


class Crowd:
    """Requests leave and end, forwards read, flushes retreat, sends fail; then a band is asked for the most that it can have."""

    name = "crowd"
    weight = 36
    outcomes = (
        phrases(("quarantined", "sent", "read", "idle"), ", ", (*ROOM, *phrases("taken, ", HOW)))
        # Nothing pends where no forward is in flight.
        - {"idle, taken, settled"}
    )

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Who leaves, and gives up at once, who ends and who reads in each round, how far flushes go, which sends fail, which band grows."""
        if len(world.requests) < 2:
            return None
        return {
            "leaving": rng.choice((0, draw_bits(rng, len(world.requests)))),
            "closes": rng.randrange(2),
            "giving up": rng.choice((0, draw_bits(rng, 4))),
            "failing": rng.choice((0, 0, draw_bits(rng, 4))),
            "moves": rng.choice((1, 2, MANY_MOVES, MANY_MOVES)),
            "band": rng.randrange(8),
            "share": rng.choice((_WHOLE, _WHOLE, rng.randrange(1, _WHOLE))),
            **{f"ending {place}": 1 << rng.randrange(len(world.requests)) for place in range(ROUNDS)},
            **{f"readers {place}": rng.choice((0, draw_bits(rng))) for place in range(ROUNDS)},
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Give up the open batch and process; then as the class says."""
        world.abandon()
        while world.flying:
            world.process()
        left = send_whole(
            world, some_of(able_to_leave(world), numbers["leaving"]), closes=bool(numbers["closes"])
        )
        for use in some_of(left, numbers["giving up"]):
            use_steps.give_up(world, use)
        for place in range(ROUNDS):
            world.close(some_of(world.requests, numbers[f"ending {place}"]))
            readers = some_of(world.requests, numbers[f"readers {place}"])
            if readers and len(world.flying) < world.scenario.overlap:
                world.launch([BatchEntry(one, one.length, one.length) for one in readers])
            flush(world, numbers["moves"])
        if not world.flying and any(band.vacated_units for band in world.ranks[0].chain.statistics().bands):
            # Nothing is in flight, so nobody but a send can still read what was left.
            world.facts["vacated under a send"] += 1
        failing = some_of(left, numbers["failing"])
        for use in failing:
            request = world.unpark(use)
            use_steps.quarantine(world, use)
            if request is not None:
                world.close([request])
        what = "quarantined" if failing else "sent" if left else "read" if world.flying else "idle"
        band = one_of(world.bands, numbers["band"])
        most = _most_units(world, band)
        if not world.requests:
            place = world.bands.index(band)
            return f"{what}, {EnsureCapacity().apply(world, {f'band {place}': most, 'take': 0})}"
        return f"{what}, {_take(world, world.requests[0], band, most, numbers['share'])}"


def _most_units(world: World, band: SimulatedBand) -> int:
    """How many units one band can have, by questions."""
    fits, fails = 0, band.id_count + 1
    while fails - fits > 1:
        units = (fits + fails) // 2
        if world.ask({band.name: units}):
            fits = units
        else:
            fails = units
    return fits


def _take(world: World, request: Request, band: SimulatedBand, most: int, share: int) -> str:
    """So many eighths of what fits in one band, and of pages in as few others as may be."""
    if band.is_state:
        handed = world.take(state_slots=most * share // _WHOLE)
    else:
        bands = {each.name: BandTake() for each in world.attention if each.binds_all or each is band}
        room = world.ranks[0].column_count - len(request.pages)
        handed = world.take(pages=min(most_pages(world, bands) * share // _WHOLE, room), bands=bands)
    if handed is None:
        raise CheckFailedError(
            "capacity_answer", f"{share} eighths of what fits in band {band.name!r} are refused"
        )
    world.append_pages(request, handed.pages)
    request.state_slots += handed.state_slots.tolist()
    return f"taken, {handed.how}"
