"""Small arenas to price: some enumerated one after another, some drawn by hypothesis (row C4)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from kvtide.plan import ArenaLayout

from .layout_oracle import Extent, World, arena

Band = tuple[int, str]
Question = tuple[World, tuple[int, ...]]
"""A world, and units asked of each band."""


def first_byte(layout: ArenaLayout, place: int, page: int) -> int:
    return layout.bands[place].origin_bytes + page * layout.bands[place].unit_bytes


def worlds(
    layout: ArenaLayout, states: Sequence[Sequence[Band]], *extents: Sequence[Extent]
) -> Iterator[World]:
    """Every combination of states, one a band, in which spans keep their order and share no byte with each other or extents.

    The first of `extents` are those of a send's fences, the second quarantined ones.
    """
    network_bytes, quarantined_bytes = (*extents, (), ())[:2]
    for bands in itertools.product(*states):
        world = World(layout, bands, tuple(network_bytes), tuple(quarantined_bytes))
        if is_sound(world):
            yield world


def is_sound(world: World) -> bool:
    """Whether spans lie in their ranges, in order, ends at their anchors, and fences outside all of them."""
    edge = world.layout.prefix_bytes
    last = len(world.bands) - 1
    held = set[int]()
    for place, (first_page, letters) in enumerate(world.bands):
        band = world.layout.bands[place]
        end_page = first_page + len(letters)
        if letters and not band.first_page <= first_page < end_page <= band.page_count:
            return False
        if (place == last and end_page != band.page_count) or (
            place == 0 < last and first_page != band.first_page
        ):
            return False
        start, end = first_byte(world.layout, place, first_page), first_byte(world.layout, place, end_page)
        if letters:
            if start < edge:
                return False
            edge = end
            held |= set(range(start, end))
    fences = {byte for extent in (*world.network_bytes, *world.quarantined_bytes) for byte in range(*extent)}
    return held.isdisjoint(fences)


def anchored(layout: ArenaLayout, place: int, spans: Sequence[str]) -> list[Band]:
    """Spans of an end, written from its anchor outward."""
    if place == 0 < len(layout.bands) - 1:
        return [(layout.bands[0].first_page, letters) for letters in spans]
    return [(layout.bands[place].page_count - len(letters), letters[::-1]) for letters in spans]


def anywhere(layout: ArenaLayout, place: int, spans: Sequence[str]) -> list[Band]:
    """Spans of a float, at each page."""
    band = layout.bands[place]
    return [
        (first_page, letters)
        for letters in spans
        for first_page in range(band.first_page, band.page_count - len(letters) + 1)
        if letters or first_page == band.first_page
    ]


def letterings(most: int, letters: str) -> list[str]:
    """Every span of up to so many pages."""
    return ["".join(span) for length in range(most + 1) for span in itertools.product(letters, repeat=length)]


def every_question() -> Iterator[Question]:
    """Thousands of questions: chains of one to five bands, each feature of the rules in every place that it can take."""
    lone = arena((2,), 11, prefix_bytes=2)
    for fences in ([], [(3, 4)], [(8, 9)]):
        for world in worlds(lone, [anchored(lone, 0, letterings(4, "l.XN"))], fences[:1], fences[:1]):
            yield from ((world, (asked,)) for asked in (0, 1, 2, 4))
    yield from _two_bands()
    yield from _page_ranges()
    yield from _three_bands()
    yield from _more_bands()


def _two_bands() -> Iterator[Question]:
    layout = arena((2, 3), 14, prefix_bytes=1)
    up = anchored(layout, 0, ["", *letterings(2, "l.Xn"), "l..", ".l.", "..X", "x.l", "N.l.", "X.Nl", "N.X."])
    down = anchored(layout, 1, ["", "l", ".", "l.", ".l", ".X", ".n", "..N", ".l."])
    for world in worlds(layout, [up, down]):
        yield from ((world, asked) for asked in [(0, 0), (1, 0), (0, 1), (2, 1), (1, 3), (3, 1)])
    tight = arena((3, 2), 13, prefix_bytes=2, first_pages=(1, 0), page_counts=(4, 5))
    fenced = anchored(tight, 0, ["", ".l"]), anchored(tight, 1, ["", "l", "..l"])
    for fence in [(3, 4), (5, 6), (6, 8), (8, 9), (2, 5)]:
        for network, quarantined in ([fence], []), ([], [fence]):
            for world in worlds(tight, fenced, network, quarantined):
                yield from ((world, asked) for asked in itertools.product(range(3), range(4)))


def _page_ranges() -> Iterator[Question]:
    """Bands whose pages begin behind the prefix's end and stop before the arena's."""
    layout = arena(
        (2, 1, 2), 16, prefix_bytes=1, first_pages=(2, 7, 2), page_counts=(5, 13, 7), origins=(0, 0, 0)
    )
    states = [
        anchored(layout, 0, ["", "l", "l."]),
        anywhere(layout, 1, ["", "l", "l.X", ".l"]),
        anchored(layout, 2, ["", "l", ".l"]),
    ]
    for world in worlds(layout, states):
        yield from ((world, asked) for asked in itertools.product((0, 1, 3), (0, 1, 2, 4), (0, 2)))
    for world in worlds(layout, states, [], [(1, 2), (15, 16)]):
        yield from (
            (world, asked) for asked in [(0, 0, 5), (0, 0, 6), (3, 0, 0), (4, 0, 0), (0, 6, 0), (0, 7, 0)]
        )


def _three_bands() -> Iterator[Question]:
    layout = arena((2, 3, 2), 22, prefix_bytes=1)
    ends = ["", "l", "l..", ".N"]
    floats = anywhere(layout, 1, ["", "l", ".", "l.l", "X.l", "l.N", "n.", ".lX.", "XlN"])
    for world in worlds(layout, [anchored(layout, 0, ends), floats, anchored(layout, 2, ends)]):
        yield from ((world, asked) for asked in [(0, 1, 0), (3, 0, 0), (1, 2, 1), (2, 1, 3), (5, 0, 5)])
    ends = ["l", "..l"]
    floats = anywhere(layout, 1, ["", "l.", "lX"])
    for fence in [(4, 5), (8, 12), (15, 16)]:
        for network, quarantined in ([fence], []), ([], [fence, (20, 21)]):
            states = [anchored(layout, 0, ends), floats, anchored(layout, 2, ends[:1])]
            for world in worlds(layout, states, network, quarantined):
                yield from (
                    (world, asked) for asked in [(0, 1, 0), (1, 0, 2), (2, 2, 0), (1, 3, 0), (5, 0, 0)]
                )


def _more_bands() -> Iterator[Question]:
    """Four and five bands; of five too many to take all, so every fifth, the same on each run."""
    four = arena((3, 2, 5, 2), 30)
    states = [
        anchored(four, 0, ["", "l", ".l"]),
        anywhere(four, 1, ["", "l", "l.X", ".."]),
        anywhere(four, 2, ["", "l", "N.", "X"]),
        anchored(four, 3, ["", "..l"]),
    ]
    for world in worlds(four, states):
        yield from ((world, asked) for asked in [(1, 1, 0, 1), (0, 2, 1, 2), (2, 3, 1, 0)])
    five = arena((2, 3, 2, 3, 1), 26, prefix_bytes=1)
    states = [
        anchored(five, 0, ["l", "..l"]),
        anywhere(five, 1, ["", "l", "l."]),
        anywhere(five, 2, ["", "l", "Xl"]),
        anywhere(five, 3, ["", "l", ".N"]),
        anchored(five, 4, ["", ".l"]),
    ]
    for world in itertools.islice(worlds(five, states), 0, None, 5):
        yield from ((world, asked) for asked in [(1, 1, 1, 1, 1), (2, 0, 2, 0, 4), (0, 2, 0, 1, 6)])


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Chains of one to six bands with every feature of the rules, mostly crowded."""
    random_state = draw(st.randoms(use_true_random=False))
    count = draw(st.integers(1, 5))
    units = [draw(st.integers(1, 5)) for _ in range(count)]
    prefix_bytes = draw(st.integers(0, 4))
    arena_bytes = prefix_bytes + draw(st.integers(4, 30))
    first_pages = [draw(st.sampled_from([0, 0, 1])) for _ in range(count)]
    page_counts = [draw(st.none() | st.integers(2, 12)) for _ in range(count)]
    layout = arena(
        units, arena_bytes, prefix_bytes=prefix_bytes, first_pages=first_pages, page_counts=page_counts
    )
    weights = draw(st.sampled_from(["ll.", "l.XN", "l..", "lllXxNn..", "XNl", "."]))
    bands, gaps = _fill(layout, random_state, weights)
    fences: tuple[list[Extent], list[Extent]] = ([], [])
    for which in fences:
        for _ in range(draw(st.integers(0, 2)) if gaps else 0):
            first, end = gaps[draw(st.integers(0, len(gaps) - 1))]
            begin = draw(st.integers(first, end))
            which.append((begin, draw(st.integers(begin, end))))
    world = World(layout, bands, tuple(fences[0]), tuple(fences[1]))
    asked = tuple(draw(st.integers(0, 4)) for _ in range(count))
    return world, asked


def _fill(layout: ArenaLayout, draw: random.Random, weights: str) -> tuple[tuple[Band, ...], list[Extent]]:
    """Spans in order, of random lengths at random places, and the gaps between them."""
    edge, last = layout.prefix_bytes, len(layout.bands) - 1
    bands: list[Band] = []
    gaps: list[Extent] = []
    for place, band in enumerate(layout.bands):
        lowest = max(band.first_page, -((band.origin_bytes - edge) // band.unit_bytes))
        room = band.page_count - lowest
        length = draw.randint(0, min(room, 4)) if room > 0 and draw.random() < 0.8 else 0
        letters = "".join(draw.choice(weights) for _ in range(length))
        if place == last:
            first_page = band.page_count - length
        elif place == 0 or not length:
            first_page, length, letters = (
                (band.first_page, length, letters) if length else (band.first_page, 0, "")
            )
        else:
            first_page = min(lowest + draw.choice([0, 0, 1, 2, 3]), band.page_count - length)
        if length:
            start = first_byte(layout, place, first_page)
            gaps.append((edge, start))
            edge = first_byte(layout, place, first_page + length)
        bands.append((first_page, letters))
    gaps.append((edge, layout.arena_bytes))
    return tuple(bands), [gap for gap in gaps if gap[0] < gap[1]]
