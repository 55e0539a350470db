"""Takes that requests ask for: admission, growth for the next forward, window pages bound again.

A growth serves many rows in one take. Windows bind what the *cover* says of the new tokens' pages:

| cover | binds |
| - | - |
| whole | every page, as a take without a mapping does |
| tails | what the next tokens will still see: chunks whose own attention reads activations |
| reached | pages that tokens have reached; the rest of a virtual page's sub-pages are bound by a later growth |
| some | any |
| none | nothing |
"""

from __future__ import annotations

import random

import attrs
import numpy as np

from kvtide.chain import BandTake
from kvtide.device import IntArray
from kvtide.simulation.actions import Numbers
from kvtide.simulation.bands import NONE, SimulatedBand
from kvtide.simulation.handed import HOW
from kvtide.simulation.operations.choices import draw_bits, one_of, some_of, some_places
from kvtide.simulation.operations.phrases import phrases
from kvtide.simulation.requests import BatchTake, Request
from kvtide.simulation.shadow import Bools
from kvtide.simulation.world import World

COVERS = ("whole", "tails", "reached", "some", "none")


class Admit:
    """A request arrives: a row, and its state slot in full."""

    name = "admit"
    weight = 100
    outcomes = frozenset({"no row free", "refused", "admitted"})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """No number; as long as a row is free."""
        return {} if world.free_rows else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Take the slot and open the row."""
        if not world.free_rows:
            return "no row free"
        slots = NONE
        if world.state is not None:
            handed = world.take(state_slots=1)
            if handed is None:
                return "refused"
            slots = handed.state_slots
        world.open_request(slots)
        return "admitted"


@attrs.frozen(eq=False)
class _Growth:
    """One request's part of a growth."""

    request: Request
    start: int
    end: int
    new_pages: int

    def positions(self, band: SimulatedBand, first_column: int, columns: int) -> IntArray:
        """First token of each of the band's pages in these columns."""
        return (first_column * band.ratio + np.arange(columns * band.ratio)) * band.page_tokens


class Grow:
    """Rows get room for tokens of the next forward, or for more of them, all in one take."""

    name = "grow"
    weight = 160
    outcomes = phrases(COVERS, ": ", (*HOW, "refused")) | {"no row to grow", "needs nothing"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Which rows, how many tokens, what windows bind, what is promised."""
        if not world.requests:
            return None
        return {
            "rows": draw_bits(rng, len(world.requests)),
            "tokens": rng.choice((1, 1, 3, rng.randrange(12))),
            "reserve": rng.choice((0, 0, 0, rng.randrange(6))),
            "cover": rng.randrange(len(COVERS)),
            "bits": draw_bits(rng),
            "promise": rng.randrange(3),
            "slots": rng.choice((0, 0, 1, 2)),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Take, append to the rows, and add them to the open batch."""
        growths = self._growths(world, some_of(world.requests, numbers["rows"]), numbers)
        if not growths:
            return "no row to grow"
        cover = COVERS[numbers["cover"] % len(COVERS)]
        pages = sum(growth.new_pages for growth in growths)
        slots = 0 if world.state is None else numbers["slots"]
        bands = None
        if cover != "whole" or numbers["promise"] or slots:
            # A window that the mapping leaves out binds nothing.
            named = [band for band in world.attention if band.binds_all or cover != "none"]
            bands = {band.name: _band_take(world, band, growths, cover, numbers) for band in named}
            if world.state is not None and numbers["promise"]:
                bands[world.state.name] = BandTake(unwritten=NONE)
        if not any(world.units_asked(pages, slots, bands).values()):
            self._join(world, growths, NONE, NONE)
            return "needs nothing"
        handed = world.take(pages=pages, state_slots=slots, bands=bands)
        if handed is None:
            return f"{cover}: refused"
        world.batch.takes.append(BatchTake(handed.taken, handed.promised))
        self._join(world, growths, handed.pages, handed.state_slots)
        return f"{cover}: {handed.how}"

    @staticmethod
    def _growths(world: World, requests: list[Request], numbers: Numbers) -> list[_Growth]:
        growths = []
        for place, request in enumerate(requests):
            prepared = world.batch.entry_of(request)
            start, end = (
                (request.length, request.length) if prepared is None else (prepared.start, prepared.end)
            )
            end += (numbers["tokens"] + 5 * place * (numbers["tokens"] > 2)) % 12
            columns = len(request.pages)
            if world.attention:
                wanted = -(-(end + numbers["reserve"]) // world.layout.page_tokens)
                if wanted > world.ranks[0].column_count:
                    continue
                columns = max(columns, wanted)
            growths.append(_Growth(request, start, end, columns - len(request.pages)))
        return growths

    @staticmethod
    def _join(world: World, growths: list[_Growth], pages: IntArray, slots: IntArray) -> None:
        """Rows get their pages in order, the first row the slots; all of them are in the batch."""
        first = 0
        for growth in growths:
            world.append_pages(growth.request, pages[first : first + growth.new_pages])
            first += growth.new_pages
            growth.request.state_slots += slots.tolist()
            world.batch.put(growth.request, growth.start, growth.end, tuple(slots.tolist()))
            slots = NONE


class Rebind:
    """A window binds pages again that it had let go of, or never bound, as a load would."""

    name = "rebind"
    weight = 12
    outcomes = frozenset({"no window", "nothing unbound", "refused", *HOW})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose, in which window, which."""
        if not world.requests or not world.windows:
            return None
        return {"request": rng.randrange(16), "band": rng.randrange(4), "bits": draw_bits(rng, 4)}

    def apply(self, world: World, numbers: Numbers) -> str:
        """A take of nothing new."""
        if not world.requests or not world.windows:
            return "no window"
        request, band = one_of(world.requests, numbers["request"]), one_of(world.windows, numbers["band"])
        units = band.sub_pages(request.pages[request.pages > 0])
        unbound = units[~world.shadow.bound[band.name][units]]
        chosen = unbound[some_places(len(unbound), numbers["bits"])]
        if not len(chosen):
            return "nothing unbound"
        handed = world.take(bands={band.name: BandTake(fresh=NONE, held=chosen)})
        return "refused" if handed is None else handed.how


def _band_take(
    world: World, band: SimulatedBand, growths: list[_Growth], cover: str, numbers: Numbers
) -> BandTake:
    """What one attention band binds in a growth, and what of it must be zeroed."""
    fresh, held, whole_fresh, whole_held = [], [], [], []
    first_place = 0
    for growth in growths:
        columns = len(growth.request.pages)
        positions = growth.positions(band, columns, growth.new_pages)
        places = _covered(band, growth, positions, cover, numbers["bits"])
        fresh.append(places + first_place)
        whole_fresh.append(_is_whole(band, growth, positions[places]))
        first_place += growth.new_pages * band.ratio
        if band.is_owner or not growth.request.pages.any():
            continue
        units, positions = growth.request.sub_pages(band), growth.positions(band, 0, columns)
        # Page 0 stands for one that has returned.
        can_be = (units >= band.ratio) & ~world.shadow.bound[band.name][units]
        wanted = np.flatnonzero(can_be & _is_wanted(band, growth, positions, "reached"))
        if cover == "some":
            wanted = wanted[some_places(len(wanted), numbers["bits"])]
        held.append(units[wanted])
        whole_held.append(_is_whole(band, growth, positions[wanted]))
    unwritten = None
    if numbers["promise"]:
        is_whole = np.concatenate([*whole_fresh, *whole_held, np.empty(0, np.bool_)])
        unwritten = np.flatnonzero(~is_whole)
        if numbers["promise"] % 3 == 2:
            unwritten = np.union1d(unwritten, some_places(len(is_whole), numbers["bits"]))
    return BandTake(
        fresh=None if band.binds_all else np.concatenate([*fresh, NONE]),
        held=np.concatenate([*held, NONE]),
        unwritten=unwritten,
    )


def _covered(band: SimulatedBand, growth: _Growth, positions: IntArray, cover: str, bits: int) -> IntArray:
    """Places among new pages, by the first token of each, that a cover binds; a band that binds all binds all."""
    if band.binds_all or cover == "whole":
        return np.arange(len(positions))
    if cover == "some":
        return some_places(len(positions), bits)
    return np.flatnonzero(_is_wanted(band, growth, positions, cover))


def _is_wanted(band: SimulatedBand, growth: _Growth, positions: IntArray, cover: str) -> Bools:
    first = growth.start
    if cover == "tails" and band.window_tokens is not None:
        first = max(first, growth.end - band.window_tokens + 1)
    return (positions < growth.end) & (positions + band.page_tokens > first)


def _is_whole(band: SimulatedBand, growth: _Growth, positions: IntArray) -> Bools:
    """Which pages the growth's tokens cover whole."""
    return (positions >= growth.start) & (positions + band.page_tokens <= growth.end)
