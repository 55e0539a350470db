"""Window pages that a prefix tree takes over under virtual pages of its own, from requests that computed them again (row K8)."""

from __future__ import annotations

import random

import numpy as np

from kvtide.device import IntArray
from kvtide.simulation.actions import Numbers
from kvtide.simulation.bands import NONE, SimulatedBand
from kvtide.simulation.operations.choices import draw_bits, one_of, some_places
from kvtide.simulation.operations.phrases import UNDER, phrases, under
from kvtide.simulation.requests import Request
from kvtide.simulation.world import World


class Rehome:
    """What one request's window binds stands for another's pages from now on; forwards that read and write it run on.

    A page that its forward has yet to write whole may go too: its debt goes along, and is paid when the forward is given up.
    """

    name = "rehome"
    weight = 40
    outcomes = phrases("rehomed", (", given up", " with a debt, given up", *phrases(", ", UNDER))) | {
        "nothing to rehome",
        "nothing to rehome to",
        "none of them",
    }

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """In which window, from whom to whom, which pages; whether from the open batch, which is then given up."""
        batch = rng.randrange(2) if world.batch.takes else 0
        if not any(_sources(world, band, batch) and _targets(world, band) for band in world.windows):
            return None
        return {
            "band": rng.randrange(4),
            "source": rng.randrange(16),
            "target": rng.randrange(16),
            "bits": draw_bits(rng, 4),
            "turned": rng.randrange(2),
            "batch": batch,
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Rebind on every rank."""
        batch = numbers.get("batch", 0)
        windows = [band for band in world.windows if _sources(world, band, batch) and _targets(world, band)]
        if not windows:
            return "nothing to rehome"
        band = one_of(windows, numbers["band"])
        source, sources = one_of(_sources(world, band, batch), numbers["source"])
        takers = [each for each in _targets(world, band) if each[0] is not source]
        if not takers:
            return "nothing to rehome to"
        taker, targets = one_of(takers, numbers["target"])
        count = min(len(sources), len(targets))
        chosen = some_places(count, numbers["bits"])
        if not len(chosen):
            return "none of them"
        sources, targets = sources[:count][chosen], targets[:count][chosen]
        if numbers.get("turned"):
            sources = sources[::-1].copy()
        owed = world.shadow.undefined[band.name][sources].any()
        world.rehome_rows(source, taker, band, sources, targets)
        if batch:
            world.abandon()
            return "rehomed with a debt, given up" if owed else "rehomed, given up"
        return f"rehomed, {under(world.forwards_over(source))}"


def _sources(world: World, band: SimulatedBand, batch: int) -> list[tuple[Request, IntArray]]:
    """Who could give up which pages, in or outside of the open batch: a page that it is to write stays where it looks for it."""
    found = [
        (request, _unused(world, band, request.bound(band, world.shadow)))
        for request in world.requests
        if (request in world.batch) == bool(batch)
    ]
    return [(request, units) for request, units in found if len(units)]


def _targets(world: World, band: SimulatedBand) -> list[tuple[Request, IntArray]]:
    """Whose pages stand for nothing in the window."""
    found = []
    for request in world.requests:
        units = request.sub_pages(band)
        # Page 0 stands for one that has returned.
        unbound = units[(units >= band.ratio) & ~world.shadow.bound[band.name][units]]
        if len(unbound):
            found.append((request, unbound))
    return found


def _unused(world: World, band: SimulatedBand, units: IntArray) -> IntArray:
    """Those that no use knows by name; a tree names no page that a load or a receive still fills."""
    named = [use.units.get(band.name, NONE) for use in world.uses.uses]
    return units[~np.isin(units, np.concatenate([*named, NONE]))]
