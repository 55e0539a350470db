"""What one forward computes: some new tokens of some requests.

A forward is either a prefill chunk (one row, any number of tokens) or a decode batch (any number of rows, one token each).
So no row is ever padded, and every row of a forward either has earlier tokens or has none; transformers' recurrent layers
can run nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch

from kvtide.device import IntArray
from kvtide.engine.errors import EngineError

FUTURE_TOKEN = -1
"""In the place of a token that the row's forward before chooses: on the device it is there in time, on the host not yet."""


@attrs.frozen(kw_only=True)
class ForwardBatch:
    """The rows of one forward. The place of a request in it says nothing about the request."""

    request_ids: tuple[str, ...]
    """Request of each row."""

    rows: tuple[int, ...]
    """Row of each request in the request table."""

    token_ids: tuple[tuple[int, ...], ...]
    """New tokens of each row, or `FUTURE_TOKEN`."""

    tokens_before: tuple[int, ...]
    """Tokens of each row that earlier forwards have written."""

    def __attrs_post_init__(self) -> None:
        lengths = {len(field) for field in (self.request_ids, self.rows, self.token_ids, self.tokens_before)}
        if len(lengths) != 1 or 0 in lengths:
            raise EngineError(
                f"a forward needs one entry a row in each field and at least one row, found {len(self.request_ids)} "
                f"request ids, {len(self.rows)} rows, {len(self.token_ids)} token lists, {len(self.tokens_before)} lengths"
            )
        counts = set(self.counts)
        if 0 in counts or (len(self.rows) > 1 and counts != {1}):
            raise EngineError(
                f"a forward is one row with some tokens or many rows with one token each, found {self.counts} tokens"
            )
        if len({before > 0 for before in self.tokens_before}) > 1:
            raise EngineError(
                "a forward cannot mix rows with and without earlier tokens: recurrent layers of transformers take one "
                f"answer for the whole batch; tokens before are {self.tokens_before}"
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """New tokens of each row, as numbers."""
        return tuple(len(tokens) for tokens in self.token_ids)

    @property
    def query_tokens(self) -> int:
        """New tokens of one row; the same for all."""
        return len(self.token_ids[0])

    @property
    def longest_before(self) -> int:
        """Tokens before, of the row that has most."""
        return max(self.tokens_before)

    @property
    def has_previous_state(self) -> bool:
        """Whether the rows carry a recurrent state from an earlier forward."""
        return self.longest_before > 0


@attrs.frozen(kw_only=True)
class Padding:
    """The shape of a forward that has the same whatever its rows; places behind them are padding."""

    row_count: int
    """Places."""

    page_columns: int
    """Columns of its page tables."""


@attrs.frozen(eq=False)
class ForwardInputs:
    """What a model is given of a batch."""

    token_ids: torch.Tensor
    """`[rows, query_tokens]`."""

    positions: torch.Tensor
    """Position of each in its request, `[rows, query_tokens]`."""


def inputs_of_host(batch: ForwardBatch, padding: Padding | None = None) -> ForwardInputs:
    """As the host knows them; no token may be a future one. Token 0 at position 0 in places that are `padding`."""
    inputs = _inputs(batch, torch.tensor(batch.token_ids), torch.tensor(batch.tokens_before))
    if padding is None:
        return inputs
    rows = (0, 0, 0, padding.row_count - len(batch.rows))
    return ForwardInputs(
        *(torch.nn.functional.pad(each, rows) for each in (inputs.token_ids, inputs.positions))
    )


def inputs_of_device(
    batch: ForwardBatch,
    last_tokens: torch.Tensor,
    lengths: torch.Tensor,
    send: Callable[[Sequence[IntArray]], Sequence[torch.Tensor]],
) -> ForwardInputs:
    """As the rows' own values on the device say: the token that each chose last, for future ones, and its length, `[rows]` both.

    Tokens that the host knows go with `send`, which waits for nothing that is queued; a decode step has none.
    """
    known = np.array(batch.token_ids, np.int64)
    is_future = known == FUTURE_TOKEN
    if is_future.all():
        return _inputs(batch, last_tokens[:, None], lengths)
    (tokens,) = send([known.ravel()])
    tokens = tokens.view(known.shape)
    if is_future.any():
        tokens = torch.where(tokens == FUTURE_TOKEN, last_tokens[:, None], tokens)
    return _inputs(batch, tokens, lengths)


def _inputs(batch: ForwardBatch, tokens: torch.Tensor, lengths: torch.Tensor) -> ForwardInputs:
    return ForwardInputs(tokens, lengths[:, None] + torch.arange(batch.query_tokens, device=lengths.device))
