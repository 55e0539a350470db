"""How many pages of one band a request holds at most, in closed form.

While a forward runs, a request that had x processed tokens holds the tokens `[kept(x), end)`: from the first one that a later
query, or a hit on its latest checkpoint, may read, to the last one the forward writes. *Stepped* bands keep a place for many
lengths (chunks of attention; windows behind a grid of checkpoints), and between two steps the longest x holds most.
*Smooth* windows drop a token for each one processed, so only the run's place relative to the pages matters: a run of R tokens
that begins t tokens behind a page's start touches ceil((R + t) / page) pages, most for the largest t there is.
"""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class HeldBand:
    """One band's pages and what it keeps; `window_tokens`, `chunk_tokens` or neither."""

    page_tokens: int
    """Tokens a page."""

    window_tokens: int | None
    """Tokens a query sees, for a window."""

    chunk_tokens: int | None
    """Tokens of a stretch, for chunked-local attention."""

    grid_tokens: int
    """Tokens between checkpoints whose window is retained; 1 without checkpoints."""

    def kept(self, length: int) -> int:
        """First token kept after `length` tokens are processed; may be negative."""
        checkpoint = length // self.grid_tokens * self.grid_tokens
        if self.window_tokens is not None:
            return checkpoint - self.window_tokens + 1
        if self.chunk_tokens is not None:
            return checkpoint // self.chunk_tokens * self.chunk_tokens
        return 0

    def first_page(self, length: int) -> int:
        """First page kept after `length` tokens are processed."""
        return max(0, self.kept(length)) // self.page_tokens

    def least_alike(self, length: int) -> int:
        """The least length at which the same token is kept first as at `length`."""
        if self.chunk_tokens is None:
            return length // self.grid_tokens * self.grid_tokens
        # On the grid: of a stretch and the grid's interval, one divides the other.
        return self.kept(length)

    def pages(self, length: int, end: int, first: int) -> int:
        """Pages from `first` on that hold tokens `[kept(length), end)`; `first` starts a page.

        Where none of them is kept, of a window of one token say, the page that `end` lies inside still is: the next token goes there.
        """
        begin = max(first, self.kept(length))
        return ceil_div(end, self.page_tokens) - begin // self.page_tokens

    def most_pages(self, shortest: int, longest: int, written: int, first: int) -> int:
        """Most pages over lengths `[shortest, longest]` while `written` tokens are written behind them."""
        if longest < shortest:
            return 0
        if self.window_tokens is not None and self.grid_tokens == 1:
            return self._most_pages_of_a_run(shortest, longest, written, first)
        turn = self.least_alike(longest) - 1
        lengths = (longest, turn) if turn >= shortest else (longest,)
        return max(self.pages(length, length + written, first) for length in lengths)

    def most_pages_on_grid(self, shortest: int, longest: int, written: int, first: int) -> int:
        """The same over multiples of the grid only."""
        if self.grid_tokens == 1:
            return self.most_pages(shortest, longest, written, first)
        longest = longest // self.grid_tokens * self.grid_tokens
        lengths = (longest, self.least_alike(longest) - self.grid_tokens)
        return max(
            (self.pages(length, length + written, first) for length in lengths if length >= shortest),
            default=0,
        )

    def _most_pages_of_a_run(self, shortest: int, longest: int, written: int, first: int) -> int:
        most = self.pages(longest, longest + written, first)
        # The run's start goes up to kept(longest); of those before, the last that lies at the end of a page.
        start = max(self.kept(shortest), self.kept(longest) // self.page_tokens * self.page_tokens - 1)
        length = start - self.kept(0)
        return max(most, self.pages(length, length + written, first))


def ceil_div(count: int, divisor: int) -> int:
    """`count / divisor`, rounded up."""
    return -(-count // divisor)


def round_up(count: int, multiple: int) -> int:
    """The least multiple that is not below `count`."""
    return ceil_div(count, multiple) * multiple
