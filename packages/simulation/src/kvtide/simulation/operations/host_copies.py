"""Copies between the arena and host memory, as a prefix cache on the host makes them: backups and loads (rows H1, H2)."""

from __future__ import annotations

import random

from kvtide.chain import BandTake
from kvtide.ledger import Reservation
from kvtide.simulation import use_steps
from kvtide.simulation.actions import Numbers
from kvtide.simulation.bands import NONE
from kvtide.simulation.handed import HOW, Handed
from kvtide.simulation.operations.choices import draw_bits, one_of, some_places
from kvtide.simulation.operations.named_units import draw_names, finished, named
from kvtide.simulation.operations.phrases import UNDER, phrases, under
from kvtide.simulation.rank import Rank
from kvtide.simulation.requests import Request
from kvtide.simulation.uses import Kind, Stage, Use, parts_of
from kvtide.simulation.world import World

MOST_COPIES = 6
"""Of one kind at a time."""


class BackUp:
    """Units that no later forward writes are copied to host memory, while forwards read and write on."""

    name = "back up"
    weight = 30
    outcomes = phrases("queued, ", UNDER) | {"nothing to copy"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose, in which bands, which."""
        if len(world.uses.of(Kind.BACKUP, Stage.OPEN)) >= MOST_COPIES:
            return None
        return draw_names(rng, world, finished)

    def apply(self, world: World, numbers: Numbers) -> str:
        """Queue it behind both streams, and tell the ledger."""
        parts = named(world, finished, numbers)
        if not parts:
            return "nothing to copy"
        use_steps.back_up(world, world.uses.open(Kind.BACKUP, parts))
        return f"queued, {under(world.flying)}"


class Load:
    """Units are taken for what host memory has, and reserved: for a new request, or window pages that one had let go of."""

    name = "load"
    weight = 24
    outcomes = phrases(("", "window: "), ("refused", *phrases("reserved, ", HOW))) | {
        "no row free",
        "in the open batch",
        "nothing unbound",
    }

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """For whom, how much, or less if that does not fit, and whether its copy is trusted to write all of it."""
        if not world.attention or len(world.uses.of(Kind.LOAD, Stage.ANNOUNCED)) >= MOST_COPIES:
            return None
        can_rebind = bool(world.windows and world.requests)
        if not world.free_rows and not can_rebind:
            return None
        return {
            "window": rng.randrange(0 if world.free_rows else 1, 2) if can_rebind else 0,
            "request": rng.randrange(16),
            "band": rng.randrange(4),
            "bits": draw_bits(rng, 8),
            "pages": rng.choice((rng.randrange(3), rng.randrange(24))),
            "yields": rng.choice((0, 1, 1)),
            "promise": rng.randrange(2),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Take, fix at once, and let the request wait."""
        if numbers["window"] and world.windows and world.requests:
            return self._into_window(world, numbers)
        if not world.attention or not world.free_rows:
            return "no row free"
        handed = take_whole(world, numbers)
        if handed is None:
            return "refused"
        request = world.open_request(handed.state_slots)
        world.append_pages(request, handed.pages)
        reserve(world, request, handed)
        return f"reserved, {handed.how}"

    @staticmethod
    def _into_window(world: World, numbers: Numbers) -> str:
        request, band = one_of(world.requests, numbers["request"]), one_of(world.windows, numbers["band"])
        if request in world.batch:
            return "in the open batch"
        units = band.sub_pages(request.pages[request.pages > 0])
        unbound = units[~world.shadow.bound[band.name][units]]
        chosen = unbound[some_places(len(unbound), numbers["bits"])]
        if not len(chosen):
            return "nothing unbound"
        unwritten = NONE if numbers["promise"] else None
        handed = world.take(bands={band.name: BandTake(fresh=NONE, held=chosen, unwritten=unwritten)})
        if handed is None:
            return "window: refused"
        reserve(world, request, handed)
        return f"window: reserved, {handed.how}"


class SubmitLoad:
    """A reserved load's copy is queued; from then on its request may run, and its units may move."""

    name = "submit load"
    weight = 40
    outcomes = phrases("submitted, ", UNDER) | {"none reserved"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Which."""
        return {"load": rng.randrange(8)} if world.uses.of(Kind.LOAD, Stage.ANNOUNCED) else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Translate, record, end the reservation."""
        loads = world.uses.of(Kind.LOAD, Stage.ANNOUNCED)
        if not loads:
            return "none reserved"
        use_steps.submit_load(world, one_of(loads, numbers["load"]))
        return f"submitted, {under(world.flying)}"


def take_whole(world: World, numbers: Numbers) -> Handed | None:
    """Pages in every band and a state slot, zeroed or, on a promise that somebody writes all of them, as they are."""
    slots = 0 if world.state is None else 1
    pages = 1 + numbers["pages"]
    while numbers.get("yields") and pages > 1 and not world.ask(world.units_asked(pages, slots, None)):
        pages //= 2
    bands = {band.name: BandTake(unwritten=NONE) for band in world.bands} if numbers["promise"] else None
    return world.take(pages=pages, state_slots=slots, bands=bands)


def reserve(world: World, request: Request, handed: Handed) -> Use:
    """Fix what was handed out until its load is submitted."""
    parts = parts_of(world.shadow, world.bands, handed.units)
    use = world.uses.open(Kind.LOAD, parts, stage=Stage.ANNOUNCED, taken=handed.taken)

    def fix(rank: Rank) -> None:
        use.owners.append(Reservation(use.name))
        rank.chain.uses.fix(use.owners[-1], use.units)

    world.on_each("a reservation", fix)
    use_steps.note_places(world, use)
    world.park(use, request)
    return use
