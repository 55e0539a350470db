"""A layout plan carried out on bytes: each byte knows whose it is, so a page copied onto another's bytes shows (C4, C6)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.chain.move_order import move_order
from kvtide.chain.pricing import LayoutPlan
from kvtide.plan import BandLayout, PageSpan

from .layout_oracle import World

Tag = tuple[int, str, int]
"""Place of the band, name of the unit, byte within it."""


class Bytes:
    """An arena in which every unit that is kept has written its name into each of its bytes."""

    def __init__(self, world: World, pinned_letters: str) -> None:
        self.layout = world.layout
        self.bytes: list[Tag | None] = [None] * world.layout.arena_bytes
        self.units: list[dict[str, int]] = []
        """By band: where each unit that is live or pinned lies."""
        self.pinned: list[set[str]] = []
        for place, (first_page, letters) in enumerate(world.bands):
            kept = {
                f"{letter}{first_page + at}": first_page + at
                for at, letter in enumerate(letters)
                if letter in "lXN" or letter in pinned_letters
            }
            self.units.append(kept)
            self.pinned.append({name for name in kept if name[0] in pinned_letters})
            for name, page in kept.items():
                self._write(place, name, page)

    def pack(self, place: int, span: PageSpan) -> None:
        """Move whatever may move into `span`, in order, as if all of it were read before any is written."""
        moving = [name for name in self.units[place] if name not in self.pinned[place]]
        pinned_pages = {self.units[place][name] for name in self.pinned[place]}
        room = [page for page in range(span.first_page, span.end_page) if page not in pinned_pages]
        assert len(room) >= len(moving), (
            f"band {place} finds room for {len(room)} of {len(moving)} units in {span}"
        )
        copied = [self._read(place, self.units[place][name]) for name in moving]
        for name, page, content in zip(moving, room, copied, strict=False):
            start, end = self._bytes_of(self.layout.bands[place], page)
            self.bytes[start:end] = content
            self.units[place][name] = page

    def take(self, place: int, span: PageSpan, asked: int) -> None:
        """Hand out pages of the span that hold nothing; they are written at once."""
        used = set(self.units[place].values())
        room = [page for page in range(span.first_page, span.end_page) if page not in used]
        assert len(room) >= asked, f"band {place} finds {len(room)} of {asked} units in {span}"
        for page in room[:asked]:
            self.units[place][f"taken{page}"] = page
            self._write(place, f"taken{page}", page)

    def check(self, spans: Sequence[PageSpan]) -> None:
        """Every unit has its own bytes, inside its band's span; fixed ones have not moved."""
        for place, units in enumerate(self.units):
            for name, page in units.items():
                assert spans[place].first_page <= page < spans[place].end_page
                expected = [(place, name, at) for at in range(self.layout.bands[place].unit_bytes)]
                assert self._read(place, page) == expected, f"band {place} lost unit {name}"
                assert name not in self.pinned[place] or name[1:] == str(page)

    def _write(self, place: int, name: str, page: int) -> None:
        start, end = self._bytes_of(self.layout.bands[place], page)
        self.bytes[start:end] = [(place, name, at) for at in range(end - start)]

    def _read(self, place: int, page: int) -> list[Tag | None]:
        start, end = self._bytes_of(self.layout.bands[place], page)
        return self.bytes[start:end]

    @staticmethod
    def _bytes_of(band: BandLayout, page: int) -> tuple[int, int]:
        start = band.origin_bytes + page * band.unit_bytes
        return start, start + band.unit_bytes


def carry_out(world: World, demand: Sequence[int], plan: LayoutPlan, *, around_network: bool = False) -> None:
    """Flush the ends, relocate the floats in order, take in chain order; fails if a byte that is kept is lost on the way."""
    arena = Bytes(world, "XxNn" if around_network else "Xx")
    for place in plan.flushed:
        arena.pack(place, plan.spans[place])
    spans = [PageSpan(first_page=first, end_page=first + len(letters)) for first, letters in world.bands]
    order = move_order(world.layout, spans, plan.spans, plan.relocated)
    assert sorted(order) == list(plan.relocated)
    for place in order:
        arena.pack(place, plan.spans[place])
    arena.check(plan.spans)
    for place, asked in enumerate(demand):
        arena.take(place, plan.spans[place], asked)
    arena.check(plan.spans)
