"""Attention over pages as two Triton programs: one attends, for decode and prefill chunks alike, the other joins shares.

A program of `attend_pages` serves a block of queries of one row and one key-value head: successive tokens, and for each the heads of
the group, so that a key is loaded once for all of them:

    block        [token 0 head 0, token 0 head 1, token 1 head 0, …]
    its keys     from the first that its first query sees to its last query, in `SHARES` shares, a program each

It passes once over its share, with a running maximum and sum (Milakov and Gimelshein 2018; Dao et al. 2022). With one share it
writes the output; with several (few rows, long ones: decode) it writes maximum, sum and weighted values, which `join_shares` joins
(as in Flash-Decoding).

Every key that is loaded is seen by some query of the block: no byte that nobody has written is looked at. Positions are int32,
offsets int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIZES = [
    "scaling",
    "query_tokens",
    "kv_heads",
    "query_row",
    "query_head",
    "query_token",
    "key_page",
    "key_token",
    "key_head",
    "value_page",
    "value_token",
    "value_head",
    "table_row",
    "table_columns",
]


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Position of the first key that a query at `position` sees."""
    if WINDOW > 0:
        return tl.maximum(position - (WINDOW - 1), 0)
    elif CHUNK > 0:
        return position // CHUNK * CHUNK
    else:
        return position * 0


@triton.jit(do_not_specialize=_SIZES)
def attend_pages(
    query,
    keys,
    values,
    page_table,
    tokens_before,
    sinks,
    output,
    share_values,
    share_maxima,
    share_sums,
    scaling: tl.float32,
    query_tokens: tl.int32,
    kv_heads: tl.int32,
    query_row: tl.int64,
    query_head: tl.int64,
    query_token: tl.int64,
    key_page: tl.int64,
    key_token: tl.int64,
    key_head: tl.int64,
    value_page: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    table_row: tl.int64,
    table_columns: tl.int32,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    GRAIN: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """One block of queries over one share of its keys; `WINDOW` and `CHUNK` are 0 for none, widths powers of two.

    Strides of queries, keys and values are counted in grains of `GRAIN` elements, so that the compiler knows that an entry starts
    16-byte aligned where it does, and loads it in such pieces.
    """
    # All in the one axis of a grid that may be long.
    blocks = tl.cdiv(query_tokens * GROUP, QUERIES)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) // blocks % kv_heads).to(tl.int64)
    share = tl.program_id(1)
    places = block * QUERIES + tl.arange(0, QUERIES)
    token = places // GROUP
    head = kv_head * GROUP + places % GROUP
    is_query = token < query_tokens
    before = tl.load(tokens_before + row).to(tl.int32)
    position = before + token
    seen_from = first_seen(position, WINDOW, CHUNK)
    key_columns = tl.arange(0, KEY_WIDTH)
    value_columns = tl.arange(0, VALUE_WIDTH)
    queries = tl.load(
        query
        + (row * query_row + head * query_head + token.to(tl.int64) * query_token)[:, None] * GRAIN
        + key_columns[None, :],
        mask=is_query[:, None] & (key_columns < KEY_DIM)[None, :],
        other=0.0,
    )

    first_key = tl.min(seen_from, axis=0)
    end_key = tl.max(tl.where(is_query, position, -1), axis=0) + 1
    # Nothing is read behind the table, whatever the lengths say.
    held_keys = table_columns * PAGE_TOKENS
    end_key = tl.minimum(end_key, held_keys)
    share_keys = tl.cdiv(tl.cdiv(end_key - first_key, SHARES), KEYS) * KEYS
    begin = first_key + share * share_keys
    end = tl.minimum(begin + share_keys, end_key)

    maximum = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    weighted = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)
    for first in range(begin, end, KEYS):
        at = first + tl.arange(0, KEYS)
        is_key = at < end
        page = tl.load(page_table + row * table_row + at // PAGE_TOKENS, mask=is_key, other=0).to(tl.int64)
        offset = (at % PAGE_TOKENS).to(tl.int64)
        loaded_keys = tl.load(
            keys
            + (page * key_page + offset * key_token + kv_head * key_head)[None, :] * GRAIN
            + key_columns[:, None],
            mask=is_key[None, :] & (key_columns < KEY_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(queries, loaded_keys, input_precision="ieee") * scaling
        is_seen = is_key[None, :] & (at[None, :] <= position[:, None]) & (at[None, :] >= seen_from[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A query that has seen no key yet has no maximum: −∞ − −∞ would be NaN.
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        kept = tl.exp(maximum - finite)
        weights = tl.exp(scores - finite[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        loaded_values = tl.load(
            values
            + (page * value_page + offset * value_token + kv_head * value_head)[:, None] * GRAIN
            + value_columns[None, :],
            mask=is_key[:, None] & (value_columns < VALUE_DIM)[None, :],
            other=0.0,
        )
        weighted = weighted * kept[:, None] + tl.dot(
            weights.to(loaded_values.dtype), loaded_values, input_precision="ieee"
        )
        maximum = new_maximum

    # A row that its table does not hold becomes NaN, so that nobody takes what little it sees for its output.
    weighted = tl.where(before + query_tokens <= held_keys, weighted, float("nan"))

    # Queries in the order of the output, [rows, query_tokens, heads].
    place = (row * query_tokens + token) * (kv_heads * GROUP) + head
    is_written = is_query[:, None] & (value_columns < VALUE_DIM)[None, :]
    if SHARES == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32)
            with_sink = tl.maximum(maximum, sink)
            kept = tl.exp(maximum - with_sink)
            total = total * kept + tl.exp(sink - with_sink)
            weighted = weighted * kept[:, None]
        result = weighted / tl.where(is_query, total, 1.0)[:, None]
        tl.store(
            output + place[:, None] * VALUE_DIM + value_columns[None, :],
            result.to(output.dtype.element_ty),
            mask=is_written,
        )
    else:
        part = place * SHARES + share
        tl.store(share_values + part[:, None] * VALUE_DIM + value_columns[None, :], weighted, mask=is_written)
        tl.store(share_maxima + part, maximum, mask=is_query)
        tl.store(share_sums + part, total, mask=is_query)


@triton.jit(do_not_specialize=["heads"])
def join_shares(
    share_values,
    share_maxima,
    share_sums,
    sinks,
    output,
    heads: tl.int32,
    HAS_SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Join the shares of one query and head."""
    place = tl.program_id(0).to(tl.int64)
    parts = place * SHARES + tl.arange(0, SHARES)
    columns = tl.arange(0, VALUE_WIDTH)
    maxima = tl.load(share_maxima + parts)
    sink = float("-inf")
    if HAS_SINKS:
        sink = tl.load(sinks + place % heads).to(tl.float32)
    maximum = tl.maximum(tl.max(maxima, axis=0), sink)
    # A share without a key has the maximum −∞, and gets weight zero.
    kept = tl.exp(maxima - maximum)
    total = tl.sum(kept * tl.load(share_sums + parts), axis=0) + tl.exp(sink - maximum)
    loaded = tl.load(
        share_values + parts[:, None] * VALUE_DIM + columns[None, :],
        mask=(columns < VALUE_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(loaded * kept[:, None], axis=0) / total
    tl.store(
        output + place * VALUE_DIM + columns, result.to(output.dtype.element_ty), mask=columns < VALUE_DIM
    )
