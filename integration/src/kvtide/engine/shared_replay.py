"""Plain tensors for runs that share prefixes: a request's own tensors, completed before a forward from those that its row read.

A request that went on from what others had computed begins with copies of their tensors, page by page as the run's log has it, and with a
copy of the state that another had at that length. Everything is kept to the end of the replay, since anybody may have been read from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from kvtide.engine.batch import ForwardBatch, Padding
from kvtide.engine.origins import NOBODY, RowOrigins
from kvtide.engine.stores import ForwardStore, PlainRequest, plain_forward

States = Mapping[tuple[int, str], torch.Tensor]


class SharedPlainStore:
    """See the module's docstring."""

    def __init__(
        self, page_tokens: int, band_of_layer: Mapping[int, str], logs: Iterable[Sequence[RowOrigins]]
    ) -> None:
        """Nothing computed; `logs`: those of the forwards to come, of which the states that are gone on from are kept."""
        self._page_tokens = page_tokens
        self._band_of_layer = band_of_layer
        self._wanted = {row.state for log in logs for row in log if row.state is not None}
        self._requests: dict[int, PlainRequest] = {}
        self._states: dict[tuple[int, int], States] = {}
        self._known: dict[tuple[int, str], tuple[int, ...]] = {}

    def forward(
        self, batch: ForwardBatch, origins: Sequence[RowOrigins], padding: Padding | None
    ) -> ForwardStore:
        """The store of one forward."""
        for before, row in zip(batch.tokens_before, origins, strict=True):
            self._complete(row, before)
        return plain_forward(self._page_tokens, [self._requests[row.key] for row in origins], padding)

    def ran(self, batch: ForwardBatch, origins: Sequence[RowOrigins]) -> None:
        """The forward has run: keep the states that others go on from."""
        for before, count, row in zip(batch.tokens_before, batch.counts, origins, strict=True):
            at = (row.key, before + count)
            if at in self._wanted:
                self._states[at] = dict(self._requests[row.key].states)

    def _complete(self, row: RowOrigins, before: int) -> None:
        request = self._requests.get(row.key)
        if request is None:
            request = self._requests[row.key] = PlainRequest()
        if row.state is not None:
            request.states = dict(self._states[row.state])
        for band, writers in row.pages.items():
            if writers != self._known.get((row.key, band)):
                self._known[row.key, band] = writers
                for page, writer in enumerate(writers):
                    if writer not in (NOBODY, row.key):
                        self._copy_page(request, self._requests[writer], band, page, before)
            for name in self._planes(band):
                # Where nothing is bound nothing is read; the tensor only has to be as long.
                self._lengthen(request, name, before)

    def _planes(self, band: str) -> list[tuple[int, str]]:
        names = {name for request in self._requests.values() for name in request.tokens}
        return [name for name in names if self._band_of_layer[name[0]] == band]

    def _lengthen(self, request: PlainRequest, name: tuple[int, str], length: int) -> None:
        like = next(each.tokens[name] for each in self._requests.values() if name in each.tokens)
        own = request.tokens.get(name, like[:0])
        if len(own) < length:
            request.tokens[name] = torch.cat([own, like.new_zeros(length - len(own), *like.shape[1:])])

    def _copy_page(
        self, request: PlainRequest, writer: PlainRequest, band: str, page: int, before: int
    ) -> None:
        first, end = page * self._page_tokens, min((page + 1) * self._page_tokens, before)
        for name, values in writer.tokens.items():
            if self._band_of_layer[name[0]] == band:
                self._lengthen(request, name, before)
                request.tokens[name] = request.tokens[name].clone()
                request.tokens[name][first:end] = values[first:end]
