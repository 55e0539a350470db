"""The attention-interface hook: attention of a transformers model over pages, by `kvtide.engine.attention`.

transformers calls an attention function with queries and with the keys and values that its cache returned. Here the cache has written
those to their pages and the function reads what the queries see from there, as a paged engine's does; masks are not asked for.

On a CPU whole pages are loaded, and weight zero does not hide a stale NaN in a value: 0 × NaN is NaN. So with this hook the output
depends on every byte of every page that a query sees some of, which is why hand-out zeroes them (row A5); transformers' own masks
never show the model those bytes.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvtide.engine.attention import PagedRows, Reach, attend
from kvtide.engine.cache import CacheStep
from kvtide.engine.errors import EngineError

PAGE_ATTENTION = "kvtide_pages"
"""Name in transformers' attention interface."""

STEP_ARGUMENT = "kvtide_step"
"""Keyword with which a `PageStep` travels through the model's forward to the attention function."""

PAGE_ATTENTION_FAMILIES = frozenset(
    {
        "bamba",
        "falcon_h1",
        "gemma3_text",
        "gpt_oss",
        "granitemoehybrid",
        "lfm2",
        "llama",
        "llama4_text",
        "nemotron_h",
        "qwen3_5_text",
        "qwen3_next",
    }
)
"""Model types (`config.model_type`) whose attention is what `attend_pages` computes and that pass keywords on to it.

MLA is not among them: DeepSeek-V3's attention function gets keys and values already expanded from the latent.
"""


def register_page_attention() -> None:
    """Make `PAGE_ATTENTION` known to transformers; without a mask, since pages bring their own."""
    AttentionInterface.register(PAGE_ATTENTION, attend_pages)
    AttentionMaskInterface.register(PAGE_ATTENTION, _no_mask)


@attrs.frozen(eq=False)
class PageStep:
    """What attention needs of the forward in progress."""

    step: CacheStep
    """The forward."""

    reaches: tuple[Reach, ...]
    """By layer: which tokens a query sees."""

    tokens_before: torch.Tensor
    """Of each row, `[rows]` int64, on the forward's device."""

    _rows: dict[Reach, PagedRows] = attrs.field(factory=dict, init=False)

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of one layer; what is derived from the rows is derived once for all layers of one table and reach."""
        store, reach = self.step.store, self.reaches[layer]
        pages = store.pages(layer)
        rows = self._rows.get(reach)
        if rows is None or rows.page_table is not pages.page_table:
            rows = self._rows[reach] = PagedRows(
                page_table=pages.page_table,
                tokens_before=self.tokens_before,
                query_tokens=query.shape[2],
                page_tokens=store.page_tokens,
                reach=reach,
            )
        return attend(query, pages.planes["key"], pages.planes["value"], rows, scaling=scaling, sinks=sinks)


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
    return found.attend(layer, query, scaling, arguments.get("s_aux")), None


def _no_mask(*_: object, **__: object) -> None:
    return None
