"""Attention over pages on a GPU: launches of `triton_programs`.

Grids and scratch follow from sizes that the host knows, never from what lies on the device: nothing here waits, and a launch that a
graph has captured is right for whatever its tensors hold at a replay. Under `TRITON_INTERPRET=1`, set before this module is imported,
the same programs run on host tensors; tests use that.
"""

from __future__ import annotations

import math

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
    kv_heads, value_dim = values.shape[2:]
    group = heads // kv_heads
    key_width, value_width = (max(LEAST_BLOCK, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    queries, key_block = _blocks(query_tokens * group, max(key_width, value_width))
    blocks = -(-query_tokens * group // queries)
    shares = _shares(row_count * kv_heads * blocks, rows, key_block)
    strides = [stride for tensor in (query, keys, values) for stride in tensor.stride()[:3]]
    grain = math.gcd(ALIGNMENT_BYTES // query.element_size(), *strides)
    output = query.new_empty(row_count, query_tokens, heads, value_dim)
    parts = (row_count * query_tokens * heads, shares)
    share_values = share_maxima = share_sums = output
    if shares > 1:
        share_values = torch.empty((*parts, value_dim), dtype=torch.float32, device=query.device)
        share_maxima, share_sums = torch.empty((2, *parts), dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        programs.attend_pages[blocks, row_count * kv_heads, shares](
            query,
            keys,
            values,
            rows.page_table,
            rows.tokens_before,
            output if sinks is None else sinks,
            output,
            share_values,
            share_maxima,
            share_sums,
            scaling,
            query_tokens,
            kv_heads,
            *(stride // grain for stride in strides),
            rows.page_table.stride(0),
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
                output if sinks is None else sinks,
                output,
                heads,
                HAS_SINKS=sinks is not None,
                VALUE_DIM=value_dim,
                VALUE_WIDTH=value_width,
                SHARES=shares,
            )
    return output


def _blocks(queries: int, width: int) -> tuple[int, int]:
    """Queries and keys of a block: few queries for decode, and what shared memory holds of wide entries."""
    query_block = LEAST_BLOCK if queries <= LEAST_BLOCK else 64 if width <= 128 else 32
    return query_block, 64 if width <= 128 else 32


def _shares(programs_of_one: int, rows: PagedRows, key_block: int) -> int:
    """A power of two."""
    keys = rows.loaded_pages * rows.page_tokens
    shares = 1
    while (
        shares < MOST_SHARES
        and programs_of_one * shares < WANTED_PROGRAMS
        and keys >= 2 * shares * SHARE_BLOCKS * key_block
    ):
        shares *= 2
    return shares
