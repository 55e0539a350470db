"""What the chain costs a scheduler on the host: decode steps, prefill takes and frees, a churn of requests.

Prints a markdown table of medians in µs of thread CPU time, on one core, each beside a bare floor: the NumPy calls that the same
work needs over stacks of pages, with no virtual ids, no checks and no ledger. Zeroing and uploads are counted apart: the device
does no work, and mirrors take notes only in the rows that say so. `--profile` prints where the time of a decode step goes.
"""

import argparse
import cProfile
import gc
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from kvtide.chain import BandTake, ChainAllocator, Taken
from kvtide.device import ImmediateEvent, IntArray, Mirror, NumpyDevice, Stream, UnitGrid
from kvtide.ledger import ForwardSteps, LaunchRecord
from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MHAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    lay_out,
    plan_kv_storage,
)

WINDOW, SLOTS = 128, 1_085_069
"""Tokens a window sees, and tokens that the pools hold: 40 GB of gpt-oss-120b."""
REQUESTS, CONTEXT = 256, 16_384
NO_UNITS: IntArray = np.empty(0, np.int64)


class QuietMirror:
    """A mirror that takes no notes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def stage(self, indices: IntArray, values: IntArray) -> None:
        """Nothing is noted."""


class QuietDevice(NumpyDevice):
    """A device that does nothing; its mirrors take notes only if they are asked to."""

    def __init__(self, arena_bytes: int, *, takes_notes: bool) -> None:
        super().__init__(arena_bytes, byte_work=False)
        self._takes_notes = takes_notes

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """Mirrors with or without notes."""
        if self._takes_notes:
            return super().create_mirrors(lengths)
        return {name: QuietMirror(length) for name, length in lengths.items()}

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """Counted apart."""


class Ours:
    """A scheduler over the chain: rows of virtual pages, window retirement page by page, a forward in flight if asked."""

    def __init__(self, page_tokens: int, windows: tuple[int, ...] = (WINDOW,), *, state: bool = False, takes_notes: bool = False) -> None:
        part = MHAGeometry(kv_heads=8, key_dim=64, value_dim=64, dtype=DType.BFLOAT16)
        lifetimes = [FullLifetime(), *map(WindowLifetime, windows)]
        layers = [KVLayerDecl(layer, (KVPart(part, lifetime),)) for layer, lifetime in enumerate(lifetimes)]
        if state:
            tensor = TensorDecl("state", (8192,), DType.FLOAT32)
            layers.append(KVLayerDecl(len(layers), (KVPart(StateGeometry((tensor,)), StateLifetime()),)))
        plan = plan_kv_storage(layers, page_tokens=page_tokens)
        arena_bytes = SLOTS * 2048 * (1 + len(windows))
        layout = lay_out(plan, arena_bytes)
        self.device = QuietDevice(arena_bytes, takes_notes=takes_notes)
        rows = REQUESTS + 1
        self.columns = -(-CONTEXT // page_tokens)
        lengths = {f"ids:{band.name}": layout.id_count(band) for band in layout.bands} | {"rows": rows * self.columns}
        mirrors = self.device.create_mirrors(lengths)
        self.chain = ChainAllocator(layout, self.device, mirrors, ForwardSteps())
        self.mirror = mirrors["rows"]
        self.page_tokens = page_tokens
        self.windows = [(f"window-{window}", window) for window in windows]
        self.table = np.zeros((rows, self.columns), np.int32)
        self.lengths = np.zeros(rows, np.int64)
        self.first_held = {name: np.zeros(rows, np.int64) for name, _ in self.windows}
        self.free_rows = list(range(rows))[::-1]
        self.all_written = {band.name: BandTake(unwritten=NO_UNITS) for band in layout.bands}
        self.in_flight: tuple[LaunchRecord, ImmediateEvent] | None = None

    def admit(self, length: int) -> int:
        """A row with `length` tokens of prompt, written whole."""
        pages = -(-length // self.page_tokens)
        last = np.array([pages - 1]) if length % self.page_tokens else NO_UNITS
        taken = self.chain.take(pages=pages, bands={name: BandTake(unwritten=last) for name in self.all_written})
        assert isinstance(taken, Taken), taken
        self.chain.written(taken)
        row = self.free_rows.pop()
        self.table[row, :pages] = taken.pages
        self.mirror.stage(np.arange(row * self.columns, row * self.columns + pages), taken.pages)
        self.lengths[row] = length
        return row

    def decode(self, rows: IntArray) -> None:
        """One token for each row; window pages that fell out are freed."""
        page_tokens = self.page_tokens
        lengths = self.lengths[rows]
        columns, offsets = (lengths, None) if page_tokens == 1 else (lengths // page_tokens, lengths % page_tokens)
        new_rows, new_columns = rows, columns
        if offsets is not None:
            starts_page = offsets == 0
            new_rows, new_columns = rows[starts_page], columns[starts_page]
        if len(new_rows):
            taken = self.chain.take(pages=len(new_rows), bands=self.all_written if page_tokens == 1 else None)
            assert isinstance(taken, Taken), taken
            self.chain.written(taken)
            self.table[new_rows, new_columns] = taken.pages
            self.mirror.stage(new_rows * self.columns + new_columns, taken.pages)
        lengths += 1
        self.lengths[rows] = lengths
        for name, window in self.windows:
            self._retire(name, rows, np.maximum(lengths - window, 0) // page_tokens)

    def _retire(self, name: str, rows: IntArray, ends: IntArray) -> None:
        first = self.first_held[name][rows]
        fell_out = ends > first
        if not fell_out.any():
            return
        rows, first, ends = rows[fell_out], first[fell_out], ends[fell_out]
        counts = ends - first
        if int(counts.max()) == 1:
            virtual = self.table[rows, first].astype(np.int64)
        else:
            of_row = np.repeat(rows, counts)
            columns = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts - first, counts)
            virtual = self.table[of_row, columns].astype(np.int64)
        self.chain.free_pages(name, virtual)
        self.first_held[name][rows] = ends

    def finish(self, row: int) -> None:
        """Free what a row holds."""
        pages = -(-int(self.lengths[row]) // self.page_tokens)
        for name, _ in self.windows:
            self.chain.free_pages(name, self.table[row, int(self.first_held[name][row]) : pages].astype(np.int64))
            self.first_held[name][row] = 0
        self.chain.free_pages("full", self.table[row, :pages].astype(np.int64))
        self.free_rows.append(row)

    def overlapped(self, rows: IntArray) -> None:
        """A decode step under the forward before it: launched, recorded with what it writes, the one before processed."""
        self.decode(rows)
        steps = self.chain.steps
        record = steps.forward_launched()
        event = self.device.record_event(self.device.forward_stream)
        last = (self.lengths[rows] - 1) // self.page_tokens
        pages = self.table[rows, last].astype(np.int64)
        self.chain.forward_recorded(
            steps.forward_recorded(record, event), {"full": pages} | {name: pages for name, _ in self.windows}
        )
        before, self.in_flight = self.in_flight, (record, event)
        if before is not None:
            steps.host_synchronised(before[1])
            steps.forward_processed(before[0])
            self.chain.forward_processed(before[0].forward)

    def upload(self) -> None:
        """Bring the mirrors up to date, where they take notes."""
        self.device.upload(self.device.schedule_stream)


class Floor:
    """The bare calls of the same work: a stack of pages and a table a pool."""

    def __init__(self, page_tokens: int, pool_count: int = 2) -> None:
        self.page_tokens = page_tokens
        self.stacks = [np.arange(SLOTS // page_tokens, dtype=np.int32) for _ in range(pool_count)]
        self.tops = [SLOTS // page_tokens] * pool_count
        columns = -(-CONTEXT // page_tokens)
        self.tables = [np.zeros((REQUESTS + 1, columns), np.int32) for _ in range(pool_count)]
        self.lengths = np.zeros(REQUESTS + 1, np.int64)
        self.first_held = np.zeros((pool_count, REQUESTS + 1), np.int64)
        self.free_rows = list(range(REQUESTS + 1))[::-1]

    def _take(self, pool: int, count: int) -> np.ndarray:
        self.tops[pool] -= count
        return self.stacks[pool][self.tops[pool] : self.tops[pool] + count]

    def _put(self, pool: int, pages: np.ndarray) -> None:
        top = self.tops[pool]
        self.stacks[pool][top : top + pages.size] = pages
        self.tops[pool] = top + pages.size

    def admit(self, length: int) -> int:
        """As `Ours.admit`."""
        row, pages = self.free_rows.pop(), -(-length // self.page_tokens)
        for pool, table in enumerate(self.tables):
            table[row, :pages] = self._take(pool, pages)
        self.lengths[row] = length
        return row

    def decode(self, rows: IntArray) -> None:
        """As `Ours.decode`."""
        lengths = self.lengths[rows]
        columns = lengths // self.page_tokens
        new_rows, new_columns = rows, columns
        if self.page_tokens > 1:
            starts_page = lengths % self.page_tokens == 0
            new_rows, new_columns = rows[starts_page], columns[starts_page]
        if new_rows.size:
            for pool, table in enumerate(self.tables):
                table[new_rows, new_columns] = self._take(pool, new_rows.size)
        lengths += 1
        self.lengths[rows] = lengths
        ends = (lengths - WINDOW) // self.page_tokens
        for pool in range(1, len(self.tables)):
            fell_out = ends > self.first_held[pool][rows]
            if fell_out.any():
                retiring = rows[fell_out]
                self._put(pool, self.tables[pool][retiring, self.first_held[pool][retiring]])
                self.first_held[pool][retiring] += 1

    def finish(self, row: int) -> None:
        """As `Ours.finish`."""
        pages = -(-int(self.lengths[row]) // self.page_tokens)
        for pool, table in enumerate(self.tables):
            self._put(pool, table[row, int(self.first_held[pool][row]) : pages])
            self.first_held[pool][row] = 0
        self.free_rows.append(row)


def fragment(ours: Ours) -> list[int]:
    """Fill nine tenths of the arena with requests, and free half of their pages at random; the rows that are left."""
    draw = np.random.default_rng(5)
    page_tokens = ours.page_tokens
    pages = int(SLOTS * 0.9) // page_tokens
    taken = ours.chain.take(pages=pages, bands={name: BandTake(unwritten=NO_UNITS) for name in ours.all_written})
    assert isinstance(taken, Taken), taken
    ours.chain.written(taken)
    given_up = draw.permutation(taken.pages)[: pages // 2]
    for name, _ in ours.windows:
        ours.chain.free_pages(name, given_up)
    ours.chain.free_pages("full", given_up)
    return []


def running(books: Ours | Floor) -> IntArray:
    """256 requests of 400 to 1,200 tokens, decoded until their windows are full."""
    lengths = np.random.default_rng(0).integers(400, 1200, REQUESTS).tolist()
    rows = np.array([books.admit(length) for length in lengths])
    for _ in range(max(WINDOW, 2 * books.page_tokens) + 8):
        books.decode(rows)
    return rows


def timed(action: Callable[[], object], count: int) -> float:
    """µs of thread CPU time a call."""
    before = time.thread_time_ns()
    for _ in range(count):
        action()
    return (time.thread_time_ns() - before) / count / 1000


def decode_figures(page_tokens: int) -> dict[str, float]:
    """Medians of a decode step."""
    floor, plain, noted, three, broken, flying = (
        Floor(page_tokens),
        Ours(page_tokens),
        Ours(page_tokens, takes_notes=True),
        Ours(page_tokens, (WINDOW, 1024)),
        Ours(page_tokens),
        Ours(page_tokens),
    )
    fragment(broken)
    rows = {id(each): running(each) for each in (floor, plain, noted, three, broken, flying)}

    steps = {
        "floor": lambda: floor.decode(rows[id(floor)]),
        "decode": lambda: plain.decode(rows[id(plain)]),
        "fragmented": lambda: broken.decode(rows[id(broken)]),
        "three bands": lambda: three.decode(rows[id(three)]),
        "with mirror notes": lambda: noted.decode(rows[id(noted)]),
        "with the ledger": lambda: flying.overlapped(rows[id(flying)]),
    }
    samples: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.freeze()
    for _ in range(9):
        for name, step in steps.items():
            samples[name].append(timed(step, 64))
        noted.upload()
    return {name: statistics.median(found) for name, found in samples.items()}


def prefill_figures(page_tokens: int, *, fragmented: bool) -> dict[str, float]:
    """Medians of a take of 8,192 tokens and of its free."""
    floor, ours = Floor(page_tokens), Ours(page_tokens)
    if fragmented:
        fragment(ours)
    samples: dict[str, list[float]] = {"floor take": [], "floor free": [], "take": [], "free": []}
    for _ in range(31):
        for prefix, books in (("floor ", floor), ("", ours)):
            before = time.thread_time_ns()
            row = books.admit(8192)
            between = time.thread_time_ns()
            books.finish(row)
            samples[prefix + "take"].append((between - before) / 1000)
            samples[prefix + "free"].append((time.thread_time_ns() - between) / 1000)
    return {name: statistics.median(found) for name, found in samples.items()}


def churn_figures(page_tokens: int) -> dict[str, float]:
    """µs a generated token of 2,000 log-normal requests, 256 running, the ledger included for ours."""
    draw = np.random.default_rng(1)
    prompts = np.clip(draw.lognormal(np.log(512), 1.0, 2000), 16, 8192).astype(int).tolist()
    outputs = np.clip(draw.lognormal(np.log(160), 0.8, 2000), 8, 1024).astype(int).tolist()
    found = {}
    for name, books in (("floor", Floor(page_tokens)), ("ours", Ours(page_tokens))):
        step = books.overlapped if isinstance(books, Ours) else books.decode
        waiting = list(range(2000))[::-1]
        left: dict[int, int] = {}
        spent = 0
        while waiting or left:
            before = time.thread_time_ns()
            while waiting and len(left) < REQUESTS:
                request = waiting.pop()
                left[books.admit(prompts[request])] = outputs[request]
            rows = np.fromiter(left, np.int64, len(left))
            step(rows)
            spent += time.thread_time_ns() - before
            for row in list(left):
                left[row] -= 1
                if not left[row]:
                    del left[row]
                    before = time.thread_time_ns()
                    books.finish(row)
                    spent += time.thread_time_ns() - before
        found[name] = spent / sum(outputs) / 1000
        if isinstance(books, Ours):
            statistics_ = books.chain.statistics()
            written = 2048 * (1 + len(books.windows)) * (sum(prompts) + sum(outputs))
            found["bytes zeroed per byte of KV"] = statistics_.zeroed_bytes / written
            found["bytes moved per byte of KV"] = statistics_.moved_bytes / written
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", type=int, metavar="PAGE", help="print where the time of a decode step goes")
    parser.add_argument("--only", choices=("decode", "prefill", "churn"), help="one of the three")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if arguments.profile:
        ours = Ours(arguments.profile)
        rows = running(ours)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(5000):
            ours.decode(rows)
            if int(ours.lengths[rows].max()) > CONTEXT - 2:
                break
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(22)
        return
    print(f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}; µs of thread CPU time\n")
    sizes = (1, 16, 64)
    rows: dict[str, list[str]] = {}
    if arguments.only in (None, "decode"):
        for size in sizes:
            for name, value in decode_figures(size).items():
                rows.setdefault(f"decode step: {name}", []).append(f"{value:.0f}")
    if arguments.only in (None, "prefill"):
        for fragmented in (False, True):
            for size in sizes:
                for name, value in prefill_figures(size, fragmented=fragmented).items():
                    where = ", fragmented" if fragmented and "floor" not in name else ""
                    if not (fragmented and "floor" in name):
                        rows.setdefault(f"8,192 tokens: {name}{where}", []).append(f"{value:.0f}")
    if arguments.only in (None, "churn"):
        for size in sizes:
            for name, value in churn_figures(size).items():
                rows.setdefault(f"churn: {name}", []).append(f"{value:.2f}")
    print("| | page 1 | 16 | 64 |\n| - | - | - | - |")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
