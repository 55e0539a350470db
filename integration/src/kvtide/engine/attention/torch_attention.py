"""Attention over pages, in torch: the path of a CPU, and what the Triton programs are compared with.

Whole pages are gathered and multiplied at once, so the result depends on what the pages hold and on the shapes, never on at what
addresses: over the same tokens in other pages it is the same to the last bit.
"""

from __future__ import annotations

import torch

from kvtide.engine.attention.rows import PagedRows


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
    runs = rows.runs
    loaded_keys, loaded_values = (
        plane[runs.pages].flatten(1, 2).transpose(1, 2).unsqueeze(2) for plane in (keys, values)
    )
    row_count, heads, query_tokens, key_dim = query.shape
    kv_heads = keys.shape[2]
    grouped = query.reshape(row_count, kv_heads, heads // kv_heads, query_tokens, key_dim)
    # In fp32, as the Triton programs: products of fp16 are past its largest number before they are scaled.
    scores = grouped.float() @ loaded_keys.transpose(-1, -2).float()
    # A row that its page table does not hold becomes NaN, so that nobody takes what little it sees for its output.
    scores = (
        scores * torch.where(runs.is_held, scaling, torch.nan).to(scores.dtype)[:, None, None, None, None]
    )
    scores = scores.masked_fill(runs.hidden[:, None, None], float("-inf"))
    attended = _weights(scores, sinks).to(values.dtype) @ loaded_values
    return attended.view(row_count, heads, query_tokens, values.shape[-1]).transpose(1, 2).contiguous()


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the columns of `scores [rows, kv_heads, group, query_tokens, columns]`, in fp32."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    rows, kv_heads, group, query_tokens, _ = scores.shape
    sink_scores = sinks.view(1, kv_heads, group, 1, 1).expand(rows, -1, -1, query_tokens, -1)
    return torch.softmax(torch.cat([scores, sink_scores], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
