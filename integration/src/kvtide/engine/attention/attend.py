"""The backend's one call, wherever its tensors lie."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kvtide.engine.attention import torch_attention
from kvtide.engine.attention.rows import PagedRows
from kvtide.engine.errors import EngineError
from kvtide.sizing import ChunkReads

CHUNK_READS = ChunkReads.PAGES
"""A chunk's queries find the chunk's own keys and values in pages: a window holds the whole chunk until it is processed."""

HAS_TRITON = find_spec("triton") is not None
"""Whether Triton can be imported; it is, when a GPU first asks for it."""


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
    *,
    scaling: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `query [rows, heads, query_tokens, key_dim]` over the rows' pages.

    Args:
        query: of the newest tokens of each row.
        keys: one layer's plane, `[page_count, page_tokens, kv_heads, key_dim]`, a view over the arena; of the query's type, each
            head's entry dense. Heads are a multiple of `kv_heads`, head h reading `h // (heads / kv_heads)`.
        values: `[page_count, page_tokens, kv_heads, value_dim]`.
        rows: where the rows' tokens lie.
        scaling: of the scores.
        sinks: a score for each head, `[heads]`, that takes weight and gives nothing; `None` without.

    Returns:
        `[rows, query_tokens, heads, value_dim]`, of the query's type, on the current stream. Nothing waits for the device.

    Raises:
        EngineError: shapes or types that do not belong together, with what they are; on a CPU, a row with more tokens than its page
            table holds. On a GPU the host does not know of such a row: its output is NaN, and no other row's.
    """
    _check(query, keys, values, rows, sinks)
    if query.numel() == 0:
        row_count, heads, query_tokens, _ = query.shape
        return query.new_empty(row_count, query_tokens, heads, values.shape[-1])
    if rows.tokens_before.device.type == "cpu":
        _check_lengths(rows)
    if query.is_cuda and HAS_TRITON:
        from kvtide.engine.attention import triton_attention  # noqa: PLC0415  # Triton is optional

        return triton_attention.attend(query, keys, values, rows, scaling=scaling, sinks=sinks)
    return torch_attention.attend(query, keys, values, rows, scaling=scaling, sinks=sinks)


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
    sinks: torch.Tensor | None,
) -> None:
    row_count, heads, query_tokens, key_dim = query.shape
    kv_heads = keys.shape[2]
    belong = (
        rows.tokens_before.shape == (row_count,)
        and rows.page_table.dim() == 2
        and len(rows.page_table) == row_count
        and rows.page_table.dtype == rows.tokens_before.dtype == torch.int64
        and rows.query_tokens == query_tokens
        and keys.shape[1:] == (rows.page_tokens, kv_heads, key_dim)
        and values.shape[:3] == keys.shape[:3]
        and heads % kv_heads == 0
        and (sinks is None or sinks.shape == (heads,))
        and query.dtype == keys.dtype == values.dtype
    )
    if not belong:
        raise EngineError(
            f"cannot attend with queries {list(query.shape)} of {query.dtype} to keys {list(keys.shape)} of {keys.dtype} and "
            f"values {list(values.shape)} of {values.dtype}, for {list(rows.tokens_before.shape)} rows ({rows.tokens_before.dtype}) of "
            f"{rows.query_tokens} queries in pages of {rows.page_tokens}, with a page table {list(rows.page_table.shape)} "
            f"({rows.page_table.dtype}) and sinks {None if sinks is None else list(sinks.shape)}"
        )


def _check_lengths(rows: PagedRows) -> None:
    tokens, columns = int(rows.tokens_before.max()) + rows.query_tokens, rows.page_table.shape[1]
    if tokens > columns * rows.page_tokens:
        raise EngineError(
            f"cannot attend: a row has {tokens} tokens, and {columns} pages of {rows.page_tokens} tokens are all that its page table "
            "names"
        )
