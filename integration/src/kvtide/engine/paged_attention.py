"""The attention-interface hook: attention that loads whole pages through the page table, as a paged kernel does.

    query [rows, heads, query_tokens, width]
    pages of each row, from the first that any query sees to the last written one:
        |. . x x|x x x x|x x ~ ~|       . behind the window   x seen   ~ not written yet
    all of them are loaded; what a query does not see gets weight zero

Weight zero does not hide a stale NaN in a value: 0 × NaN is NaN. So with this hook the output depends on every byte of every
page a row holds, which is why hand-out zeroes them (row A5); transformers' own masks never show the model those bytes.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvtide.engine.batch import ForwardBatch
from kvtide.engine.cache import CacheStep
from kvtide.engine.errors import EngineError

PAGE_ATTENTION = "kvtide_pages"
"""Name in transformers' attention interface."""

STEP_ARGUMENT = "kvtide_step"
"""Keyword with which a `PageStep` travels through the model's forward to the attention function."""

PAGE_ATTENTION_FAMILIES = frozenset(
    {"falcon_h1", "gemma3_text", "gpt_oss", "granitemoehybrid", "llama", "qwen3_5_text"}
)
"""Model types (`config.model_type`) whose attention is what `attend_pages` computes and that pass keywords on to it.

MLA is not among them: DeepSeek-V3's attention function gets keys and values already expanded from the latent.
"""


def register_page_attention() -> None:
    """Make `PAGE_ATTENTION` known to transformers; without a mask, since pages bring their own."""
    AttentionInterface.register(PAGE_ATTENTION, attend_pages)
    AttentionMaskInterface.register(PAGE_ATTENTION, _no_mask)


@attrs.frozen(eq=False)
class PageRuns:
    """Which pages each row loads in the layers of one lifetime, and what of them a query sees."""

    first_pages: torch.Tensor
    """`[rows]`: index in the row of the first page that any of its queries sees."""

    page_count: int
    """Pages loaded from there on, enough for every row."""

    hidden: torch.Tensor
    """`[rows, query_tokens, page_count × page_tokens]`: behind the window, after the query, or not written."""


def page_runs(batch: ForwardBatch, page_tokens: int, window_tokens: int | None) -> PageRuns:
    """The pages that the rows of `batch` load where a query sees `window_tokens` tokens, or all."""
    before = torch.tensor(batch.tokens_before)
    first_seen = torch.zeros_like(before)
    if window_tokens is not None:
        first_seen = (before - window_tokens + 1).clamp(min=0)
    first_pages = first_seen // page_tokens
    end_pages = (before + batch.query_tokens - 1) // page_tokens + 1
    page_count = int((end_pages - first_pages).max())
    keys = first_pages[:, None] * page_tokens + torch.arange(page_count * page_tokens)
    queries = before[:, None] + torch.arange(batch.query_tokens)
    hidden = keys[:, None, :] > queries[:, :, None]
    if window_tokens is not None:
        hidden |= keys[:, None, :] <= queries[:, :, None] - window_tokens
    return PageRuns(first_pages, page_count, hidden)


@attrs.frozen(eq=False)
class PageStep:
    """What attention needs of the forward in progress."""

    step: CacheStep
    """The forward."""

    windows: tuple[int | None, ...]
    """By layer: tokens that a query sees, `None` for all."""

    _runs: dict[int | None, PageRuns] = attrs.field(factory=dict, init=False)

    def runs(self, layer: int) -> PageRuns:
        """`page_runs` of `layer`, made once for all layers of one lifetime."""
        window_tokens = self.windows[layer]
        if window_tokens not in self._runs:
            self._runs[window_tokens] = page_runs(self.step.batch, self.step.store.page_tokens, window_tokens)
        return self._runs[window_tokens]


def attend_pages(  # noqa: PLR0917  # the positions that transformers calls it with
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001  # transformers passes it; the pages hold it already
    value: torch.Tensor,  # noqa: ARG001  # as key
    attention_mask: torch.Tensor | None,  # noqa: ARG001  # transformers passes it; `PageRuns.hidden` says more
    scaling: float,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query [rows, heads, query_tokens, key_dim]` over the rows' pages.

    Returns `[rows, query_tokens, heads, value_dim]` and no weights. Sinks (`s_aux [heads]`) take weight and give nothing.
    """
    found = arguments.get(STEP_ARGUMENT)
    if not isinstance(found, PageStep):
        raise EngineError(
            f"{type(module).__name__} did not pass {STEP_ARGUMENT!r} on to its attention function"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # a torch module's attributes are Tensor | Module to mypy
    runs = found.runs(layer)
    pages = found.step.store.read_pages(layer, runs.first_pages, runs.page_count)
    keys, values = (pages[name].transpose(1, 2).unsqueeze(2) for name in ("key", "value"))
    rows, heads, query_tokens, key_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, query_tokens, key_dim)
    scores = grouped @ keys.transpose(-1, -2) * scaling
    scores = scores.masked_fill(runs.hidden[:, None, None], float("-inf"))
    weights = _weights(scores, arguments.get("s_aux")).to(values.dtype)
    attended = (weights @ values).view(rows, heads, query_tokens, values.shape[-1])
    return attended.transpose(1, 2).contiguous(), None


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the columns of `scores [rows, kv_heads, group, query_tokens, columns]`, in fp32."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    rows, kv_heads, group, query_tokens, _ = scores.shape
    sink_scores = sinks.view(1, kv_heads, group, 1, 1).expand(rows, -1, -1, query_tokens, -1)
    return torch.softmax(torch.cat([scores, sink_scores], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


def _no_mask(*_: object, **__: object) -> None:
    return None
