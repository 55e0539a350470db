"""Attention over pages on a GPU: launches of `triton_programs`.

Grids and scratch follow from sizes that the host knows, never from what lies on the device: nothing here waits, and a launch that a
graph has captured is right for whatever its tensors hold at a replay. Under `TRITON_INTERPRET=1`, set before this module is imported,
the same programs run on host tensors; tests use that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton

from kvtide.engine.attention import triton_programs as programs
from kvtide.engine.attention.rows import PagedRows
from kvtide.engine.errors import EngineError
from kvtide.plan import ALIGNMENT_BYTES

WANTED_PROGRAMS = 256
"""Programs that keep a GPU busy: while there are fewer, keys are cut into shares."""

MOST_SHARES = 32
"""More would be joined more slowly than they are read."""

SHARE_BLOCKS = 4
"""Blocks of keys that a share has at least."""

LEAST_BLOCK = 16
"""Of queries, keys and widths: what the GPU multiplies at once."""

MOST_QUERIES = 64
"""Of a block."""

MOST_KEYS = 64
"""Of a block."""

SHARED_BYTES = 99 << 10
"""Shared memory that a program may have on every GPU since sm_80; sm_86 and sm_89 give no more."""


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
    *,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See `kvtide.engine.attention.attend`."""
    for name, tensor in (
        ("query", query),
        ("keys", keys),
        ("values", values),
        ("page table", rows.page_table),
    ):
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise EngineError(
                f"cannot attend: entries of the {name} lie {tensor.stride(-1)} elements apart, and must be dense"
            )
    row_count, heads, query_tokens, key_dim = query.shape
    kv_heads, value_dim = keys.shape[2], values.shape[3]
    group = heads // kv_heads
    key_width, value_width = width_of(key_dim), width_of(value_dim)
    queries, key_block = blocks_of(query_tokens * group, key_width, value_width, query.element_size())
    blocks = -(-query_tokens * group // queries)
    shares = _shares(row_count * kv_heads * blocks, rows, key_block)
    strides = [stride for tensor in (query, keys, values) for stride in tensor.stride()[:3]]
    grain = grain_of(query.element_size(), strides)
    # One number a row and a head: where they do not lie side by side, the programs read a copy.
    tokens_before = rows.tokens_before.contiguous()
    output = query.new_empty(row_count, query_tokens, heads, value_dim)
    parts = (row_count * query_tokens * heads, shares)
    # Programs look at neither shares nor sinks where there are none; they are given some tensor all the same.
    share_values = share_maxima = share_sums = output
    sink_scores = output if sinks is None else sinks.contiguous()
    if shares > 1:
        share_values = torch.empty((*parts, value_dim), dtype=torch.float32, device=query.device)
        share_maxima, share_sums = torch.empty((2, *parts), dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        programs.attend_pages[blocks * row_count * kv_heads, shares](
            query,
            keys,
            values,
            rows.page_table,
            tokens_before,
            sink_scores,
            output,
            share_values,
            share_maxima,
            share_sums,
            scaling,
            query_tokens,
            kv_heads,
            *(stride // grain for stride in strides),
            rows.page_table.stride(0),
            rows.page_table.shape[1],
            GROUP=group,
            PAGE_TOKENS=rows.page_tokens,
            WINDOW=rows.reach.window_tokens or 0,
            CHUNK=rows.reach.chunk_tokens or 0,
            HAS_SINKS=sinks is not None,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_WIDTH=key_width,
            VALUE_WIDTH=value_width,
            GRAIN=grain,
            QUERIES=queries,
            KEYS=key_block,
            SHARES=shares,
        )
        if shares > 1:
            programs.join_shares[(parts[0],)](
                share_values,
                share_maxima,
                share_sums,
                sink_scores,
                output,
                heads,
                HAS_SINKS=sinks is not None,
                VALUE_DIM=value_dim,
                VALUE_WIDTH=value_width,
                SHARES=shares,
            )
    return output


def width_of(dim: int) -> int:
    """Elements that a program loads of an entry of `dim`: a power of two."""
    return max(LEAST_BLOCK, int(triton.next_power_of_2(dim)))


def grain_of(element_bytes: int, strides: Sequence[int]) -> int:
    """Elements that `strides` are multiples of, and no more than lie in the arena's alignment."""
    return math.gcd(ALIGNMENT_BYTES // element_bytes, *strides)


def blocks_of(queries: int, key_width: int, value_width: int, element_bytes: int) -> tuple[int, int]:
    """Queries and keys of a block, for a row's `queries`: few queries for decode, and no more than shared memory has room for.

    Raises `EngineError` for entries of which not even `LEAST_BLOCK` fit `SHARED_BYTES`.
    """
    most = LEAST_BLOCK if queries <= LEAST_BLOCK else MOST_QUERIES
    key_block = MOST_KEYS
    while True:
        query_block = min(most, key_block)
        # Queries, keys and values lie there, and weights on their way from one product to the other.
        entries = (query_block + key_block) * key_width + key_block * value_width
        shared_bytes = entries * element_bytes + 4 * query_block * key_block
        if shared_bytes <= SHARED_BYTES:
            return query_block, key_block
        if key_block == LEAST_BLOCK:
            raise EngineError(
                f"cannot attend: blocks of {LEAST_BLOCK} queries and keys with entries of {key_width} and {value_width} elements of "
                f"{element_bytes} bytes need {shared_bytes >> 10} KiB of shared memory, and {SHARED_BYTES >> 10} KiB are there"
            )
        key_block //= 2


def _shares(programs_of_one: int, rows: PagedRows, key_block: int) -> int:
    """In how many shares keys are cut, where each would have `programs_of_one` programs: doubled, since it is a size of a block,
    while the GPU has room for more programs and a share of the most keys would keep `SHARE_BLOCKS` blocks.
    """
    keys = rows.loaded_pages * rows.page_tokens
    shares = 1
    while (
        shares < MOST_SHARES
        and programs_of_one * shares < WANTED_PROGRAMS
        and keys >= 2 * shares * SHARE_BLOCKS * key_block
    ):
        shares *= 2
    return shares
