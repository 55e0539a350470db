"""Takes for which a relief waits for transfers, and with them ends what the takes name (row C6).

take binds a window's page of request 3 ──► no layout goes around its last send ──► the host waits ──► request 3 is over
└──► the take is an error
"""

from __future__ import annotations

import random

import numpy as np

from kvtide.chain import BandTake, ChainError
from kvtide.simulation.actions import Numbers
from kvtide.simulation.bands import SimulatedBand
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.operations.capacity import most_pages
from kvtide.simulation.operations.choices import one_of
from kvtide.simulation.operations.lulls import send_whole
from kvtide.simulation.operations.named_units import able_to_leave
from kvtide.simulation.rank import Rank
from kvtide.simulation.requests import Request
from kvtide.simulation.world import World


class TakeWhatEnds:
    """A take names a page of a request whose last send is in the way: once that has been waited for, nobody holds the page."""

    name = "take what ends"
    weight = 24
    outcomes = frozenset({"nobody leaves", "room without a wait", "refused as an error"})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Which page, and how many pages short of the most beside it."""
        if not _nameable(world):
            return None
        return {"page": rng.randrange(64), "spare": rng.choice((0, 0, 1, 2))}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Send all of the request, then take the most pages that fit only where it was, and one of its own."""
        nameable = _nameable(world)
        if not nameable:
            return "nobody leaves"
        request, band, unit = one_of(nameable, numbers["page"])
        send_whole(world, [request], closes=True)
        bands = {window.name: BandTake() for window in world.windows if window.binds_all or window is band}
        bands[band.name] = BandTake(held=np.array([unit], np.int64))
        pages = most_pages(world, bands) - numbers["spare"]
        asked = world.units_asked(pages, 0, bands)
        if pages < 0 or not world.ask(asked) or world.some_layout_holds(asked, around_transfers=True):
            return "room without a wait"

        def take(rank: Rank) -> str:
            try:
                answer = rank.chain.take(pages=pages, bands=bands)
            except ChainError as error:
                return str(error)
            raise CheckFailedError(
                "misuse_accepted",
                f"a take of a page that ended while the host waited is answered by {answer}",
            )

        world.make_room("a take of what ends", asked, take)
        return "refused as an error"


def _nameable(world: World) -> list[tuple[Request, SimulatedBand, int]]:
    """Of each request that could leave, and each window, a (sub-)page that stands for nothing, if there is one."""
    if not world.scenario.waits_for_transfers or not world.ends_within_waits:
        return []
    found = []
    for request in able_to_leave(world):
        for band in world.windows:
            units = band.sub_pages(request.pages[request.pages > 0])
            unbound = units[~world.shadow.bound[band.name][units]]
            if len(unbound):
                found.append((request, band, int(unbound[0])))
    return found
