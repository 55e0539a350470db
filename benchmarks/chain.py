"""What the chain costs a scheduler on the host: decode steps, prefill takes and frees, a churn of requests.

Prints a markdown table of medians in µs of thread CPU time, on one core, each beside a bare floor: the NumPy calls that the same
work needs over stacks of pages, with no virtual ids, no checks and no ledger. Zeroing, moves and uploads are counted apart: the
device does no work, and mirrors take notes only in the rows that say so. The churn has its forwards in the ledger. `--profile`
prints where the time of a decode step goes; `--json` prints a line a figure, for `peers/table.py`.
"""

import argparse
import cProfile
import os
import platform
import pstats
import statistics
from collections.abc import Iterator

import numpy as np
from chain_books import Floor, Ours, small_model
from workload import (
    CONTEXT_TOKENS,
    PAGE_SIZES,
    POOL_TOKENS,
    REQUESTS,
    WINDOW_TOKENS,
    Figure,
    Shape,
    decode_us,
    measure,
    print_figures,
    running_rows,
    settle,
)

PARTS = ("decode", "prefill", "churn")


def ours(shape: Shape, page_tokens: int) -> Ours:
    """Books of one layer of each kind."""
    return Ours(small_model(shape), page_tokens)


def ours_in_ledger(shape: Shape, page_tokens: int) -> Ours:
    """The same, whose forwards overlap and are in the ledger."""
    return Ours(small_model(shape), page_tokens, overlap=True)


def floor(shape: Shape, page_tokens: int) -> Floor:
    """The same work, bare; a state costs a decode step nothing."""
    return Floor(page_tokens, pool_count=1 if shape is Shape.STATE else 2)


def our_figures(page_sizes: tuple[int, ...], parts: tuple[str, ...]) -> Iterator[Figure]:
    """What peers are compared with."""
    yield from measure(ours, page_sizes, [part for part in parts if part != "churn"])
    yield from measure(ours_in_ledger, page_sizes, [part for part in parts if part == "churn"])


def more_decode_figures(page_sizes: tuple[int, ...]) -> Iterator[Figure]:
    """Decode steps that only ours has, interleaved a sample at a time."""
    for page_tokens in page_sizes:
        books = {
            "decode, full + two windows": Ours(small_model(Shape.WINDOW, (WINDOW_TOKENS, 1024)), page_tokens),
            "decode, full + window, with mirror notes": Ours(
                small_model(Shape.WINDOW), page_tokens, takes_notes=True
            ),
            "decode, full + window, in the ledger": ours_in_ledger(Shape.WINDOW, page_tokens),
        }
        rows = {name: running_rows(each) for name, each in books.items()}
        settle()
        samples: dict[str, list[float]] = {name: [] for name in books}
        for _ in range(9):
            for name, each in books.items():
                samples[name].append(decode_us(each, rows[name], samples=1, steps=64))
                each.upload()
        for name, found in samples.items():
            yield Figure(name, page_tokens, statistics.median(found))


def profile_decode(page_tokens: int) -> None:
    """Print where the time of a decode step goes."""
    books = ours(Shape.WINDOW, page_tokens)
    rows = running_rows(books)
    profile = cProfile.Profile()
    profile.enable()
    # Until the pools are nearly full, windows among them.
    most = min(CONTEXT_TOKENS, POOL_TOKENS // REQUESTS - 2 * WINDOW_TOKENS)
    while int(books.lengths[rows].mean()) < most:
        books.decode(rows)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(22)


def print_table(parts: tuple[str, ...]) -> None:
    """Every figure beside its floor."""
    bare = {
        (figure.operation, figure.page_tokens): figure.value for figure in measure(floor, PAGE_SIZES, parts)
    }
    found = list(our_figures(PAGE_SIZES, parts))
    if "decode" in parts:
        found += more_decode_figures(PAGE_SIZES)
    values = {(figure.operation, figure.page_tokens): figure.value for figure in found}
    operations = dict.fromkeys(figure.operation for figure in found)
    print("| µs | " + " | ".join(f"page {size}: floor | ours" for size in PAGE_SIZES) + " |")
    print("| - |" + " -: | -: |" * len(PAGE_SIZES))
    for operation in operations:
        cells = [f"{bare[operation, size]:.3g}" if (operation, size) in bare else "–" for size in PAGE_SIZES]
        pairs = [
            f"{cell} | {values[operation, size]:.3g}" for cell, size in zip(cells, PAGE_SIZES, strict=True)
        ]
        print(f"| {operation} | {' | '.join(pairs)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", type=int, metavar="PAGE", help="where the time of a decode step goes")
    parser.add_argument("--only", choices=PARTS, help="one of the three")
    parser.add_argument("--json", choices=("ours", "floor"), help="a line a figure, of one of the two")
    arguments = parser.parse_args()
    parts = PARTS if arguments.only is None else (arguments.only,)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if arguments.profile:
        profile_decode(arguments.profile)
    elif arguments.json == "ours":
        print_figures(our_figures(PAGE_SIZES, parts))
    elif arguments.json == "floor":
        print_figures(measure(floor, PAGE_SIZES, parts))
    else:
        print(
            f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}; thread CPU time\n"
        )
        print_table(parts)


if __name__ == "__main__":
    main()
