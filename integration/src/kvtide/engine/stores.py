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

What is not there reads as zeros on both sides: position −1, a page that is not bound, and tokens of a page that are not written
yet. So no token is read from the sink (page 0), to which a forward writes whatever no later one reads: what one request leaves there
reaches no other, NaN included. Whole `pages` are another matter; there the sink is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import torch

from kvtide.arena import LayerView, RoutedKVCache, gather_tokens, token_slots, write_tokens
from kvtide.chain import SINK
from kvtide.engine.batch import ForwardBatch, Padding
from kvtide.sizing import ChunkReads
from kvtide.storage import ForwardStateSlots, KVStorage

Planes = Mapping[str, torch.Tensor]
"""Tensors by the names that the geometry declares: `key`, `value`, `latent`, `conv`, `recurrent`."""


@attrs.frozen(eq=False)
class LayerPages:
    """The pages of one layer, where they lie."""

    planes: Planes
    """`[page_count, page_tokens, …]` each; page 0 is the sink."""

    page_table: torch.Tensor
    """Pages of each row from its first token, `[rows, columns]` int64; the same tensor for all layers of a band."""


class LayerIds(Protocol):
    """What the layers of one forward index by: `kvtide.storage.ForwardIds`, or buffers that hold as much of them."""

    @property
    def write_slots(self) -> Mapping[str, torch.Tensor]:
        """See `ForwardIds.write_slots`."""

    @property
    def page_tables(self) -> Mapping[str, torch.Tensor]:
        """See `ForwardIds.page_tables`."""

    @property
    def state_slots(self) -> ForwardStateSlots | None:
        """See `ForwardIds.state_slots`."""


class ForwardStore(Protocol):
    """What one forward reads and writes: the tokens and states of its rows, in its row order."""

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of `pages`."""

    @property
    def chunk_reads(self) -> ChunkReads:
        """Where the forward's attention is to read the tokens that it writes itself.

        `PAGES`: here, where all that is written can be read back. `ACTIVATIONS`: where they were computed, for only those that a
        later forward reads are kept; tokens of earlier forwards are read here all the same.
        """

    def write_tokens(self, layer: int, values: Planes) -> None:
        """Write the new tokens of all rows, row after row: each plane `[rows × query_tokens, …]`."""

    def read_tokens(self, layer: int, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tokens at `positions [rows, columns]` of each row, `[rows, columns, …]`; −1 reads as zeros.

        Within one forward the layers of one lifetime read the same positions.
        """

    def pages(self, layer: int) -> LayerPages:
        """The pages of the rows' tokens, for a backend that reads them itself."""

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

    @property
    def chunk_reads(self) -> ChunkReads:
        """See `ForwardStore.chunk_reads`."""
        return self._store.chunk_reads

    def write_tokens(self, layer: int, values: Planes) -> None:
        """See `ForwardStore.write_tokens`."""
        self._hand_back()
        self._store.write_tokens(layer, values)

    def read_tokens(self, layer: int, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `ForwardStore.read_tokens`."""
        self._hand_back()
        return self._store.read_tokens(layer, positions)

    def pages(self, layer: int) -> LayerPages:
        """See `ForwardStore.pages`."""
        self._hand_back()
        return self._store.pages(layer)

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

    def __init__(self, storage: KVStorage) -> None:
        """Read and write through the views of `storage`, which binds for a chunk what its policy says."""
        self._storage = storage

    def forward(self, ids: LayerIds) -> ArenaForward:
        """The store of one forward, whose rows `ids` names."""
        storage = self._storage
        return ArenaForward(
            storage.routed_cache, storage.plan.page_tokens, storage.sized.policy.chunk_reads, ids
        )


@attrs.define(eq=False)
class ArenaForward:
    """A `ForwardStore` over the arena. Ids were translated once, before the forward; what is derived from them is derived once a band."""

    routed_cache: RoutedKVCache
    """Views of every layer."""

    page_tokens: int
    """Of every page."""

    chunk_reads: ChunkReads
    """By which windows were bound."""

    ids: LayerIds
    """Of the rows."""

    has_stored_states: bool = attrs.field(default=False, init=False)
    """Whether some state is the newer one: the forward cannot be run once more from where it began."""

    _read_slots: dict[str, tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=dict, init=False)
    """Band → positions asked for, and their slots."""

    def write_tokens(self, layer: int, values: Planes) -> None:
        """See `ForwardStore.write_tokens`."""
        view = self._attention(layer)
        slots = self.ids.write_slots[view.band]
        for name, plane in view.planes.items():
            write_tokens(plane, slots, values[name])

    def read_tokens(self, layer: int, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `ForwardStore.read_tokens`."""
        view = self._attention(layer)
        asked, slots = self._read_slots.get(view.band, (None, positions))
        if asked is not positions:
            slots = self._slots(view.band, positions)
            self._read_slots[view.band] = (positions, slots)
        return {name: gather_tokens(plane, slots) for name, plane in view.planes.items()}

    def pages(self, layer: int) -> LayerPages:
        """See `ForwardStore.pages`."""
        view = self._attention(layer)
        return LayerPages(view.planes, self.ids.page_tables[view.band])

    def load_state(self, layer: int) -> dict[str, torch.Tensor]:
        """See `ForwardStore.load_state`."""
        return {name: self._state_slots.gather(plane) for name, plane in self._state(layer).planes.items()}

    def store_state(self, layer: int, values: Planes) -> None:
        """See `ForwardStore.store_state`."""
        self.has_stored_states = True
        for name, plane in self._state(layer).planes.items():
            self._state_slots.scatter(plane, values[name])

    def _slots(self, band: str, positions: torch.Tensor) -> torch.Tensor:
        """Slots of each row's tokens at `positions [rows, columns]`; −1 for those at −1, and where the sink stands for a page."""
        pages = self.ids.page_tables[band].gather(1, positions.clamp(min=0) // self.page_tokens)
        slots = token_slots(pages, positions % self.page_tokens, self.page_tokens)
        return slots.masked_fill((positions < 0) | (pages == SINK), -1)

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
        """Hold nothing yet. `page_tokens` only says in what pages `pages` lays tokens out."""
        self._page_tokens = page_tokens
        self._requests: dict[str, PlainRequest] = {}

    def forward(self, batch: ForwardBatch, padding: Padding | None = None) -> ForwardStore:
        """The store of one forward. A request without earlier tokens starts from nothing, as a padded place does each time."""
        for request_id, before in zip(batch.request_ids, batch.tokens_before, strict=True):
            if before == 0:
                self._requests[request_id] = PlainRequest()
        return plain_forward(
            self._page_tokens, [self._requests[request_id] for request_id in batch.request_ids], padding
        )

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
    """Of every page."""

    requests: list[PlainRequest]
    """Of the rows."""

    page_columns: int = 0
    """Columns of page tables, at least."""

    _page_tables: dict[int, torch.Tensor] = attrs.field(factory=dict, init=False)
    """By columns; the layers of one forward have one."""

    @property
    def chunk_reads(self) -> ChunkReads:
        """All tokens are kept, so all are read back, whatever the run that is compared with this binds."""
        return ChunkReads.PAGES

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

    def pages(self, layer: int) -> LayerPages:
        """Copies of the tokens in pages of their own, row after row; zeros where none is written, and in the sink."""
        names = _planes_of(layer, self.requests[0].tokens)
        lengths = [len(request.tokens[layer, names[0]]) for request in self.requests]
        rows = len(self.requests)
        columns = max(self.page_columns, -(-max(lengths) // self.page_tokens))
        planes = {}
        for name in names:
            entry = self.requests[0].tokens[layer, name]
            plane = entry.new_zeros((1 + rows * columns, self.page_tokens, *entry.shape[1:]))
            row_tokens = plane[1:].view(rows, columns * self.page_tokens, *entry.shape[1:])
            for row, request in enumerate(self.requests):
                row_tokens[row, : lengths[row]] = request.tokens[layer, name]
            planes[name] = plane
        if columns not in self._page_tables:
            self._page_tables[columns] = torch.arange(1, 1 + rows * columns).view(rows, columns)
        return LayerPages(planes, self._page_tables[columns])

    def load_state(self, layer: int) -> dict[str, torch.Tensor]:
        """See `ForwardStore.load_state`."""
        loaded = {}
        for name in _planes_of(layer, self.requests[0].states):
            nothing = torch.zeros_like(self.requests[0].states[layer, name])
            loaded[name] = torch.stack(
                [request.states.get((layer, name), nothing) for request in self.requests]
            )
        return loaded

    def store_state(self, layer: int, values: Planes) -> None:
        """See `ForwardStore.store_state`."""
        for name, value in values.items():
            for request, state in zip(self.requests, value, strict=True):
                request.states[layer, name] = state.clone()


def plain_forward(
    page_tokens: int, requests: Sequence[PlainRequest], padding: Padding | None
) -> ForwardStore:
    """The store of one forward over `requests`, and over a request without tokens for each padded place."""
    if padding is None:
        return PlainForward(page_tokens, list(requests))
    padded = [PlainRequest() for _ in range(padding.row_count - len(requests))]
    return PlainForward(page_tokens, [*requests, *padded], padding.page_columns)


def _planes_of(layer: int, tensors: Mapping[tuple[int, str], torch.Tensor]) -> list[str]:
    return [name for of_layer, name in tensors if of_layer == layer]


def _tokens_at(written: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`written [tokens, …]` at `positions [columns]`, zeros where a position is −1 or not written."""
    found = torch.zeros(len(positions), *written.shape[1:], dtype=written.dtype)
    there = (positions >= 0) & (positions < len(written))
    found[there] = written[positions[there]]
    return found
