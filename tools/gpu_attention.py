"""Attention over pages on a GPU: its programs beside the torch reference, and how fast they read.

Queries, keys and values are seeded normal numbers in pages scattered over one region. The reference runs on a CPU; sums are made in
another order, so outputs may differ by what the type rounds. What no query sees holds NaN for the programs, which do not load it.
"""

import math
from collections.abc import Callable
from functools import partial

import attrs
import numpy as np
import torch

from gpu_bandwidth import milliseconds
from gpu_place import Place
from interpreter_loops import let_interpreter_loop
from kvtide.engine.attention import PagedRows, Reach, torch_attention

EVERYTHING = Reach()
LAYOUTS = {
    "decode": ((900, 3, 411), 1),
    "prefill": ((130,), 150),
    "first chunk": ((0,), 40),
    "chunks of several rows": ((70, 0, 333), 24),
    "one long row": ((40_000,), 1),
}
"""Tokens before and queries of each row."""

LONGEST_REHEARSED = 1000
"""Tokens before, in the interpreter."""


@attrs.frozen(kw_only=True)
class Sizes:
    """Of one call."""

    kv_heads: int = 2
    group: int = 4
    key_dim: int = 64
    value_dim: int = 64
    page_tokens: int = 16
    reach: Reach = EVERYTHING
    has_sinks: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "full": Sizes(),
    "window with sinks": Sizes(reach=Reach(window_tokens=100), has_sinks=True),
    "attention chunk": Sizes(reach=Reach(chunk_tokens=128), dtype=torch.float16),
    "widths that differ, pages of 24": Sizes(key_dim=72, value_dim=40, page_tokens=24, group=3),
    "wide": Sizes(key_dim=256, value_dim=256),
    "fp32": Sizes(dtype=torch.float32, page_tokens=1),
    "fp32, wide": Sizes(dtype=torch.float32, key_dim=136, value_dim=256),
}


@attrs.frozen(eq=False)
class Call:
    """What `attend` is called with."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: PagedRows
    sinks: torch.Tensor | None

    def attend(self, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Its output."""
        return function(self.query, self.keys, self.values, self.rows, scaling=0.1, sinks=self.sinks)


def call_of(place: Place, sizes: Sizes, before: tuple[int, ...], query_tokens: int, unseen: float) -> Call:
    """For rows with `before` tokens and `query_tokens` queries; what none sees holds `unseen`."""
    numbers = torch.Generator().manual_seed(3)
    counts = [-(-(tokens + query_tokens) // sizes.page_tokens) for tokens in before]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers).to(sizes.dtype)

    page = (1 + sum(counts), sizes.page_tokens, sizes.kv_heads)
    keys, values = drawn(*page, sizes.key_dim), drawn(*page, sizes.value_dim)
    table = torch.zeros((len(before), max(counts)), dtype=torch.int64)
    places = np.random.default_rng(4).permutation(sum(counts)) + 1
    for row, (tokens, count) in enumerate(zip(before, counts, strict=True)):
        pages, places = torch.from_numpy(places[:count]), places[count:]
        table[row, :count] = pages
        at = torch.arange(count * sizes.page_tokens)
        is_seen = at < tokens + query_tokens
        is_seen &= at >= sizes.reach.first_seen(torch.tensor(tokens))
        for plane in (keys, values):
            plane[pages] = torch.where(is_seen.view(count, -1, 1, 1), plane[pages], unseen)
    heads = sizes.kv_heads * sizes.group
    query = drawn(len(before), heads, query_tokens, sizes.key_dim)
    sinks = drawn(heads) if sizes.has_sinks else None
    rows = PagedRows(
        page_table=table.to(place.memory),
        tokens_before=torch.tensor(before).to(place.memory),
        query_tokens=query_tokens,
        page_tokens=sizes.page_tokens,
        reach=sizes.reach,
    )
    memory = place.memory
    there = None if sinks is None else sinks.to(memory)
    return Call(query.to(memory), keys.to(memory), values.to(memory), rows, there)


def compare(place: Place, name: str) -> str:
    """Each layout of rows with the sizes of a case; the largest difference, in words."""
    # Imported here: Triton may be missing where the rest is rehearsed.
    from kvtide.engine.attention import triton_attention  # noqa: PLC0415

    sizes, largest = CASES[name], 0.0
    if not place.is_gpu:
        let_interpreter_loop()
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        sizes = attrs.evolve(sizes, dtype=torch.float32, kv_heads=1, group=2)
    # The interpreter would be long at the long row.
    layouts = {
        name: rows for name, rows in LAYOUTS.items() if place.is_gpu or max(rows[0]) <= LONGEST_REHEARSED
    }
    for before, query_tokens in layouts.values():
        output = call_of(place, sizes, before, query_tokens, math.nan).attend(triton_attention.attend)
        on_cpu = call_of(Place(is_gpu=False), sizes, before, query_tokens, 0.0)
        expected = on_cpu.attend(torch_attention.attend)
        allowed = 1e-4 if sizes.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(output.cpu(), expected, rtol=allowed, atol=allowed)
        largest = max(largest, float((output.cpu().float() - expected.float()).abs().max()))
    return f"{', '.join(layouts)}: within {largest:.1e} of torch"


def rates(place: Place) -> str:
    """Keys and values read per second by decode, beside a copy of as many bytes, and what a long prefill chunk computes."""
    from kvtide.engine.attention import triton_attention  # noqa: PLC0415  # as above

    sizes = Sizes(kv_heads=8, group=8, key_dim=128, value_dim=128)
    texts = []
    for name, before in (("32 × 8,192", (8191,) * 32), ("1 × 131,072", (131_071,))):
        call = call_of(place, sizes, before, 1, 0.0)
        read = sum(before) * sizes.kv_heads * (sizes.key_dim + sizes.value_dim) * 2
        # A copy reads one half and writes the other.
        source = torch.empty(read // 2, dtype=torch.uint8, device=place.memory)
        target = torch.empty_like(source)
        taken = least(partial(call.attend, triton_attention.attend))
        copied = least(partial(target.copy_, source))
        texts.append(f"decode {name} tokens {read / taken / 1e6:.0f} GB/s = {copied / taken:.0%} of a copy's")
    taken = least(partial(call_of(place, sizes, (8192,), 4096, 0.0).attend, triton_attention.attend))
    products = 4 * 64 * 128 * 4096 * (8192 + 2048)
    return f"{'; '.join(texts)}; prefill of 4,096 behind 8,192 {products / taken / 1e9:.0f} TFLOP/s"


def least(work: Callable[[], object]) -> float:
    """Milliseconds of the fastest of some runs."""
    return min(milliseconds(work) for _ in range(6))
