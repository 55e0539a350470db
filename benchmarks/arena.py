"""How fast the CPU device moves and zeroes pages: 256 MiB of them, beside one plain copy of as many bytes in the same run.

Prints a markdown table of medians of wall time, interleaved sample by sample, on one core and one thread.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvtide.arena import CPUDevice, KVArena
from kvtide.device import IntArray, UnitGrid

MOVED_BYTES = 256 << 20
UNIT_BYTES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]


def lists(unit_count: int) -> dict[str, tuple[IntArray, IntArray]]:
    """Sources in the upper half of an arena, targets in the lower: as compaction and relocation list them, and at random."""
    draw = np.random.default_rng(1)
    units = np.arange(unit_count)
    runs_of_8 = (draw.permutation(unit_count // 8)[:, None] * 8 + np.arange(8)).reshape(-1)
    cases = {
        "one block": (units + unit_count, units),
        "runs of 8 units": (units + unit_count, runs_of_8),
        "single units": (draw.permutation(unit_count) + unit_count, draw.permutation(unit_count)),
        "a block over itself, an eighth further": (units + unit_count // 8, units),
    }
    return {name: pairs for name, pairs in cases.items() if len(pairs[0]) == unit_count}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=9)
    samples = parser.parse_args().samples
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}\n")
    print("| unit | moved | GB/s | of a plain copy |\n| -: | - | -: | -: |")
    device = CPUDevice(KVArena(torch.zeros(2 * MOVED_BYTES, dtype=torch.uint8)))
    region, stream = device.arena.bytes, device.schedule_stream
    for unit_bytes in UNIT_BYTES:
        grid = UnitGrid(0, unit_bytes)
        for name, (sources, targets) in lists(MOVED_BYTES // unit_bytes).items():
            plain, moves = [], []
            for _ in range(samples):
                plain.append(seconds(partial(region[:MOVED_BYTES].copy_, region[MOVED_BYTES:])))
                moves.append(seconds(partial(device.copy_units, stream, grid, sources, targets)))
            move = statistics.median(moves)
            ratio = statistics.median(plain) / move
            print(f"| {unit_bytes >> 10} KiB | {name} | {MOVED_BYTES / move / 1e9:.1f} | {ratio:.0%} |")


if __name__ == "__main__":
    main()
