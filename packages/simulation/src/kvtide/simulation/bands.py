"""What never changes about a band during a run."""

from __future__ import annotations

import attrs
import numpy as np

from kvtide.device import IntArray, UnitGrid
from kvtide.plan import ArenaLayout, SubPoolKind
from kvtide.simulation.scenario import Scenario

NONE: IntArray = np.empty(0, np.int64)
"""No unit, page or slot."""

WORD_BYTES = 8
"""Contents are compared as 64-bit words; unit bytes are a multiple of 16."""


@attrs.frozen(kw_only=True, eq=False)
class SimulatedBand:
    """One band's facts, as the simulation needs them."""

    name: str
    """Of the band."""

    tag: int
    """Marks the band's words: place in the chain, counted from 1."""

    grid: UnitGrid
    """Where its units lie."""

    unit_count: int
    """Units of its grid inside the arena."""

    words: int
    """64-bit words a unit."""

    is_state: bool
    """Whether its units are state slots."""

    is_owner: bool
    """Whether it is the full-attention band, which binds every virtual page until the page returns."""

    binds_all: bool
    """Whether every take here binds all its new pages in it: the owner, or else the longest window."""

    has_sink: bool
    """Whether page 0 is a sink."""

    page_tokens: int
    """Tokens a page; 1 for state."""

    ratio: int
    """Its pages a virtual page; 1 for state."""

    window_tokens: int | None
    """Tokens that a query sees, `None` where it sees all."""

    id_count: int
    """Virtual units, unmintable ones included."""

    token_of_word: IntArray
    """Which token of a page each word belongs to, `[words]`."""

    def sub_pages(self, pages: IntArray) -> IntArray:
        """Virtual units of these virtual pages, page after page."""
        return (pages[:, None] * self.ratio + np.arange(self.ratio)).ravel()


def simulated_bands(scenario: Scenario, layout: ArenaLayout) -> tuple[SimulatedBand, ...]:
    """Every band of the layout, in chain order."""
    windows = {band.name: band.window_tokens for band in scenario.bands if band.kind == "window"}
    bands = []
    for place, band in enumerate(layout.bands):
        grid = UnitGrid(band.origin_bytes, band.unit_bytes)
        words, tokens = band.unit_bytes // WORD_BYTES, band.page_tokens or 1
        bands.append(
            SimulatedBand(
                name=band.name,
                tag=place + 1,
                grid=grid,
                unit_count=grid.unit_count(layout.arena_bytes),
                words=words,
                is_state=band.page_tokens is None,
                is_owner=band.kind is SubPoolKind.FULL,
                binds_all=band.name == layout.owner,
                has_sink=band.has_sink,
                page_tokens=tokens,
                ratio=layout.sub_page_ratio(band) or 1,
                window_tokens=windows.get(band.name),
                id_count=layout.id_count(band),
                token_of_word=((np.arange(words) + 1) * tokens - 1) // words,
            )
        )
    return tuple(bands)
