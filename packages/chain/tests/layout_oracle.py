"""Every layout of a small arena, tried one after another: what pricing must agree with (row C4).

A world is written page by page, one letter a page of each band's span:

    l  live            X  live and fixed            N  live, a transfer reads or writes it
    .  free            x  free and fixed            n  free (moved away from), a send still reads it

Nothing here knows a rule of thumb: a band may stand wherever the rules let it, its span may be longer than it needs, and all
combinations of all bands are tried. They are folded over the byte at which the bands so far end, since all that the next band
sees of them is that byte; `every_layout` does not fold, and a test compares the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtide.chain.pricing import BandSnapshot, ChainSnapshot, Rearrangement
from kvtide.plan import ArenaLayout, BandLayout, PageSpan, SubPoolKind, growths

Extent = tuple[int, int]
Cost = tuple[int, int]
"""Bytes moved at most, and bands rearranged."""

STEPS = (Rearrangement.NO_MOVE, Rearrangement.FLUSH_ENDS, Rearrangement.RELAYOUT)


class World(NamedTuple):
    """A chain, page by page."""

    layout: ArenaLayout
    bands: tuple[tuple[int, str], ...]
    """First page of each span, and its pages' letters."""
    network_bytes: tuple[Extent, ...] = ()
    quarantined_bytes: tuple[Extent, ...] = ()

    @property
    def snapshot(self) -> ChainSnapshot:
        """What pricing is told of it."""
        return ChainSnapshot(
            self.layout,
            tuple(itertools.starmap(band_snapshot, self.bands)),
            self.network_bytes,
            self.quarantined_bytes,
        )


class Choice(NamedTuple):
    """One way in which one band may stand."""

    first_page: int
    end_page: int
    step: int
    """Place in STEPS of the least step that allows it."""
    moved_bytes: int
    rearranged: bool
    bytes_held: Extent | None
    """None for an empty span, which holds none."""


def arena(
    units: Sequence[int],
    arena_bytes: int,
    *,
    prefix_bytes: int = 0,
    first_pages: Sequence[int] | None = None,
    page_counts: Sequence[int | None] | None = None,
    origins: Sequence[int] | None = None,
) -> ArenaLayout:
    """An arena of a few bytes. Bands begin at the prefix's end, or so that their first page does, or at `origins`."""
    bands = []
    for place, (unit, growth) in enumerate(zip(units, growths(len(units)), strict=True)):
        first_page = 0 if first_pages is None else first_pages[place]
        origin = max(0, prefix_bytes - first_page * unit) if origins is None else origins[place]
        room = (arena_bytes - origin) // unit
        limit = None if page_counts is None else page_counts[place]
        bands.append(
            BandLayout(
                kind=SubPoolKind.WINDOW,
                name=f"band {place}",
                growth=growth,
                unit_bytes=unit,
                origin_bytes=origin,
                first_page=first_page,
                page_count=room if limit is None else min(room, limit),
                has_sink=first_page > 0,
                page_tokens=1,
                planes=(),
            )
        )
    return ArenaLayout(arena_bytes=arena_bytes, prefix_bytes=prefix_bytes, bands=tuple(bands), owner=None)


def band_snapshot(first_page: int, letters: str) -> BandSnapshot:
    """Counts and extents of a span written in letters."""
    return BandSnapshot(
        first_page=first_page,
        end_page=first_page + len(letters),
        occupied=sum(letter in "lXxN" for letter in letters),
        free=sum(letter in ".n" for letter in letters),
        fixed=extents(first_page, letters, "Xx"),
        network=extents(first_page, letters, "Nn"),
        network_free=letters.count("n"),
    )


def extents(first_page: int, letters: str, wanted: str) -> tuple[PageSpan, ...]:
    """Runs of pages whose letter is one of `wanted`."""
    found, page = [], first_page
    for is_wanted, run in itertools.groupby(letters, lambda letter: letter in wanted):
        length = len(list(run))
        if is_wanted:
            found.append(PageSpan(first_page=page, end_page=page + length))
        page += length
    return tuple(found)


class Oracle:
    """Answers about one world and one demand; with `around_network`, transfers' pages stay and their fenced bytes are left."""

    def __init__(self, world: World, demand: Sequence[int], *, around_network: bool = False) -> None:
        self.world = world
        self.demand = demand
        self.pinned_letters = "XxNn" if around_network else "Xx"
        extents_left = world.quarantined_bytes + (world.network_bytes if around_network else ())
        self.blocked = {byte for first, end in extents_left for byte in range(first, end)}
        self.choices = [list(self._choices(place)) for place in range(len(world.bands))]

    def least_cost(self) -> tuple[Cost | None, Cost | None, Cost | None]:
        """The least cost under each step, or None where no layout serves; each step may do what those before it do."""
        reached: dict[tuple[int, int], Cost] = {(self.world.layout.prefix_bytes, 0): (0, 0)}
        for choices in self.choices:
            after: dict[tuple[int, int], Cost] = {}
            for (edge, step), (moved, rearranged) in reached.items():
                for choice in choices:
                    if choice.bytes_held is not None and choice.bytes_held[0] < edge:
                        continue
                    end = edge if choice.bytes_held is None else choice.bytes_held[1]
                    key = end, max(step, choice.step)
                    cost = moved + choice.moved_bytes, rearranged + choice.rearranged
                    if key not in after or cost < after[key]:
                        after[key] = cost
            reached = after
        return self._by_step([(step, cost) for (_, step), cost in reached.items()])

    def every_layout(self) -> Iterator[tuple[Choice, ...]]:
        """Every combination of choices in which bands keep their order and share no byte, unfolded."""
        for layout in itertools.product(*self.choices):
            edge = self.world.layout.prefix_bytes
            for choice in layout:
                if choice.bytes_held is not None:
                    if choice.bytes_held[0] < edge:
                        break
                    edge = choice.bytes_held[1]
            else:
                yield layout

    def least_cost_unfolded(self) -> tuple[Cost | None, Cost | None, Cost | None]:
        """As `least_cost`, from `every_layout`."""
        return self._by_step(
            [
                (
                    max(choice.step for choice in layout),
                    (
                        sum(choice.moved_bytes for choice in layout),
                        sum(choice.rearranged for choice in layout),
                    ),
                )
                for layout in self.every_layout()
            ]
        )

    @staticmethod
    def _by_step(found: list[tuple[int, Cost]]) -> tuple[Cost | None, Cost | None, Cost | None]:
        first, second, third = (
            min((cost for needed, cost in found if needed <= step), default=None)
            for step in range(len(STEPS))
        )
        return first, second, third

    def _choices(self, place: int) -> Iterator[Choice]:
        """Every span in which the band may stand, once as it is and once rearranged."""
        is_end = place in {0, len(self.world.bands) - 1}
        for first_page, end_page, held in self._spans(place, is_end):
            if self._stays(place, first_page, end_page):
                yield Choice(first_page, end_page, 0, 0, False, held)
            if self.world.bands[place][1] and self._holds_rearranged(place, first_page, end_page):
                yield Choice(
                    first_page, end_page, 1 if is_end else 2, self._moved_bytes(place, is_end), True, held
                )

    def _spans(self, place: int, is_end: bool) -> Iterator[tuple[int, int, Extent | None]]:
        """Every span that lies in the band's range and on no blocked byte; the empty one stands at the anchor."""
        band = self.world.layout.bands[place]
        anchor = band.page_count if place == len(self.world.bands) - 1 else band.first_page
        yield anchor, anchor, None
        for first_page in range(band.first_page, band.page_count):
            for end_page in range(first_page + 1, band.page_count + 1):
                if is_end and anchor not in {first_page, end_page}:
                    continue
                start = band.origin_bytes + first_page * band.unit_bytes
                held = start, start + (end_page - first_page) * band.unit_bytes
                if self.blocked.isdisjoint(range(*held)):
                    yield first_page, end_page, held

    def _stays(self, place: int, first_page: int, end_page: int) -> bool:
        """Whether the span is the present one, or that grown at one side, and a take finds its units in it."""
        held_first, letters = self.world.bands[place]
        held_end = held_first + len(letters)
        if not letters:
            return end_page - first_page >= self.demand[place] and (
                self.demand[place] > 0 or first_page == end_page
            )
        if not (first_page <= held_first and held_end <= end_page):
            return False
        if first_page < held_first and held_end < end_page:
            return False
        free = sum(letter in ".n" and letter not in self.pinned_letters for letter in letters)
        return free + (end_page - first_page) - len(letters) >= self.demand[place]

    def _holds_rearranged(self, place: int, first_page: int, end_page: int) -> bool:
        """Whether what may not move lies inside the span, and what may finds room there beside what is asked."""
        held_first, letters = self.world.bands[place]
        pinned = {held_first + place for place, letter in enumerate(letters) if letter in self.pinned_letters}
        inside = set(range(first_page, end_page))
        return pinned <= inside and len(inside - pinned) >= self._movable(place) + self.demand[place]

    def _movable(self, place: int) -> int:
        return sum(
            letter in "lXN" and letter not in self.pinned_letters for letter in self.world.bands[place][1]
        )

    def _moved_bytes(self, place: int, is_end: bool) -> int:
        letters = self.world.bands[place][1]
        free = sum(letter in ".n" and letter not in self.pinned_letters for letter in letters)
        units = min(self._movable(place), free) if is_end else self._movable(place)
        return units * self.world.layout.bands[place].unit_bytes
