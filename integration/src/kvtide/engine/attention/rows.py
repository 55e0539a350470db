"""What attention needs to know of its rows: where their tokens lie, how many there are, and which of them a query sees."""

from __future__ import annotations

import functools

import attrs
import torch

from kvtide.engine.errors import EngineError
from kvtide.plan import ChunkLifetime, Lifetime, WindowLifetime


@attrs.frozen(kw_only=True)
class Reach:
    """Which tokens a query sees, besides none behind itself; all of them without a bound. There is one bound at most."""

    window_tokens: int | None = None
    """Only the newest so many, its own included."""

    chunk_tokens: int | None = None
    """Only those of its own attention chunk, `[k × chunk_tokens, …)`."""

    def __attrs_post_init__(self) -> None:
        bounds = [bound for bound in (self.window_tokens, self.chunk_tokens) if bound is not None]
        if len(bounds) > 1 or min(bounds, default=1) < 1:
            raise EngineError(
                f"a query sees a window or an attention chunk, of one token or more: found window_tokens={self.window_tokens}, "
                f"chunk_tokens={self.chunk_tokens}"
            )

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Position of the first token that a query at each of `positions` sees."""
        if self.window_tokens is not None:
            return (positions - self.window_tokens + 1).clamp(min=0)
        if self.chunk_tokens is not None:
            return positions // self.chunk_tokens * self.chunk_tokens
        return torch.zeros_like(positions)

    def most_tokens(self, query_tokens: int) -> int | None:
        """Most tokens that `query_tokens` successive queries see together; `None` without a bound."""
        bound = self.window_tokens or self.chunk_tokens
        return None if bound is None else bound + query_tokens - 1


def reach_of(lifetime: Lifetime) -> Reach:
    """The reach of queries whose entries have `lifetime`."""
    match lifetime:
        case WindowLifetime(tokens):
            return Reach(window_tokens=tokens)
        case ChunkLifetime(tokens):
            return Reach(chunk_tokens=tokens)
        case _:
            return Reach()


@attrs.frozen(eq=False)
class PageRuns:
    """The run of pages that each row's queries see something of, and what of it each query does not see."""

    pages: torch.Tensor
    """Physical pages, `[rows, page_count]`; the sink behind a row's last."""

    hidden: torch.Tensor
    """`[rows, query_tokens, page_count × page_tokens]`: before the reach, after the query, or not written."""

    is_held: torch.Tensor
    """`[rows]`: whether the page table names pages for all tokens of the row."""


@attrs.frozen(eq=False, kw_only=True)
class PagedRows:
    """The rows of one forward in one band. The host knows the sizes; the device alone need know the values."""

    page_table: torch.Tensor
    """Physical pages from each row's first token, `[rows, columns]` int64; 0, the sink, where none is bound."""

    tokens_before: torch.Tensor
    """Tokens of each row before its queries, `[rows]` int64."""

    query_tokens: int
    """Queries of each row; their keys and values are in the pages already."""

    page_tokens: int
    """Tokens a page."""

    reach: Reach
    """Which of them a query sees."""

    @property
    def loaded_pages(self) -> int:
        """Pages that `runs` loads for each row: bounded by the table's width and the reach, whatever the rows' lengths."""
        columns = self.page_table.shape[1]
        most = self.reach.most_tokens(self.query_tokens)
        return (
            columns if most is None else min(columns, (most + self.page_tokens - 2) // self.page_tokens + 1)
        )

    @functools.cached_property
    def runs(self) -> PageRuns:
        """The pages to load, made once for all layers of the band."""
        device = self.page_table.device
        columns = self.page_table.shape[1]
        first_pages = self.reach.first_seen(self.tokens_before) // self.page_tokens
        indices = first_pages[:, None] + torch.arange(self.loaded_pages, device=device)
        inside = indices < columns
        pages = torch.where(inside, self.page_table.gather(1, torch.where(inside, indices, 0)), 0)
        positions = (indices * self.page_tokens)[:, :, None] + torch.arange(self.page_tokens, device=device)
        keys = positions.flatten(1)[:, None, :]
        queries = (self.tokens_before[:, None] + torch.arange(self.query_tokens, device=device))[:, :, None]
        hidden = (keys > queries) | (keys < self.reach.first_seen(queries))
        return PageRuns(pages, hidden, self.tokens_before + self.query_tokens <= columns * self.page_tokens)
