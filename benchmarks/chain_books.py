"""Ours and the floor as books of the common workload: a scheduler's rows over the chain, and over bare stacks of pages.

Neither zeroes, moves or uploads a byte: the device does no work, and mirrors take notes only if they are asked to. What the
calls for it cost on the host is counted, and so are the units that they name.
"""

import time
from collections.abc import Mapping

import numpy as np
from models import Model
from workload import CONTEXT_TOKENS, POOL_TOKENS, REQUESTS, WINDOW_TOKENS, IntArray, Shape

from kvtide.chain import BandTake, ChainAllocator, Taken
from kvtide.device import ImmediateEvent, Mirror, NumpyDevice, Stream, UnitGrid
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

NO_UNITS: IntArray = np.empty(0, np.int64)
ENTRY_BYTES = 2048
"""What a token writes in a layer of 8 heads of 64."""


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
        """Counted by the chain."""

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """Counted by the chain."""


def small_model(shape: Shape, windows: tuple[int, ...] = (WINDOW_TOKENS,)) -> list[KVLayerDecl]:
    """One layer of each kind."""
    part = MHAGeometry(kv_heads=8, key_dim=64, value_dim=64, dtype=DType.BFLOAT16)
    lifetimes = [FullLifetime(), *(map(WindowLifetime, windows) if shape is not Shape.STATE else ())]
    layers = [KVLayerDecl(layer, (KVPart(part, lifetime),)) for layer, lifetime in enumerate(lifetimes)]
    if shape is not Shape.WINDOW:
        tensor = TensorDecl("state", (8192,), DType.FLOAT32)
        layers.append(KVLayerDecl(len(layers), (KVPart(StateGeometry((tensor,)), StateLifetime()),)))
    return layers


def layers_of(model: Model) -> list[KVLayerDecl]:
    """A model of the comparison, its kinds one after another: what order layers have changes no byte."""
    part = MHAGeometry(
        kv_heads=model.kv_heads, key_dim=model.head_dim, value_dim=model.head_dim, dtype=DType.BFLOAT16
    )
    parts = [KVPart(part, FullLifetime())] * model.full_layers
    if model.window_layers:
        parts += [KVPart(part, WindowLifetime(model.window_tokens))] * model.window_layers
    if model.state_layers:
        tensors = (
            TensorDecl("conv", model.conv_shape, DType.BFLOAT16),
            TensorDecl("recurrent", model.recurrent_shape, DType.FLOAT32),
        )
        parts += [KVPart(StateGeometry(tensors), StateLifetime())] * model.state_layers
    return [KVLayerDecl(layer, (part,)) for layer, part in enumerate(parts)]


class Ours:
    """A scheduler over the chain: rows of virtual pages, windows retired page by page, a forward in flight if asked."""

    def __init__(
        self,
        layers: list[KVLayerDecl],
        page_tokens: int,
        *,
        arena_bytes: int = POOL_TOKENS * ENTRY_BYTES,
        rows: int = REQUESTS + 1,
        context_tokens: int = CONTEXT_TOKENS,
        takes_notes: bool = False,
        overlap: bool = False,
        tails_only: bool = False,
    ) -> None:
        """With `overlap`, each decode step is launched and recorded, and the one before it processed; with `tails_only`, a prompt
        binds only the window pages that its next token reads.
        """
        plan = plan_kv_storage(layers, page_tokens=page_tokens)
        layout = lay_out(plan, arena_bytes)
        self.device = QuietDevice(arena_bytes, takes_notes=takes_notes)
        self.columns = -(-context_tokens // page_tokens)
        lengths = {f"ids:{band.name}": layout.id_count(band) for band in layout.bands}
        mirrors = self.device.create_mirrors(lengths | {"rows": rows * self.columns})
        self.chain = ChainAllocator(layout, self.device, mirrors, ForwardSteps())
        self.mirror = mirrors["rows"]
        self.page_tokens = page_tokens
        self.windows = [
            (pool.name, pool.window_tokens) for pool in plan.sub_pools if pool.window_tokens is not None
        ]
        self.has_state = plan.state_sub_pool is not None
        self.token_bytes = sum(pool.payload_bytes_per_token for pool in plan.token_sub_pools)
        self.table = np.zeros((rows, self.columns), np.int32)
        self.lengths = np.zeros(rows, np.int64)
        self.state_slots = np.zeros(rows, np.int64)
        self.first_held = {name: np.zeros(rows, np.int64) for name, _ in self.windows}
        self.free_rows = list(range(rows))[::-1]
        self.all_written = {
            pool.name: BandTake(unwritten=NO_UNITS) for pool in plan.sub_pools if pool.page_tokens is not None
        }
        self.in_flight: tuple[LaunchRecord, ImmediateEvent] | None = None
        self.overlap = overlap
        self.tails_only = tails_only
        self.spent_ns = 0

    @property
    def zeroed_bytes(self) -> int:
        """See `Books`."""
        return self.chain.statistics().zeroed_bytes

    @property
    def moved_bytes(self) -> int:
        """See `Books`."""
        return self.chain.statistics().moved_bytes

    def prompt_units(self, prompt_tokens: int) -> dict[str, int]:
        """Units of each band that `admit` takes for a prompt."""
        pages = -(-prompt_tokens // self.page_tokens)
        units = dict.fromkeys(self.all_written, pages)
        if self.tails_only:
            for name, window in self.windows:
                units[name] -= self._first_read(prompt_tokens, window)
        return units | ({"state": 1} if self.has_state else {})

    def admit(self, prompt_tokens: int) -> int:
        """See `Books`; the prompt is written whole, so at most its last page is zeroed."""
        before = time.thread_time_ns()
        pages = -(-prompt_tokens // self.page_tokens)
        last = np.array([pages - 1]) if prompt_tokens % self.page_tokens else NO_UNITS
        bands = dict.fromkeys(self.all_written, BandTake(unwritten=last))
        row = self.free_rows.pop()
        if self.tails_only:
            for name, window in self.windows:
                first = self._first_read(prompt_tokens, window)
                self.first_held[name][row] = first
                bands[name] = BandTake(fresh=np.arange(first, pages), unwritten=last - first)
        taken = self.chain.take(pages=pages, state_slots=int(self.has_state), bands=bands)
        assert isinstance(taken, Taken), taken
        self.chain.written(taken)
        if self.has_state:
            self.state_slots[row] = taken.state_slots[0]
        self.table[row, :pages] = taken.pages
        self.mirror.stage(np.arange(row * self.columns, row * self.columns + pages), taken.pages)
        self.lengths[row] = prompt_tokens
        self.spent_ns += time.thread_time_ns() - before
        return row

    def decode(self, rows: IntArray) -> None:
        """See `Books`."""
        before = time.thread_time_ns()
        self._decode(rows)
        if self.overlap:
            self._launch_and_process(rows)
        self.spent_ns += time.thread_time_ns() - before

    def finish(self, row: int) -> None:
        """See `Books`."""
        before = time.thread_time_ns()
        pages = -(-int(self.lengths[row]) // self.page_tokens)
        for name, _ in self.windows:
            self.chain.free_pages(
                name, self.table[row, int(self.first_held[name][row]) : pages].astype(np.int64)
            )
            self.first_held[name][row] = 0
        self.chain.free_pages("full", self.table[row, :pages].astype(np.int64))
        if self.has_state:
            self.chain.free_state_slots(self.state_slots[row : row + 1].copy())
        self.free_rows.append(row)
        self.spent_ns += time.thread_time_ns() - before

    def fragment(self) -> None:
        """See `Books`."""
        draw = np.random.default_rng(5)
        pages = int(self.chain.layout.arena_bytes * 0.8) // (self.token_bytes * self.page_tokens)
        taken = self.chain.take(pages=pages, bands=self.all_written)
        assert isinstance(taken, Taken), taken
        self.chain.written(taken)
        given_up = draw.permutation(taken.pages)[: pages // 2]
        for name, _ in self.windows:
            self.chain.free_pages(name, given_up)
        self.chain.free_pages("full", given_up)

    def upload(self) -> None:
        """Bring the mirrors up to date, where they take notes."""
        self.device.upload(self.device.schedule_stream)

    def _first_read(self, prompt_tokens: int, window: int) -> int:
        """First window page that the token behind a prompt reads."""
        return max(0, prompt_tokens + 1 - window) // self.page_tokens

    def _decode(self, rows: IntArray) -> None:
        page_tokens = self.page_tokens
        lengths = self.lengths[rows]
        columns, offsets = (
            (lengths, None) if page_tokens == 1 else (lengths // page_tokens, lengths % page_tokens)
        )
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

    def _launch_and_process(self, rows: IntArray) -> None:
        """Launch a forward and record what it writes; process the one before it."""
        steps = self.chain.steps
        record = steps.forward_launched()
        event = self.device.record_event(self.device.forward_stream)
        last = (self.lengths[rows] - 1) // self.page_tokens
        pages = self.table[rows, last].astype(np.int64)
        self.chain.forward_recorded(
            steps.forward_recorded(record, event), dict.fromkeys(self.all_written, pages)
        )
        before, self.in_flight = self.in_flight, (record, event)
        if before is not None:
            steps.host_synchronised(before[1])
            steps.forward_processed(before[0])
            self.chain.forward_processed(before[0].forward)


class Floor:
    """The bare calls of the same work: a stack of pages and a table a pool. No ids, no checks, no refusals."""

    zeroed_bytes = moved_bytes = 0
    token_bytes = 1

    def __init__(self, page_tokens: int, pool_count: int = 2) -> None:
        self.page_tokens = page_tokens
        self.stacks = [np.arange(POOL_TOKENS // page_tokens, dtype=np.int32) for _ in range(pool_count)]
        self.tops = [POOL_TOKENS // page_tokens] * pool_count
        columns = -(-CONTEXT_TOKENS // page_tokens)
        self.tables = [np.zeros((REQUESTS + 1, columns), np.int32) for _ in range(pool_count)]
        self.lengths = np.zeros(REQUESTS + 1, np.int64)
        self.first_held = np.zeros((pool_count, REQUESTS + 1), np.int64)
        self.free_rows = list(range(REQUESTS + 1))[::-1]
        self.spent_ns = 0

    def admit(self, prompt_tokens: int) -> int:
        """See `Books`."""
        before = time.thread_time_ns()
        row, pages = self.free_rows.pop(), -(-prompt_tokens // self.page_tokens)
        for pool, table in enumerate(self.tables):
            table[row, :pages] = self._take(pool, pages)
        self.lengths[row] = prompt_tokens
        self.spent_ns += time.thread_time_ns() - before
        return row

    def decode(self, rows: IntArray) -> None:
        """See `Books`."""
        before = time.thread_time_ns()
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
        ends = np.maximum(lengths - WINDOW_TOKENS, 0) // self.page_tokens
        for pool in range(1, len(self.tables)):
            first = self.first_held[pool][rows]
            fell_out = ends > first
            if fell_out.any():
                self._retire(pool, rows[fell_out], first[fell_out], ends[fell_out])
        self.spent_ns += time.thread_time_ns() - before

    def finish(self, row: int) -> None:
        """See `Books`."""
        before = time.thread_time_ns()
        pages = -(-int(self.lengths[row]) // self.page_tokens)
        for pool, table in enumerate(self.tables):
            self._put(pool, table[row, int(self.first_held[pool][row]) : pages])
            self.first_held[pool][row] = 0
        self.free_rows.append(row)
        self.spent_ns += time.thread_time_ns() - before

    def fragment(self) -> None:
        """See `Books`: a stack whose pages lie in random order."""
        draw = np.random.default_rng(5)
        for stack in self.stacks:
            draw.shuffle(stack)

    def _take(self, pool: int, count: int) -> np.ndarray:
        self.tops[pool] -= count
        return self.stacks[pool][self.tops[pool] : self.tops[pool] + count]

    def _put(self, pool: int, pages: np.ndarray) -> None:
        top = self.tops[pool]
        self.stacks[pool][top : top + pages.size] = pages
        self.tops[pool] = top + pages.size

    def _retire(self, pool: int, rows: IntArray, first: IntArray, ends: IntArray) -> None:
        counts = ends - first
        table = self.tables[pool]
        if int(counts.max()) == 1:
            self._put(pool, table[rows, first])
        else:
            columns = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts - first, counts)
            self._put(pool, table[np.repeat(rows, counts), columns])
        self.first_held[pool][rows] = ends
