"""Rows, pages and values for attention, and attention as its formula says."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import torch

from kvtide.engine.attention import PagedRows, Reach

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERYTHING = Reach()


@attrs.frozen(kw_only=True)
class Case:
    """Rows, sizes and a reach; values follow from the seed."""

    tokens_before: tuple[int, ...]
    query_tokens: int
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 8
    value_dim: int = 8
    page_tokens: int = 4
    reach: Reach = EVERYTHING
    has_sinks: bool = False
    spare_columns: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0


@attrs.frozen(eq=False)
class Tensors:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: PagedRows
    sinks: torch.Tensor | None

    def attend(self, function: Any, scaling: float = 0.3) -> torch.Tensor:
        return function(
            self.query, self.keys, self.values, self.rows, scaling=scaling, sinks=self.sinks
        ).cpu()


def tensors_of(
    case: Case, *, unwritten: float = 0.0, behind: float = 0.0, seed: int | None = None
) -> Tensors:
    """The case's values in pages scattered over two planes of one page, as in an arena; `seed` draws where.

    What is not written holds `unwritten`, and what lies behind every query's reach, in pages that a window has given up too, `behind`.
    """
    numbers = np.random.default_rng(case.seed)
    shape = (len(case.tokens_before), case.kv_heads * case.group, case.query_tokens, case.key_dim)

    def drawn(*size: int) -> torch.Tensor:
        return torch.from_numpy(numbers.standard_normal(size).astype(np.float32)).to(case.dtype)

    query = drawn(*shape)
    sinks = drawn(shape[1]) if case.has_sinks else None
    per_page = case.page_tokens
    lengths = [before + case.query_tokens for before in case.tokens_before]
    columns = -(-max(lengths) // per_page) + case.spare_columns
    page_count = 2 + sum(-(-length // per_page) for length in lengths)
    width = case.key_dim + case.value_dim
    # A page's envelope: keys of all its tokens, then values, then another layer's bytes.
    envelopes = torch.full((page_count, per_page * case.kv_heads * (width + 3)), math.nan, dtype=case.dtype)
    keys, values = (
        envelopes[:, first : first + per_page * case.kv_heads * dim].view(
            page_count, per_page, case.kv_heads, dim
        )
        for first, dim in ((0, case.key_dim), (per_page * case.kv_heads * case.key_dim, case.value_dim))
    )
    keys[0], values[0] = 0.0, 0.0
    places = np.random.default_rng(case.seed if seed is None else seed).permutation(page_count - 1) + 1
    table = torch.zeros((len(lengths), columns), dtype=torch.int64)
    for row, (before, length) in enumerate(zip(case.tokens_before, lengths, strict=True)):
        pages, places = np.split(places, [-(-length // per_page)])
        first_seen = int(case.reach.first_seen(torch.tensor([before])))
        for index, page in enumerate(pages.tolist()):
            keys[page], values[page] = unwritten, unwritten
            if (index + 1) * per_page > first_seen:
                table[row, index] = page
            for offset in range(min(per_page, length - index * per_page)):
                entry = (drawn(case.kv_heads, case.key_dim), drawn(case.kv_heads, case.value_dim))
                is_behind = index * per_page + offset < first_seen
                keys[page, offset] = behind if is_behind else entry[0]
                values[page, offset] = behind if is_behind else entry[1]
    rows = PagedRows(
        page_table=table.to(DEVICE),
        tokens_before=torch.tensor(case.tokens_before).to(DEVICE),
        query_tokens=case.query_tokens,
        page_tokens=per_page,
        reach=case.reach,
    )
    there = envelopes.to(DEVICE)
    keys, values = (
        there.as_strided(plane.shape, plane.stride(), plane.storage_offset()) for plane in (keys, values)
    )
    return Tensors(query.to(DEVICE), keys, values, rows, None if sinks is None else sinks.to(DEVICE))


def written_out(tensors: Tensors, scaling: float = 0.3) -> torch.Tensor:
    """Attention as its formula says, one query, head and key at a time, in double precision."""
    rows, query = tensors.rows, tensors.query.cpu().double()
    row_count, heads, query_tokens, _ = query.shape
    keys, values = tensors.keys.cpu().double(), tensors.values.cpu().double()
    group = heads // keys.shape[2]
    table = rows.page_table.cpu()
    output = torch.zeros(row_count, query_tokens, heads, values.shape[-1], dtype=torch.float64)
    for row, before in enumerate(rows.tokens_before.tolist()):
        for token in range(query_tokens):
            position = before + token
            seen = [
                key
                for key in range(position + 1)
                if (rows.reach.window_tokens is None or key > position - rows.reach.window_tokens)
                and (
                    rows.reach.chunk_tokens is None
                    or key // rows.reach.chunk_tokens == position // rows.reach.chunk_tokens
                )
            ]
            for head in range(heads):
                entries = [
                    (int(table[row, key // rows.page_tokens]), key % rows.page_tokens, head // group)
                    for key in seen
                ]
                scores = [float(query[row, head, token] @ keys[at]) * scaling for at in entries]
                powers = [math.exp(score) for score in scores]
                total = sum(powers)
                if tensors.sinks is not None:
                    total += math.exp(float(tensors.sinks[head]))
                for power, at in zip(powers, entries, strict=True):
                    output[row, token, head] += power / total * values[at]
    return output
