"""How a forward reaches the bytes of its rows: one protocol, two places where the bytes are.

    cache layers, page attention          (kvtide.engine.cache, kvtide.engine.paged_attention)
                 |
            ForwardStore
            /          \
    ArenaStore        PlainStore
    pages and slots   one tensor a request, layer and plane
    of one arena      (no page, no id: the oracle)

Everything above the protocol is the same code on both sides, so the logits of a batch over the arena equal those over plain
tensors bit for bit, or some byte was not where it belongs.

What is not there reads as zeros on both sides: position −1, and tokens of a page that are not written yet. On the arena
that is the sink (page 0) and zeroing on hand-out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import attrs
import torch

from kvtide.arena import LayerView, RoutedKVCache, gather_tokens, token_slots, write_tokens
from kvtide.engine.batch import ForwardBatch
from kvtide.sizing import ChunkReads
from kvtide.storage import ForwardIds, ForwardStateSlots

Planes = Mapping[str, torch.Tensor]
"""Tensors by the names that the geometry declares: `key`, `value`, `latent`, `conv`, `recurrent`."""


class ForwardStore(Protocol):
    """What one forward reads and writes: the tokens and states of its rows, in its row order."""

    @property
    def page_tokens(self) -> int:
        """Tokens that `read_pages` loads at once."""

    def write_tokens(self, layer: int, values: Planes) -> None:
        """Write the new tokens of all rows, row after row: each plane `[rows × query_tokens, …]`."""

    def read_tokens(self, layer: int, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tokens at `positions [rows, columns]` of each row, `[rows, columns, …]`; −1 reads as zeros.

        Within one forward the layers of one lifetime read the same positions.
        """

    def read_pages(self, layer: int, first_pages: torch.Tensor, page_count: int) -> dict[str, torch.Tensor]:
        """Whole pages from `first_pages [rows]` on, `[rows, page_count × page_tokens, …]`, written or not."""

    def load_state(self, layer: int) -> dict[str, torch.Tensor]:
        """A copy of each row's recurrent state, `[rows, …]` a tensor."""

    def store_state(self, layer: int, values: Planes) -> None:
        """Replace each row's recurrent state."""


@attrs.frozen(eq=False)
class HandingBackStore:
    """A store of one forward that lets others run before each of its calls: between layers, and within one."""

    _store: ForwardStore
    _hand_back: Callable[[], None]

    @property
    def page_tokens(self) -> int:
        """See `ForwardStore.page_tokens`."""
        return self._store.page_tokens

    def write_tokens(self, layer: int, values: Planes) -> None:
        """See `ForwardStore.write_tokens`."""
        self._hand_back()
        self._store.write_tokens(layer, values)

    def read_tokens(self, layer: int, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `ForwardStore.read_tokens`."""
        self._hand_back()
        return self._store.read_tokens(layer, positions)

    def read_pages(self, layer: int, first_pages: torch.Tensor, page_count: int) -> dict[str, torch.Tensor]:
        """See `ForwardStore.read_pages`."""
        self._hand_back()
        return self._store.read_pages(layer, first_pages, page_count)

    def load_state(self, layer: int) -> dict[str, torch.Tensor]:
        """See `ForwardStore.load_state`."""
        self._hand_back()
        return self._store.load_state(layer)

    def store_state(self, layer: int, values: Planes) -> None:
        """See `ForwardStore.store_state`."""
        self._hand_back()
        self._store.store_state(layer, values)


# --- on the arena -------------------------------------------------------------------------------------------------


class ArenaStore:
    """Bytes in one arena. Keeps nothing: the views are fixed for life, and ids come with each forward."""

    CHUNK_READS = ChunkReads.PAGES
    """Where attention over it reads a chunk's own tokens, whatever the layer: they are written before they are read."""

    def __init__(self, routed_cache: RoutedKVCache, page_tokens: int) -> None:
        """Read and write through the views of `routed_cache`, whose attention pages hold `page_tokens` tokens."""
        self._routed_cache = routed_cache
        self._page_tokens = page_tokens

    def forward(self, ids: ForwardIds) -> ForwardStore:
        """The store of one forward, whose rows `ids` names."""
        return _ArenaForward(self._routed_cache, self._page_tokens, ids)


@attrs.frozen(eq=False)
class _ArenaForward:
    """Ids were translated once, before the forward; what is derived from them here is derived once a band."""

    routed_cache: RoutedKVCache
    page_tokens: int
    ids: ForwardIds
    _read_slots: dict[str, tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=dict, init=False)
    """Band → positions asked for, and their slots."""

    def write_tokens(self, layer: int, values: Planes) -> None:
        view = self._attention(layer)
        slots = self.ids.write_slots[view.band]
        for name, plane in view.planes.items():
            write_tokens(plane, slots, values[name])

    def read_tokens(self, layer: int, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        view = self._attention(layer)
        asked, slots = self._read_slots.get(view.band, (None, positions))
        if asked is not positions:
            slots = self._slots(view.band, positions)
            self._read_slots[view.band] = (positions, slots)
        return {name: gather_tokens(plane, slots) for name, plane in view.planes.items()}

    def read_pages(self, layer: int, first_pages: torch.Tensor, page_count: int) -> dict[str, torch.Tensor]:
        view = self._attention(layer)
        pages = self._pages(view.band, first_pages[:, None] + torch.arange(page_count))
        return {name: plane[pages].flatten(1, 2) for name, plane in view.planes.items()}

    def load_state(self, layer: int) -> dict[str, torch.Tensor]:
        return {name: self._state_slots.gather(plane) for name, plane in self._state(layer).planes.items()}

    def store_state(self, layer: int, values: Planes) -> None:
        for name, plane in self._state(layer).planes.items():
            self._state_slots.scatter(plane, values[name])

    def _slots(self, band: str, positions: torch.Tensor) -> torch.Tensor:
        pages = self._pages(band, positions.clamp(min=0) // self.page_tokens)
        # Slot 0 is the sink's first token.
        return torch.where(
            positions < 0, 0, token_slots(pages, positions % self.page_tokens, self.page_tokens)
        )

    def _pages(self, band: str, indices: torch.Tensor) -> torch.Tensor:
        """Physical pages of each row at `indices [rows, …]`; past the table's end, as for any unbound page, the sink."""
        table = self.ids.page_tables[band]
        inside = indices < table.shape[1]
        return torch.where(inside, table.gather(1, torch.where(inside, indices, 0)), 0)

    @property
    def _state_slots(self) -> ForwardStateSlots:
        slots = self.ids.state_slots
        assert slots is not None, "a model with recurrent layers has a state band"
        return slots

    def _attention(self, layer: int) -> LayerView:
        view = self.routed_cache.attention(layer)
        assert view is not None, f"layer {layer} declares no attention part"
        return view

    def _state(self, layer: int) -> LayerView:
        view = self.routed_cache.state(layer)
        assert view is not None, f"layer {layer} declares no state part"
        return view


# --- on plain tensors ---------------------------------------------------------------------------------------------


class PlainStore:
    """Every request's tokens and states as tensors of their own, all of them kept until released: the oracle."""

    def __init__(self, page_tokens: int) -> None:
        """Hold nothing yet. `page_tokens` is only the length of the runs that `read_pages` returns."""
        self._page_tokens = page_tokens
        self._requests: dict[str, PlainRequest] = {}

    def forward(self, batch: ForwardBatch) -> ForwardStore:
        """The store of one forward. A request without earlier tokens starts from nothing."""
        for request_id, before in zip(batch.request_ids, batch.tokens_before, strict=True):
            if before == 0:
                self._requests[request_id] = PlainRequest()
        requests = [self._requests[request_id] for request_id in batch.request_ids]
        return PlainForward(self._page_tokens, requests)

    def release(self, request_id: str) -> None:
        """Forget a request."""
        del self._requests[request_id]


@attrs.define(eq=False)
class PlainRequest:
    """One request's."""

    tokens: dict[tuple[int, str], torch.Tensor] = attrs.field(factory=dict)
    """(layer, plane) → `[tokens written, …]`."""

    states: dict[tuple[int, str], torch.Tensor] = attrs.field(factory=dict)
    """(layer, tensor) → the state's own shape."""


@attrs.frozen(eq=False)
class PlainForward:
    """A `ForwardStore` over plain tensors."""

    page_tokens: int
    """Length of the runs that `read_pages` returns."""

    requests: list[PlainRequest]
    """Of the rows."""

    def write_tokens(self, layer: int, values: Planes) -> None:
        """See `ForwardStore.write_tokens`."""
        for name, value in values.items():
            for request, new in zip(self.requests, value.chunk(len(self.requests)), strict=True):
                written = request.tokens.get((layer, name), new[:0])
                request.tokens[layer, name] = torch.cat([written, new])

    def read_tokens(self, layer: int, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `ForwardStore.read_tokens`."""
        rows = list(zip(self.requests, positions, strict=True))
        return {
            name: torch.stack([_tokens_at(request.tokens[layer, name], row) for request, row in rows])
            for name in _planes_of(layer, self.requests[0].tokens)
        }

    def read_pages(self, layer: int, first_pages: torch.Tensor, page_count: int) -> dict[str, torch.Tensor]:
        """See `ForwardStore.read_pages`."""
        first_positions = first_pages[:, None] * self.page_tokens
        return self.read_tokens(layer, first_positions + torch.arange(page_count * self.page_tokens))

    def load_state(self, layer: int) -> dict[str, torch.Tensor]:
        """See `ForwardStore.load_state`."""
        return {
            name: torch.stack([request.states[layer, name] for request in self.requests])
            for name in _planes_of(layer, self.requests[0].states)
        }

    def store_state(self, layer: int, values: Planes) -> None:
        """See `ForwardStore.store_state`."""
        for name, value in values.items():
            for request, state in zip(self.requests, value, strict=True):
                request.states[layer, name] = state.clone()


def _planes_of(layer: int, tensors: Mapping[tuple[int, str], torch.Tensor]) -> list[str]:
    return [name for of_layer, name in tensors if of_layer == layer]


def _tokens_at(written: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`written [tokens, …]` at `positions [columns]`, zeros where a position is −1 or not written."""
    found = torch.zeros(len(positions), *written.shape[1:], dtype=written.dtype)
    there = (positions >= 0) & (positions < len(written))
    found[there] = written[positions[there]]
    return found
