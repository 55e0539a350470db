"""Capacity questions, and takes made to measure: the largest that fits, one unit more, what was prepared for, what a clone did."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from kvtide.chain import BandTake, ChainAllocator, TakeRefusal
from kvtide.device import NumpyDevice
from kvtide.ledger import NetworkTransfer
from kvtide.simulation.actions import Numbers
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.handed import HOW, MOVED
from kvtide.simulation.operations.choices import one_of
from kvtide.simulation.operations.phrases import phrases
from kvtide.simulation.rank import Rank, free
from kvtide.simulation.uses import Kind, Stage
from kvtide.simulation.world import World

HAD_ROOM, MADE_ROOM = ROOM = ("had room", "made room")
"""What ensuring capacity took."""


class AskFits:
    """A question and no take; the answer is compared with every layout there is."""

    name = "ask"
    weight = 4
    outcomes = frozenset({"fits", "does not fit"})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Units of each band, by place."""
        return draw_units(rng, world)

    def apply(self, world: World, numbers: Numbers) -> str:
        """Ask for a take, for one after half of everything was evicted, in both words, and for one that leaves a unit of each band."""
        asked = _units(world, numbers)
        evictable = {
            band.name: min(len(world.held(band)) // 2, len(world.movable(band))) for band in world.bands
        }
        one_each = dict.fromkeys(asked, 1)
        world.question("admits", lambda rank: rank.chain.admits(asked, evictable), asked, freed=evictable)
        world.question(
            "fits_after_frees",
            lambda rank: rank.chain.fits_after_frees(asked, evictable),
            asked,
            freed=evictable,
        )
        world.question(
            "prealloc_fits",
            lambda rank: rank.chain.prealloc_fits(asked, one_each),
            {name: units + 1 for name, units in asked.items()},
        )
        return "fits" if world.ask(asked) else "does not fit"


class EnsureCapacity:
    """Room is made now, so that the take that follows is served in place."""

    name = "ensure capacity"
    weight = 8
    outcomes = phrases(ROOM, ("", ", taken")) | {"refused"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Units of each band, and whether a take follows."""
        return {**draw_units(rng, world), "take": rng.randrange(2)}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Ensure, then perhaps take as much of it as one call can name."""
        asked = _units(world, numbers)
        fits = world.ask(asked)
        before = [rank.fingerprint() for rank in world.ranks]
        moved = world.figures().moved
        answer = world.make_room("ensure_capacity", asked, lambda rank: rank.chain.ensure_capacity(asked))[0]
        if isinstance(answer, TakeRefusal) == fits:
            raise CheckFailedError(
                "capacity_answer", f"units_fit said {fits} to {asked}, ensure_capacity says {answer}"
            )
        if answer is not None:
            world.check_unchanged("a refused ensure_capacity", before)
            world.note_refused(answer, asked)
            return "refused"
        outcome = MADE_ROOM if world.figures().moved > moved else HAD_ROOM
        slots = 0 if world.state is None else asked[world.state.name]
        if not numbers["take"] or not world.requests or not slots:
            return outcome
        handed = world.take(state_slots=slots)
        if handed is None or handed.how == MOVED:
            raise CheckFailedError(
                "capacity_answer",
                f"after ensure_capacity of {asked}, a take of {slots} state slots is {handed and handed.how}",
            )
        one_of(world.requests, numbers["take"]).state_slots += handed.state_slots.tolist()
        return f"{outcome}, taken"


class FillArena:
    """A request gets every page that still fits, bound in every band or in as few as may be; one more is refused."""

    name = "fill"
    weight = 4
    outcomes = phrases("filled", ("", " thinly"), ", ", HOW) | {"nobody", "full"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose, how many pages short of everything, bound where."""
        if not world.requests or not world.attention:
            return None
        return {
            "request": rng.randrange(16),
            "spare": rng.randrange(3),
            "band": rng.choice((0, rng.randrange(1, 5))),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Find the most, be refused one more, take it."""
        if not world.requests or not world.attention:
            return "nobody"
        request = one_of(world.requests, numbers["request"])
        bands = self._bands(world, numbers["band"])
        most = most_pages(world, bands)
        room = world.ranks[0].column_count - len(request.pages)
        if world.take(pages=most + 1, bands=bands) is not None:
            raise CheckFailedError(
                "capacity_answer", f"{most} pages are the most that fit, and {most + 1} were taken"
            )
        pages = min(most - numbers["spare"], room)
        if pages <= 0 or request in world.batch:
            return "full"
        handed = world.take(pages=pages, bands=bands)
        if handed is None:
            raise CheckFailedError("capacity_answer", f"{most} pages fit, and {pages} are refused")
        world.append_pages(request, handed.pages)
        return f"filled{'' if bands is None else ' thinly'}, {handed.how}"

    @staticmethod
    def _bands(world: World, number: int) -> dict[str, BandTake] | None:
        """Every band for 0; else no window, or one where there is no full band."""
        if not number:
            return None
        has_full = any(band.is_owner for band in world.attention)
        return {} if has_full else {one_of(world.windows, number).name: BandTake()}


class WhatIf:
    """A clone of the allocator takes and frees, over no bytes; the original does not notice, and then does the same (row C13)."""

    name = "what if"
    weight = 4
    outcomes = phrases("as the clone, ", HOW) | {"no row free", "refused"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """How many pages and slots, and whether another clone ends everything before."""
        if not world.free_rows:
            return None
        return {"pages": rng.randrange(5), "slots": rng.randrange(1, 3), "frees": rng.randrange(2)}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Ask the clone, then oneself."""
        pages = numbers["pages"] if world.attention else 0
        slots = numbers["slots"] if world.state is not None else 0
        if not world.free_rows or (world.state is not None and not slots):
            return "no row free"

        def answer_of_clone(rank: Rank) -> str:
            if numbers["frees"]:
                _end_everything(world, rank, _clone(world, rank))
            clone = _clone(world, rank)
            taken = clone.take(pages=pages, state_slots=slots)
            clone.verify_byte_accounting()
            places = [clone.physical_units(band.name, np.arange(band.id_count)) for band in world.bands]
            return f"{type(taken).__name__} {[place.tolist() for place in places]}"

        predicted = world.unchanged("a clone's take", answer_of_clone)[0]
        handed = world.take(pages=pages, state_slots=slots)
        places = [world.ranks[0].table(band).tolist() for band in world.bands]
        found = f"{'Taken' if handed is not None else 'TakeRefusal'} {places}"
        if found != predicted:
            raise CheckFailedError(
                "capacity_answer",
                f"a clone answers a take of {pages} pages and {slots} slots with {predicted}, then {found}",
            )
        if handed is None:
            return "refused"
        world.append_pages(world.open_request(handed.state_slots), handed.pages)
        return f"as the clone, {handed.how}"


def _clone(world: World, rank: Rank) -> ChainAllocator:
    """One that frees what the rank's own waiter would."""
    device = NumpyDevice(world.layout.arena_bytes, byte_work=False)
    mirrors = device.create_mirrors({f"ids:{band.name}": band.id_count for band in world.bands})
    freed = {name: world.held_by([request]) for name, request in world.closing().items()}

    def wait(transfers: Sequence[NetworkTransfer]) -> None:
        for transfer in transfers:
            clone.uses.end(transfer)
            for band, units in freed.get(transfer.name, ()):
                free(clone, band, units)

    clone = rank.chain.clone(device, mirrors, wait_for_transfers=wait if freed else None)
    return clone


def _end_everything(world: World, rank: Rank, clone: ChainAllocator) -> None:
    """Another course of things: debts are paid, and all that is held is freed."""
    for take in world.batch.takes:
        clone.pay_zero_debt(take.taken[rank.place])
    for use in world.uses.of(Kind.LOAD, Stage.ANNOUNCED):
        clone.uses.unfix(use.owners[rank.place])
    for use in world.uses.of(Kind.RECEIVE, Stage.ANNOUNCED):
        clone.uses.release_hold(use.owners[rank.place])
    for band in sorted(world.attention, key=lambda band: band.is_owner):
        clone.free_pages(band.name, world.held(band))
    if world.state is not None:
        clone.free_state_slots(world.held(world.state))


def most_pages(world: World, bands: Mapping[str, BandTake] | None) -> int:
    """The most virtual pages, bound where `bands` says, that fit now."""
    fits, fails = 0, len(world.minted) + 1
    while fails - fits > 1:
        pages = (fits + fails) // 2
        if world.ask(world.units_asked(pages, 0, bands)):
            fits = pages
        else:
            fails = pages
    return fits


def draw_units(rng: random.Random, world: World) -> Numbers:
    """How many units of each band, by place."""
    return {
        f"band {place}": rng.choice((0, rng.randrange(4), rng.randrange(24)))
        for place in range(len(world.bands))
    }


def _units(world: World, numbers: Numbers) -> dict[str, int]:
    return {band.name: numbers.get(f"band {place}", 0) for place, band in enumerate(world.bands)}
