"""How fast pages move and are zeroed on a GPU, beside a plain device copy and fill in the same run, and what that costs forwards."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import attrs
import numpy as np
import torch

from gpu_place import Place, sleep
from kvtide.arena import CUDADevice, KVArena
from kvtide.arena.copy_plan import CopySegment
from kvtide.device import IntArray, UnitGrid

PAGES_BYTES = 64 << 20
REGIONS = 16
"""Each measurement works on the next of so many regions, twice 64 MiB each: by the time one comes again, no cache holds it."""

SAMPLES = 15
HEAD_START_CYCLES = 20_000_000
"""The GPU is kept busy this long while the host queues what is timed."""

UNIT_BYTES = [2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 16 << 20]


@attrs.frozen
class Rates:
    """Medians for one size of unit; GB/s of bytes moved or zeroed, each counted once."""

    move: float
    copy: float
    overlapping: float
    """A block that moves over itself by an eighth, as the device runs it."""

    zero: float
    fill: float
    host_us: float
    """Time that the host spends in one call that moves them."""


def timing_event() -> torch.cuda.Event:
    """Not yet recorded."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it unannotated


def milliseconds(work: Callable[[], object]) -> float:
    """GPU time of work on the current stream."""
    sleep(HEAD_START_CYCLES)
    start, end = timing_event(), timing_event()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure(place: Place, unit_bytes: int) -> Rates:
    """Rates of 64 MiB of pages that are scattered over a region as large, to and from another."""
    # Imported here: Triton may be missing where the rest is rehearsed.
    from kvtide.arena import triton_kernels  # noqa: PLC0415

    arena = KVArena.allocate(2 * REGIONS * PAGES_BYTES, place.memory)
    device = CUDADevice(arena)
    grid, count = UnitGrid(0, unit_bytes), PAGES_BYTES // unit_bytes
    device.prewarm([grid])
    draw = np.random.default_rng(2)
    regions = itertools.cycle(range(REGIONS))
    whole = [CopySegment(0, count, through_scratch=False)]
    scratch = torch.empty(2, dtype=torch.int64, device=place.memory)

    def pairs(first: int) -> tuple[IntArray, IntArray]:
        return draw.permutation(count) + first + count, draw.permutation(count) + first

    def there(ids: IntArray) -> torch.Tensor:
        return torch.from_numpy(ids).to(place.memory)

    def move(first: int) -> Callable[[], object]:
        sources, targets = map(there, pairs(first))
        return partial(
            triton_kernels.copy_units,
            arena.bytes,
            0,
            unit_bytes,
            sources,
            targets,
            segments=whole,
            scratch=scratch,
        )

    def region(first: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = arena.bytes[first * unit_bytes :][: 2 * PAGES_BYTES]
        return both[:PAGES_BYTES], both[PAGES_BYTES:]

    def overlapping(first: int) -> Callable[[], object]:
        block = np.arange(count) + first
        return partial(device.copy_units, device.schedule_stream, grid, block + max(1, count // 8), block)

    prepare: dict[str, Callable[[int], Callable[[], object]]] = {
        "move": move,
        "copy": lambda first: partial(torch.Tensor.copy_, *region(first)),
        "zero": lambda first: partial(
            triton_kernels.zero_units, arena.bytes, 0, unit_bytes, there(pairs(first)[1])
        ),
        "fill": lambda first: region(first)[0].zero_,
        "overlapping": overlapping,
    }
    samples: dict[str, list[float]] = {name: [] for name in (*prepare, "host")}
    for _ in range(SAMPLES + 2):
        for name, work_on in prepare.items():
            with device.on_stream(device.schedule_stream):
                work = work_on(next(regions) * 2 * count)
                samples[name].append(milliseconds(work))
        sources, targets = pairs(next(regions) * 2 * count)
        begun = time.perf_counter()
        device.copy_units(device.schedule_stream, grid, sources, targets)
        samples["host"].append((time.perf_counter() - begun) * 1e3)
        torch.cuda.synchronize()
    median = {name: statistics.median(values[2:]) for name, values in samples.items()}
    rate = {name: PAGES_BYTES / value / 1e6 for name, value in median.items()}
    return Rates(
        rate["move"],
        rate["copy"],
        rate["overlapping"],
        rate["zero"],
        rate["fill"],
        median["host"] * 1e3,
    )


# --- a forward beside moves -------------------------------------------------------------------------------------------

FORWARDS = {"decode (reads weights)": (64, 8, 24), "prefill (computes)": (8192, 1, 4)}
"""By what bounds it: rows of the batch, weights of 512 MiB each, and products. Few and long, so that launches cost nothing."""

WIDTH = 16384
MOVED_UNIT_BYTES, MOVED_BYTES = 32 << 10, 1 << 30
MOST_MOVES = 200
START_CYCLES = 200_000_000
"""For how long both streams wait, a tenth of a second, while the host queues a forward and the moves beside it."""


@attrs.frozen
class Beside:
    """What one measurement of a forward beside moves found, in milliseconds."""

    forward: float
    moves: tuple[float, ...]
    """From the forward's start to each move's end."""


def slowdown(place: Place, what: str) -> str:
    """How much longer a forward takes while pages move, and how fast they do, in words.

    Raises `AssertionError` unless moves went on for as long as the forward takes alone: it would have run beside nothing.
    """
    rows, weight_count, products = FORWARDS[what]
    arena = KVArena.allocate(4 * MOVED_BYTES, place.memory)
    device = CUDADevice(arena)
    grid, count = UnitGrid(0, MOVED_UNIT_BYTES), MOVED_BYTES // MOVED_UNIT_BYTES
    device.prewarm([grid])
    draw = np.random.default_rng(3)
    moves = [
        (draw.permutation(count) + (2 * half + 1) * count, draw.permutation(count) + 2 * half * count)
        for half in (0, 1)
    ]
    weights = [
        torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=place.memory) for _ in range(weight_count)
    ]
    batch = torch.randn(rows, WIDTH, dtype=torch.bfloat16, device=place.memory)
    output = torch.empty_like(batch)
    torch.cuda.synchronize()

    def forward() -> None:
        for product in range(products):
            torch.mm(batch, weights[product % weight_count], out=output)

    def measured(move_count: int, forwards: bool = True) -> Beside:
        start, end = timing_event(), timing_event()
        with device.on_stream(device.schedule_stream):
            sleep(START_CYCLES)
        begin = device.record_event(device.schedule_stream)
        device.wait_event(device.forward_stream, begin)
        with device.on_stream(device.forward_stream):
            start.record()
            if forwards:
                forward()
            end.record()
        ends = []
        for move in range(move_count):
            device.copy_units(device.schedule_stream, grid, *moves[move % 2])
            ends.append(timing_event())
            with device.on_stream(device.schedule_stream):
                ends[-1].record()
        torch.cuda.synchronize()
        return Beside(start.elapsed_time(end), tuple(start.elapsed_time(each) for each in ends))

    measured(2)
    alone = statistics.median(measured(0).forward for _ in range(5))
    moves_alone = measured(20, forwards=False).moves
    move_ms = (moves_alone[-1] - moves_alone[0]) / (len(moves_alone) - 1)
    # Twice as many as fit beside a forward that is not slowed down.
    move_count = math.ceil(2 * alone / move_ms) + 1
    assert move_count <= MOST_MOVES, (
        f"a move takes {move_ms:.2f} ms, a forward {alone:.1f}: too many to queue at once"
    )
    measured(move_count)
    found = [measured(move_count) for _ in range(5)]
    beside, lasted = (
        statistics.median(times)
        for times in ([each.forward for each in found], [each.moves[-1] for each in found])
    )
    for each in found:
        assert each.moves[-1] > alone, (
            f"{move_count} moves ended after {each.moves[-1]:.1f} ms, before the forward"
        )
    if any(each.moves[0] >= each.forward for each in found):
        return (
            f"alone {alone:.1f} ms, queued beside moves {beside:.1f} ms, and over before the first of them was: the GPU gave the "
            "forward everything, and it ran beside nothing"
        )
    during = statistics.median(
        sum(end <= each.forward for end in each.moves) / each.forward for each in found
    )
    return (
        f"alone {alone:.1f} ms, beside {lasted:.1f} ms of moves {beside:.1f} ms: {beside / alone:.2f} times; "
        f"pages meanwhile {during * MOVED_BYTES / 1e6:.0f} GB/s, alone {MOVED_BYTES / move_ms / 1e6:.0f} GB/s"
    )
