"""SGLang 0.5.23's allocators as books of the common workload: its unified pools, or its static ones.

Only public methods are called, in the order in which its scheduler does: pages of a prompt and the request table, out-of-window
segments once 128 tokens have gathered, a step's pages, the table again. Pools are as long as those of 40 GB of gpt-oss-120b; a token
takes 32 bytes a layer so that they fit. Zeroing and moving bytes are counted and not done. The two kernels that write token ids
on a GPU, a launch each, are a few lines of NumPy here. So a figure is host bookkeeping, on a CPU.
"""

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from stand_ins import use_peer
from workload import (
    CONTEXT_TOKENS,
    PAGE_SIZES,
    POOL_TOKENS,
    REQUESTS,
    WINDOW_TOKENS,
    Figure,
    IntArray,
    Shape,
    measure,
    print_figures,
    settle,
    thread_us,
)

EVICTION_TOKENS = 128
"""Its default: tokens that gather behind a window before they are freed."""
LAYER_TOKEN_BYTES = 32
BANDS = ("full_attn_allocator", "swa_attn_allocator")


class Sglang:
    """What is used of the peer, once imported."""

    def __init__(self, wheel: Path) -> None:
        use_peer("sglang", wheel)
        self.torch = importlib.import_module("torch")
        context = importlib.import_module("sglang.srt.runtime_context")
        context.reset_context()
        arguments = importlib.import_module("sglang.srt.server_args").ServerArgs(
            model_path="none", device="cpu"
        )
        arguments._mamba_cache_chunk_size = 64  # noqa: SLF001 – it would read it off a model
        context.publish(arguments, role="tokenizer")
        memory = "sglang.srt.mem_cache"
        self.common = importlib.import_module(f"{memory}.common")
        self.unified = importlib.import_module(f"{memory}.unified_memory_pool")
        self.static_swa = importlib.import_module(f"{memory}.allocator.swa").SWATokenToKVPoolAllocator
        self.static_tokens = importlib.import_module(f"{memory}.allocator.token").TokenToKVPoolAllocator
        self.state_slots = importlib.import_module(f"{memory}.allocator.mamba").MambaSlotAllocator
        paged: Any = importlib.import_module(f"{memory}.allocator.paged")
        self.static_pages = paged.PagedTokenToKVPoolAllocator
        sub_pool: Any = importlib.import_module(f"{memory}.allocator.unified_sub_pool")
        sub_pool.alloc_decode_kernel = _Launch(_decode_ids)
        sub_pool.alloc_extend_kernel = _Launch(_extend_ids)
        paged.alloc_decode_naive = lambda seq, last, free, out, page, _count: _decode_ids(
            seq, last, free, out, 0, page
        )
        paged.alloc_extend_naive = lambda pre, seq, last, free, out, page, _device: _extend_ids(
            pre, seq, last, free, out, 0, page
        )
        base = importlib.import_module(f"{memory}.base_swa_memory_pool").BaseSWAKVPool
        self._no_storage = _without_storage(base)

    def pools(
        self, shape: Shape, page_tokens: int, *, unified: bool, tokens: int = POOL_TOKENS
    ) -> tuple[Any, Any]:
        """Its allocator, and that of state slots where there is a state."""
        tokens = tokens // page_tokens * page_tokens
        return (
            self._unified(shape, page_tokens, tokens) if unified else self._static(shape, page_tokens, tokens)
        )

    def static_window_pools(self, full_tokens: int, window_tokens: int, page_tokens: int) -> Any:
        """Its static pair of pools, without bytes."""
        half, storage = self.torch.float16, self._no_storage()
        return self.static_swa(full_tokens, window_tokens, page_tokens, half, "cpu", storage, False)

    def _static(self, shape: Shape, page_tokens: int, tokens: int) -> tuple[Any, Any]:
        half = self.torch.float16
        if shape is Shape.WINDOW:
            # Its default split: eight window tokens to ten of full attention.
            full = int(tokens / 1.8) // page_tokens * page_tokens
            window = int(full * 0.8) // page_tokens * page_tokens
            return self.static_window_pools(full, window, page_tokens), None
        slots = self.state_slots(2048, "cpu")
        if page_tokens == 1:
            return self.static_tokens(tokens, half, "cpu", None, False), slots
        return self.static_pages(tokens, page_tokens, half, "cpu", None, False), slots

    def _unified(self, shape: Shape, page_tokens: int, tokens: int) -> tuple[Any, Any]:
        torch, width = self.torch, LAYER_TOKEN_BYTES // 4
        state = SimpleNamespace(
            shape=SimpleNamespace(conv=[(3, 8)], temporal=(1, 4, 8)),
            dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
            layers=[0],
        )
        common = {
            "device": "cpu", "kv_cache_dtype": torch.float16, "head_num": 1, "head_dim": width, "v_head_dim": width,
            "page_size": page_tokens, "start_layer": 0, "enable_memory_saver": False, "need_sort": False,
            "lazy_compaction": True, "end_layer": 2,
        }  # fmt: skip
        window = {
            "swa_head_num": 1, "swa_head_dim": width, "swa_v_head_dim": width,
            "swa_attention_layer_ids": [1], "full_attention_layer_ids": [0],
        }  # fmt: skip
        states = {
            "mamba_layer_ids": [0], "mamba2_cache_params": state, "max_mamba_cache_size": 2048, "max_num_reqs": 512,
            "model_context_len": CONTEXT_TOKENS, "extra_max_context_len": 4, "enable_mamba_extra_buffer": False,
            "enable_mamba_extra_buffer_lazy": False, "disable_overlap_schedule": True,
        }  # fmt: skip
        total_bytes = tokens * LAYER_TOKEN_BYTES
        if shape is Shape.WINDOW:
            made = self.unified.init_unified_swa_pools(**common, **window, total_bytes=total_bytes)
            return made.token_to_kv_pool_allocator, None
        if shape is Shape.STATE:
            made = self.unified.init_unified_mamba_pools(
                **common, **states, is_draft_worker=False, use_mla_backend=False, full_attention_layer_ids=[1],
                max_total_num_tokens=tokens, speculative_num_draft_tokens=None,
            )  # fmt: skip
        else:
            made = self.unified.init_unified_mamba_swa_pools(
                **common, **window, **states, full_max_total_num_tokens=tokens // 2,
                swa_max_total_num_tokens=tokens // 2, sliding_window_size=WINDOW_TOKENS,
            )  # fmt: skip
        return made.token_to_kv_pool_allocator, made.req_to_token_pool.mamba_allocator


class _Launch:
    """`kernel[grid](...)`, as a function."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __getitem__(self, _grid: Any) -> Any:
        return self.run


def _decode_ids(seq: Any, last: Any, free: Any, out: Any, _size: int, page_tokens: int) -> None:
    """Token ids of a decode step: the one behind the last, or the first of a new page."""
    ids = out.numpy()
    starts_page = seq.numpy() % page_tokens == 1
    np.add(last.numpy(), 1, out=ids)
    count = int(starts_page.sum())
    if count:
        ids[starts_page] = free.numpy()[:count] * page_tokens


def _extend_ids(pre: Any, seq: Any, _last: Any, free: Any, out: Any, _size: int, page_tokens: int) -> None:
    """Token ids of one prompt."""
    assert seq.numel() == 1 and int(pre[0]) == 0, "prompts come one a call, and whole"  # noqa: PT018
    count = int(out.numel())
    pages = free.numpy()[: -(-count // page_tokens)]
    out.numpy()[:] = (pages[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)[:count]


def _without_storage(base: Any) -> Any:
    """A static window pool without bytes: its allocator needs the mapping only."""

    def register_mapping(self: Any, mapping: Any) -> None:
        self.full_to_swa_index_mapping = mapping

    def translate(self: Any, ids: Any) -> Any:
        return self.full_to_swa_index_mapping[ids]

    pool = type(
        "NoStorage",
        (base,),
        {
            "full_kv_pool": None,
            "swa_kv_pool": None,
            "__init__": lambda _self: None,
            "register_mapping": register_mapping,
            "translate_loc_from_full_to_swa": translate,
        },
    )
    pool.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return pool


class SglangBooks:
    """See `workload.Books`."""

    def __init__(
        self, sglang: Sglang, shape: Shape, page_tokens: int, *, unified: bool, tokens: int = POOL_TOKENS
    ) -> None:
        self.sglang, self.torch, self.page_tokens = sglang, sglang.torch, page_tokens
        self.allocator, self.slots = sglang.pools(shape, page_tokens, unified=unified, tokens=tokens)
        self.has_window = shape is not Shape.STATE
        self.token_bytes = LAYER_TOKEN_BYTES * (2 if self.has_window else 1)
        self.table = self.torch.zeros((REQUESTS + 1, CONTEXT_TOKENS), dtype=self.torch.int32)
        self.free_rows = list(range(REQUESTS, -1, -1))
        self.lengths: dict[int, int] = {}
        self.evicted: dict[int, int] = {}
        self.states: dict[int, Any] = {}
        self.spent_ns = self.zeroed_bytes = self.moved_bytes = 0
        for name in BANDS:
            band = getattr(self.allocator, name, None)
            if unified and band is not None:
                self._count_bytes(band._kvcache)  # noqa: SLF001 – where bytes are zeroed and moved

    def _count_bytes(self, storage: Any) -> None:
        """Zeroing and moves are counted, not done; a state's are left as they are."""
        page_bytes = LAYER_TOKEN_BYTES * self.page_tokens

        def zeroed(pages: Any) -> None:
            self.zeroed_bytes += pages.numel() * page_bytes

        def moved(targets: Any, _sources: Any, _page_tokens: int) -> None:
            self.moved_bytes += targets.numel() * page_bytes

        storage.zero_physical_pages, storage.move_physical_pages = zeroed, moved

    def _take(self, tokens: int) -> Any:
        torch, allocator = self.torch, self.allocator
        if self.page_tokens == 1:
            return allocator.alloc(tokens)
        none, all_tokens = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens], dtype=torch.int64)
        last = torch.full((1,), -1, dtype=torch.int64)
        return allocator.alloc_extend(none, none, all_tokens, all_tokens, last, tokens)

    def admit(self, prompt_tokens: int) -> int:
        """See `Books`."""
        before = time.thread_time_ns()
        state = None if self.slots is None else self.slots.alloc(1)
        ids = self._take(prompt_tokens)
        assert ids is not None, "the pools are large enough"
        row = self.free_rows.pop()
        self.table[row, :prompt_tokens] = ids.to(self.torch.int32)
        self.spent_ns += time.thread_time_ns() - before
        self.lengths[row], self.evicted[row], self.states[row] = prompt_tokens, 0, state
        return row

    def decode(self, rows: IntArray) -> None:
        """See `Books`; the batch's own tensors are the scheduler's and cost nothing here."""
        torch, allocator, which = self.torch, self.allocator, rows.tolist()
        row_ids = torch.from_numpy(rows)
        lengths = torch.tensor([self.lengths[row] for row in which], dtype=torch.int64)
        before = time.thread_time_ns()
        if self.has_window:
            self._evict(which)
        if self.page_tokens == 1:
            ids = allocator.alloc(len(which))
        else:
            last = self.table[row_ids, lengths - 1].to(torch.int64)
            after = lengths + 1
            ids = allocator.alloc_decode(after, after, last)
        assert ids is not None, "the pools are large enough"
        self.table[row_ids, lengths] = ids.to(torch.int32)
        self.spent_ns += time.thread_time_ns() - before
        for row in which:
            self.lengths[row] += 1

    def _evict(self, rows: list[int]) -> None:
        """Free what fell out of windows, where enough has gathered."""
        self.allocator.free_group_begin()
        for row in rows:
            first, end = self.evicted[row], self.lengths[row] - WINDOW_TOKENS
            if end >= first + EVICTION_TOKENS:
                end = end // self.page_tokens * self.page_tokens
                if end > first:
                    self.allocator.free_swa_segment(self.table[row, first:end], start_pos=first)
                    self.evicted[row] = end
        self.allocator.free_group_end()

    def finish(self, row: int) -> None:
        """See `Books`."""
        before = time.thread_time_ns()
        ids = self.table[row, : self.lengths[row]]
        self.sglang.common.free_kv_row_segments(
            self.allocator, [(ids, 0)], swa_evicted_seqlen=self.evicted[row]
        )
        if self.slots is not None:
            self.slots.free(self.states[row])
        self.spent_ns += time.thread_time_ns() - before
        self.free_rows.append(row)

    def fragment(self) -> None:
        """See `Books`."""
        allocator, page_tokens = self.allocator, self.page_tokens
        room = int(allocator.available_size() * 0.8) // page_tokens * page_tokens
        pages = self._take(room).view(-1, page_tokens)
        order = self.torch.randperm(len(pages), generator=self.torch.Generator().manual_seed(5))
        allocator.free(pages[order[: len(pages) // 2]].reshape(-1))


def half_freed(sglang: Sglang, live_pages: int, seed: int) -> SglangBooks:
    """As `chain_moves.half_freed`, at page 1; their arena is a fifth larger, which a flush does not notice."""
    books = SglangBooks(sglang, Shape.WINDOW, 1, unified=True, tokens=int(live_pages * 2.4))
    ids = books._take(live_pages)  # noqa: SLF001 – of this file
    order = books.torch.randperm(live_pages, generator=books.torch.Generator().manual_seed(seed))
    books.allocator.free_swa(ids[order[: live_pages // 2]])
    return books


def compaction_figures(sglang: Sglang) -> Iterator[Figure]:
    """Urgent and opportunistic flushes of the window's pool."""
    for live_pages, samples in ((65_536, 5), (1_000_000, 3)):
        times, moves = [], 0
        for seed in range(samples):
            books = half_freed(sglang, live_pages, seed)
            settle()
            times.append(thread_us(books.allocator.swa_attn_allocator.flush_for_allocation))
            moves = books.moved_bytes // LAYER_TOKEN_BYTES
        yield Figure(f"urgent compaction, {live_pages:,} pages", 1, statistics.median(times))
        yield Figure(f"urgent compaction, {live_pages:,} pages, moves", 1, moves)
    books = half_freed(sglang, 65_536, 0)
    settle()
    times, moved = [], 0
    while True:
        times.append(thread_us(books.allocator.flush_opportunistic))
        before, moved = moved, books.moved_bytes // LAYER_TOKEN_BYTES
        if moved - before < 4096:
            break
    yield Figure("opportunistic flush of 4,096 pages", 1, statistics.median(times[:-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path, help="folder of the unpacked wheel")
    parser.add_argument("pools", choices=("unified", "static"))
    arguments = parser.parse_args()
    sglang = Sglang(arguments.wheel)
    unified = arguments.pools == "unified"

    def books_of(shape: Shape, page_tokens: int) -> SglangBooks | None:
        if shape is Shape.THREE and not unified:
            return None
        return SglangBooks(sglang, shape, page_tokens, unified=unified)

    print_figures(measure(books_of, PAGE_SIZES, ("decode", "prefill", "churn")))
    if unified:
        print_figures(compaction_figures(sglang))


if __name__ == "__main__":
    main()
    os._exit(0)  # Its extensions complain at exit.
