"""The tiny arenas that are searched, as named values: their bands, their bytes, and what is asked of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from kvtide.plan import ArenaLayout
from kvtide.simulation.scenario import BandDraft, Scenario


@attrs.frozen(kw_only=True)
class Take:
    """One take that the search tries in every state."""

    name: str
    """For reports."""

    pages: int = 0
    """New virtual pages."""

    slots: int = 0
    """New state slots."""

    windows: bool = True
    """Whether windows bind the new pages, too; without an owner the longest does all the same."""

    held: bool = False
    """Bind instead, in each window, the first (sub-)page of an older page that it has let go of."""

    promised: bool = False
    """Whether a forward is to write it whole, so that it comes without zeroing."""


@attrs.frozen(kw_only=True)
class Shape:
    """One tiny arena."""

    name: str
    """For the command line."""

    bands: tuple[BandDraft, ...]
    """In chain order."""

    arena_bytes: int
    """Such that bands which grow alike have two or three units each, and one that stands alone three to seven."""

    takes: tuple[Take, ...]
    """Tried in every state."""

    room: tuple[Mapping[str, int], ...]
    """Units by band for which `ensure_capacity` makes room."""

    questions: tuple[Mapping[str, int], ...]
    """Units by band that every state is asked about, now and with everything evicted."""

    waits_for_transfers: bool = False
    """Whether a relief may wait for transfers on the host."""

    forwards: int = 2
    """In flight at most."""

    @property
    def filled(self) -> Take:
        """What a load or a receive takes: on a promise, for it writes all of it."""
        return attrs.evolve(self.takes[0], promised=True)

    def layout(self) -> ArenaLayout:
        """The arena's byte layout."""
        return Scenario(
            bands=self.bands,
            arena_bytes=self.arena_bytes,
            row_count=1,
            overlap=self.forwards,
            declares_read_end=True,
            rank_seeds=(0,),
            random_queries=False,
        ).layout()


_PAGE = Take(name="a page", pages=1)
_PROMISED = Take(name="a page, on a promise", pages=1, promised=True)
_OWNED = Take(name="a page that no window binds", pages=1, windows=False)
_PAGES = Take(name="two pages", pages=2)
_HELD = Take(name="an older page's window", held=True)
_SLOT = Take(name="a state slot", slots=1)

_STATE = BandDraft(kind="state", entry_bytes=48)
_WINDOW = BandDraft(kind="window", window_tokens=2, entry_bytes=32)
_FULL = BandDraft(kind="full", entry_bytes=32)

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            Shape(
                name="two-bands",
                bands=(_STATE, _FULL),
                arena_bytes=32 + 160,
                takes=(_PAGE, _PROMISED, _PAGES, _SLOT),
                room=({"state": 2}, {"full": 3}),
                questions=({"state": 1, "full": 2}, {"full": 1}),
            ),
            Shape(
                name="window-and-full",
                bands=(_WINDOW, attrs.evolve(_FULL, entry_bytes=48)),
                arena_bytes=80 + 176,
                takes=(_PAGE, _PROMISED, _OWNED, _HELD),
                room=({"window-2": 2}, {"full": 2}),
                questions=({"window-2": 1, "full": 1}, {"window-2": 3}),
                waits_for_transfers=True,
            ),
            Shape(
                name="float",
                bands=(_STATE, _WINDOW, _FULL),
                arena_bytes=64 + 208,
                takes=(_PAGE, _OWNED, _HELD, _SLOT),
                room=({"state": 2}, {"window-2": 2, "full": 1}),
                questions=({"state": 1, "window-2": 1, "full": 1}, {"window-2": 3}),
            ),
            Shape(
                name="sub-pages",
                bands=(_STATE, _WINDOW, attrs.evolve(_FULL, entry_bytes=16, page_tokens=2)),
                arena_bytes=64 + 224,
                takes=(_PAGE, _OWNED, _HELD, _SLOT),
                room=({"state": 2}, {"window-2": 3}),
                questions=({"state": 1, "window-2": 2, "full": 1}, {"window-2": 3}),
                waits_for_transfers=True,
            ),
            Shape(
                name="window-only",
                bands=(
                    BandDraft(kind="window", window_tokens=4, entry_bytes=24, page_tokens=2),
                    _WINDOW,
                ),
                arena_bytes=80 + 208,
                takes=(_PAGE, _PROMISED, _OWNED, _HELD),
                room=({"window-2": 3}, {"window-4": 2}),
                questions=({"window-4": 1, "window-2": 2}, {"window-4": 1}),
            ),
        )
    }
)
"""By name."""
