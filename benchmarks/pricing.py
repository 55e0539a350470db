"""What pricing a demand costs: chains of 2, 3 and 6 bands, each kind of answer, arenas of a thousand to ten million pages.

Prints a markdown table of medians in µs of thread CPU time. The snapshot is given, and nothing is kept from one question to the
next. The floor is one pass over tuples of integers that places each band as low as it goes: the least that can say yes or no.
`--profile` prints where the time of the dearest answer goes.
"""

import argparse
import cProfile
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable
from functools import partial

from kvtide.chain.pricing import BandSnapshot, ChainSnapshot, LayoutPlan, feasible, first_plan
from kvtide.plan import ArenaLayout, BandLayout, PageSpan, SubPoolKind, growths

UNITS = {2: (4096, 1024), 3: (4096, 1536, 1024), 6: (4096, 1536, 2560, 1280, 2048, 1024)}
PAGES = (10**3, 10**5, 10**7)
INNER, SAMPLES = 100, 41


def arena(units: tuple[int, ...], pages: int) -> ArenaLayout:
    """Room for `pages` pages of the mean size."""
    arena_bytes = sum(units) // len(units) * pages
    return ArenaLayout(
        arena_bytes=arena_bytes,
        prefix_bytes=0,
        bands=tuple(
            BandLayout(
                name=f"band {place}",
                kind=SubPoolKind.WINDOW,
                growth=growth,
                unit_bytes=unit,
                origin_bytes=0,
                first_page=0,
                page_count=arena_bytes // unit,
                has_sink=False,
                page_tokens=1,
                planes=(),
            )
            for place, (unit, growth) in enumerate(zip(units, growths(len(units)), strict=True))
        ),
        owner=None,
    )


def chain(bands: int, pages: int, *, extents: int = 0) -> ChainSnapshot:
    """Bands of two thirds of an equal share each, half of their units free, with a gap behind all but the last.

    With `extents`, so many of each of fixed pages and network pages a band, and of fences of both kinds in each gap but the last.
    """
    layout = arena(UNITS[bands], pages)
    share = layout.arena_bytes // bands
    held: list[BandSnapshot] = []
    fences: list[tuple[int, int]] = []
    for place, band in enumerate(layout.bands):
        units = share * 2 // 3 // band.unit_bytes
        first = band.page_count - units if place == bands - 1 else band.lowest_page_from(share * place)
        middle = first + units // 2
        pinned = [
            PageSpan(first_page=middle + 3 * at, end_page=middle + 3 * at + 1) for at in range(2 * extents)
        ]
        held.append(
            BandSnapshot(
                first, first + units, units - units // 2, units // 2, tuple(pinned[::2]), tuple(pinned[1::2])
            )
        )
        if place < bands - 2:
            end = band.start_byte(first + units)
            fences += [(end + 48 * at, end + 48 * at + 16) for at in range(2 * extents)]
    return ChainSnapshot(layout, tuple(held), tuple(fences[::2]), tuple(fences[1::2]))


def demands(snapshot: ChainSnapshot) -> dict[str, list[int]]:
    """What is asked, by the answer to it."""
    free = [band.free for band in snapshot.bands]
    units = [band.unit_bytes for band in snapshot.layout.bands]
    gap = snapshot.layout.arena_bytes // len(units) // 3
    all_free = snapshot.layout.arena_bytes - sum(
        band.occupied * unit for band, unit in zip(snapshot.bands, units, strict=True)
    )
    nothing = [0] * (len(units) - 1)
    return {
        "in place, from free units": [count // 2 for count in free],
        "in place, every band grows": [
            count + gap // 4 // unit for count, unit in zip(free, units, strict=True)
        ],
        "one band makes room": [*nothing, free[-1] + gap * 5 // 2 // units[-1]],
        "all of them do": [all_free * 98 // 100 // units[0], *nothing],
        "refused last": [all_free // units[0] + 1, *nothing],
    }


def floor(snapshot: ChainSnapshot, demand: list[int]) -> bool:
    """Given what it needs as tuples."""
    edge = 0
    for band, held, asked in zip(snapshot.layout.bands, snapshot.bands, demand, strict=True):
        edge = (-(-edge // band.unit_bytes) + held.occupied + asked) * band.unit_bytes
    return edge <= snapshot.layout.arena_bytes


def medians(actions: list[Callable[[], object]]) -> list[float]:
    """Median µs of each, the actions interleaved so that all see the same machine."""
    samples: list[list[float]] = [[] for _ in actions]
    for _ in range(SAMPLES):
        for action, spent in zip(actions, samples, strict=True):
            before = time.thread_time_ns()
            for _ in range(INNER):
                action()
            spent.append((time.thread_time_ns() - before) / INNER / 1000)
    return [statistics.median(spent) for spent in samples]


def said(answer: LayoutPlan | bool | None) -> str:
    if isinstance(answer, LayoutPlan):
        return f"{answer.step.value}: {len(answer.flushed)} flushed, {len(answer.relocated)} relocated"
    return "yes" if answer else "no"


def row(
    name: str,
    ask: Callable[[ChainSnapshot, list[int]], LayoutPlan | bool | None],
    snapshots: list[ChainSnapshot],
    what: str,
) -> str:
    """One row of the table: the same question over each arena, and the floor over the largest."""
    asked = [demands(snapshot)[what] for snapshot in snapshots]
    found = medians(
        [
            *(partial(ask, snapshot, demand) for snapshot, demand in zip(snapshots, asked, strict=True)),
            partial(floor, snapshots[-1], asked[-1]),
        ]
    )
    figures = " | ".join(f"{value:.1f}" for value in found)
    answer = said(ask(snapshots[-1], asked[-1]))
    return f"| {len(asked[0])} | {name} | {answer} | {figures} | {found[-2] / found[-1]:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--profile", action="store_true", help="print where the time of the dearest answer goes"
    )
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    ask = partial(first_plan, around_network=True)
    if arguments.profile:
        snapshot = chain(6, PAGES[-1])
        demand = demands(snapshot)["all of them do"]
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(20_000):
            ask(snapshot, demand)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(14)
        return

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, pinned to one; ", end="")
    print(f"Python {platform.python_version()}")
    print(
        f"\n| bands | asked | plan | {' | '.join(f'{pages:,} pages, µs' for pages in PAGES)} | floor, µs | ratio |"
    )
    print("| -: | - | - | -: | -: | -: | -: | -: |")
    for bands in UNITS:
        snapshots = [chain(bands, pages) for pages in PAGES]
        for what in demands(snapshots[0]):
            print(row(what, ask, snapshots, what))
        print(row("`feasible`, refused last", feasible, snapshots, "refused last"))
        crowded = [chain(bands, pages, extents=4) for pages in PAGES[1:]]
        crowded.insert(0, crowded[0])
        for what in ("in place, from free units", "one band makes room", "refused last"):
            print(row(f"{what}, 16 extents a band", ask, crowded, what))


if __name__ == "__main__":
    main()
