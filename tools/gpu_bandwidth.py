"""How fast pages move and are zeroed on a GPU, beside a plain device copy and fill in the same run."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import attrs
import numpy as np
import torch

from gpu_place import SCRATCH_BYTES, Place, keep_busy
from kvtide.arena import CUDADevice, KVArena
from kvtide.arena.copy_plan import CopySegment
from kvtide.device import UnitGrid

PAGES_BYTES = 64 << 20
REGIONS = 16
"""Each sample works on other bytes, so that none finds its own in the cache."""

SAMPLES = 15
HEAD_START_CYCLES = 20_000_000
"""The GPU is kept busy this long while the host queues what is timed."""

MOVES_BESIDE = 800
START_CYCLES = 400_000_000
"""For how long the GPU waits while the host queues a forward and the moves beside it."""

UNIT_BYTES = [2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 16 << 20]


@attrs.frozen
class Rates:
    """Medians for one size of unit; GB/s of bytes moved or zeroed, each counted once."""

    unit_bytes: int
    move: float
    copy: float
    overlapping: float
    """A block that moves over itself by an eighth, as the device runs it."""

    zero: float
    fill: float
    host_us: float
    """Time that the host spends in one call that moves them."""


def milliseconds(work: Callable[[], object]) -> float:
    """GPU time of work on the current stream."""
    keep_busy(HEAD_START_CYCLES)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # as torch has it
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
    device = CUDADevice(arena, scratch_bytes=SCRATCH_BYTES)
    grid, count = UnitGrid(0, unit_bytes), PAGES_BYTES // unit_bytes
    device.prewarm([grid], staged_units=count)
    draw = np.random.default_rng(2)
    whole = [CopySegment(0, count, through_scratch=False)]
    scratch = torch.empty(2, dtype=torch.int64, device=place.memory)
    samples: dict[str, list[float]] = {
        name: [] for name in ("move", "copy", "overlapping", "zero", "fill", "host")
    }
    for sample in range(SAMPLES + 2):
        first = sample % REGIONS * 2 * count
        sources, targets = draw.permutation(count) + first + count, draw.permutation(count) + first
        block = np.arange(count) + first
        with torch.cuda.stream(device.schedule_stream.torch_stream):
            ids = [torch.from_numpy(each).to(place.memory) for each in (sources, targets)]
            region = arena.bytes[first * unit_bytes :][: 2 * PAGES_BYTES]
            move = partial(triton_kernels.copy_units, segments=whole, scratch=scratch)
            overlapping = partial(device.copy_units, device.schedule_stream, grid)
            times = {
                "move": milliseconds(partial(move, arena.bytes, 0, unit_bytes, *ids)),
                "copy": milliseconds(partial(region[:PAGES_BYTES].copy_, region[PAGES_BYTES:])),
                "zero": milliseconds(partial(triton_kernels.zero_units, arena.bytes, 0, unit_bytes, ids[1])),
                "fill": milliseconds(region[:PAGES_BYTES].zero_),
                "overlapping": milliseconds(partial(overlapping, block + max(1, count // 8), block)),
            }
        begun = time.perf_counter()
        device.copy_units(device.schedule_stream, grid, sources, targets)
        times["host"] = (time.perf_counter() - begun) * 1e3
        torch.cuda.synchronize()
        if sample >= 2:
            for name, value in times.items():
                samples[name].append(value)
    median = {name: statistics.median(values) for name, values in samples.items()}
    rate = {name: PAGES_BYTES / value / 1e6 for name, value in median.items()}
    return Rates(
        unit_bytes,
        rate["move"],
        rate["copy"],
        rate["overlapping"],
        rate["zero"],
        rate["fill"],
        median["host"] * 1e3,
    )


def slowdown(place: Place) -> str:
    """How much longer a forward takes while moves keep the schedule stream busy, in words."""
    arena = KVArena.allocate(2 * REGIONS * PAGES_BYTES, place.memory)
    device = CUDADevice(arena, scratch_bytes=SCRATCH_BYTES)
    grid, count = UnitGrid(0, 32 << 10), PAGES_BYTES // (32 << 10)
    device.prewarm([grid], staging_buffers=MOVES_BESIDE, staged_units=count)
    draw = np.random.default_rng(3)
    firsts = [region * 2 * count for region in range(REGIONS)]
    pairs = [(draw.permutation(count) + first + count, draw.permutation(count) + first) for first in firsts]
    weights = torch.randn(8192, 8192, dtype=torch.bfloat16, device=place.memory)
    batch = torch.randn(256, 8192, dtype=torch.bfloat16, device=place.memory)
    torch.cuda.synchronize()

    def forward() -> None:
        hidden = batch
        for _ in range(100):
            hidden = (hidden @ weights).tanh()

    def timed(move_count: int) -> float:
        with torch.cuda.stream(device.schedule_stream.torch_stream):
            # Both streams start together, once everything is queued.
            keep_busy(START_CYCLES)
        begin = device.record_event(device.schedule_stream)
        for move in range(move_count):
            device.copy_units(device.schedule_stream, grid, *pairs[move % REGIONS])
        last_move = device.record_event(device.schedule_stream)
        device.wait_event(device.forward_stream, begin)
        with torch.cuda.stream(device.forward_stream.torch_stream):
            result = milliseconds(forward)
        assert not move_count or not device.query_event(last_move), "the moves ended before the forward"
        torch.cuda.synchronize()
        return result

    timed(0)
    alone, beside = (statistics.median(timed(moves) for _ in range(5)) for moves in (0, MOVES_BESIDE))
    return (
        f"alone {alone:.2f} ms, beside 64 MiB moves back to back {beside:.2f} ms: {beside / alone:.2f} times"
    )
