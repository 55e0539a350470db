"""The cache-layer hook: a transformers cache whose every byte lies in a store.

transformers asks its cache for four things: take these new keys and values and return all that the mask covers (`update`),
how long is the sequence (`get_seq_length`), which columns will `update` return (`get_mask_sizes`), and the recurrent state
(`conv_states`, `recurrent_states`, which decode kernels change in place). Each is answered from the step in progress:

    with cache.step(batch, store):         states are loaded from the store
        model(…, cache=cache)              update() writes to the store and reads from it
                                           states are stored, every tensor of the step is dropped

Between steps the cache holds no tensor of any request. What `update` returns of a chunk's own tokens is what the store says
(`ForwardStore.chunk_reads`): what it read back, or the keys and values that it was given, behind those that it read.

Columns are laid out as transformers lays out a left-padded batch: the last column is every row's newest token; a column
before a row's first token is at position −1 and masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import attrs
import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvtide.engine.batch import ForwardBatch
from kvtide.engine.declare import state_plane
from kvtide.engine.errors import EngineError
from kvtide.engine.stores import ForwardStore, Planes
from kvtide.plan import (
    ChunkLifetime,
    KVLayerDecl,
    KVPart,
    Lifetime,
    MLAGeometry,
    StateGeometry,
    TensorDecl,
    WindowLifetime,
)
from kvtide.sizing import ChunkReads


def columns(batch: ForwardBatch, window_tokens: int | None) -> tuple[int, int]:
    """How many columns a layer returns, and at which column of the padded batch the first stands.

    As `DynamicLayer` and `DynamicSlidingWindowLayer` count them: a window keeps its last `window_tokens − 1` tokens.
    """
    before = batch.longest_before
    first_column = 0 if window_tokens is None else max(before - window_tokens + 1, 0)
    return before + batch.query_tokens - first_column, first_column


def column_positions(batch: ForwardBatch, window_tokens: int | None) -> torch.Tensor:
    """Position in its request of every column of every row, `[rows, columns]`; −1 left of a row's first token."""
    column_count, first_column = columns(batch, window_tokens)
    padding = batch.longest_before - torch.tensor(batch.tokens_before)
    positions = first_column + torch.arange(column_count) - padding[:, None]
    return positions.clamp(min=-1)


@attrs.frozen(eq=False)
class CacheStep:
    """One forward in progress."""

    batch: ForwardBatch
    """Its rows."""

    store: ForwardStore
    """Where their bytes are."""

    reads_pages: bool
    """The attention function reads pages itself; `update` then returns only what it was given."""

    _positions: dict[int | None, torch.Tensor] = attrs.field(factory=dict, init=False)

    def positions(self, window_tokens: int | None) -> torch.Tensor:
        """`column_positions` of what is read from the store, made once for all layers of one lifetime."""
        if window_tokens not in self._positions:
            positions = column_positions(self.batch, window_tokens)
            if self.store.chunk_reads is ChunkReads.ACTIVATIONS:
                positions = positions[:, : -self.batch.query_tokens]
            self._positions[window_tokens] = positions
        return self._positions[window_tokens]


class HybridCache(Cache):
    """One cache for every layer that `layers` declare. Holds nothing outside a step."""

    def __init__(self, layers: Iterable[KVLayerDecl], *, reads_pages: bool = False) -> None:
        """With `reads_pages`, attention is expected to read pages itself (`kvtide.engine.paged_attention`)."""
        self._reads_pages = reads_pages
        self._step: CacheStep | None = None
        super().__init__(layers=[_layer(self, decl) for decl in layers])

    @property
    def current_step(self) -> CacheStep:
        """The forward in progress; raises `EngineError` outside one."""
        if self._step is None:
            raise EngineError("the cache was used outside a step: run the model through ModelRunner")
        return self._step

    @contextmanager
    def step(self, batch: ForwardBatch, store: ForwardStore) -> Iterator[CacheStep]:
        """Run one forward inside: states are loaded, and stored again unless it raises."""
        assert self._step is None, "one forward at a time"
        self._step = step = CacheStep(batch, store, self._reads_pages)
        recurrent = [layer for layer in self.layers if isinstance(layer, _StateLayer)]
        try:
            for layer in recurrent:
                layer.load(step)
            yield step
            for layer in recurrent:
                layer.store(step)
        finally:
            for layer in recurrent:
                layer.drop()
            self._step = None


# --- layers -------------------------------------------------------------------------------------------------------


class _AttentionLayer:
    """Keys and values in the step's store; mixed in before a `DynamicLayer`."""

    def bind_attention(self, cache: HybridCache, layer: int, part: KVPart) -> None:
        """Stand for `part` of `layer` in `cache`."""
        self._cache = cache
        self._layer = layer
        self._latent_dim = part.geometry.latent_dim if isinstance(part.geometry, MLAGeometry) else None
        self._window_tokens = _window_tokens(part.lifetime)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[rows, heads, query_tokens, width]`; return `[rows, heads, columns, width]`, the last columns those written.

        Read back or as given they are the same to the bit: a declaration has the type that the model computes in.
        """
        step = self._cache.current_step
        step.store.write_tokens(self._layer, self._to_planes(key_states, value_states))
        if step.reads_pages:
            return key_states, value_states
        keys, values = self._from_planes(
            step.store.read_tokens(self._layer, step.positions(self._window_tokens))
        )
        if step.store.chunk_reads is ChunkReads.PAGES:
            return keys, values
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_seq_length(self) -> int:
        """Columns of earlier tokens in the padded batch."""
        return self._cache.current_step.batch.longest_before

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`columns` of the step."""
        batch = self._cache.current_step.batch
        assert query_length == batch.query_tokens
        return columns(batch, self._window_tokens)

    def _to_planes(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (keys, values))
        if self._latent_dim is None:
            return {"key": keys, "value": values}
        return {"latent": torch.cat([keys[:, 0], values[:, 0]], dim=-1)}

    def _from_planes(self, planes: Planes) -> tuple[torch.Tensor, torch.Tensor]:
        if self._latent_dim is None:
            return planes["key"].transpose(1, 2).contiguous(), planes["value"].transpose(1, 2).contiguous()
        latent = planes["latent"][:, None]
        return latent[..., : self._latent_dim].contiguous(), latent[..., self._latent_dim :].contiguous()


class _StateLayer(LinearAttentionLayer):
    """Recurrent state, staged for the length of a step: the truth is the row's slot in the store."""

    def bind_state(self, layer: int) -> None:
        """Stand for the state of `layer`."""
        self._state_layer = layer

    def load(self, step: CacheStep) -> None:
        """Stage each row's state; rows without one begin as transformers begins."""
        if not step.batch.has_previous_state:
            return
        state = step.store.load_state(self._state_layer)
        for index in range(self.number_of_states):
            self.has_previous_state[index] = True
            if (conv := state.get(state_plane("conv", index))) is not None:
                self.conv_states[index] = conv
                self.conv_kernel_size[index] = conv.shape[-1]
                self.is_conv_states_initialized[index] = True
            if (recurrent := state.get(state_plane("recurrent", index))) is not None:
                self.recurrent_states[index] = recurrent
                self.is_recurrent_states_initialized[index] = True

    def store(self, step: CacheStep) -> None:
        """Write the staged state back."""
        staged = {state_plane("conv", index): tensor for index, tensor in self.conv_states.items()}
        staged |= {state_plane("recurrent", index): tensor for index, tensor in self.recurrent_states.items()}
        step.store.store_state(
            self._state_layer, {name: tensor for name, tensor in staged.items() if tensor is not None}
        )

    def drop(self) -> None:
        """Be as new: hold no tensor."""
        for index in range(self.number_of_states):
            self.conv_states[index] = self.recurrent_states[index] = None
            self.is_conv_states_initialized[index] = self.is_recurrent_states_initialized[index] = False
            self.has_previous_state[index] = False


class _FullLayer(_AttentionLayer, DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Attention over all tokens."""


class _WindowLayer(_AttentionLayer, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]  # as above
    """Attention over a window."""


# The two bases of transformers' combined classes disagree about `device` and `is_croppable`; it is so in their own code.
class _StateAndFullLayer(_StateLayer, _AttentionLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[no-untyped-call, misc, override]
    """Recurrent state and attention over all tokens, in one layer."""


class _StateAndWindowLayer(_StateLayer, _AttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[no-untyped-call, misc, override]  # as above
    """Recurrent state and attention over a window, in one layer."""


CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer
"""What transformers accepts as a layer."""


def _layer(cache: HybridCache, decl: KVLayerDecl) -> CacheLayer:
    state = next((part for part in decl.parts if isinstance(part.geometry, StateGeometry)), None)
    attention = next((part for part in decl.parts if part is not state), None)
    layer = _empty_layer(state, attention)
    if attention is not None and isinstance(layer, _AttentionLayer):
        layer.bind_attention(cache, decl.layer, attention)
    if state is not None and isinstance(layer, _StateLayer):
        layer.bind_state(decl.layer)
    return layer


def _empty_layer(state: KVPart | None, attention: KVPart | None) -> CacheLayer:
    """A layer of the class that transformers expects for these parts."""
    states = 0 if state is None else _number_of_states(state.geometry.tensors())
    if attention is None:
        return DummyLayer() if state is None else _StateLayer(states)  # type: ignore[no-untyped-call]  # its __init__
    window_tokens = _window_tokens(attention.lifetime)
    if window_tokens is not None:
        return _WindowLayer(window_tokens) if state is None else _StateAndWindowLayer(window_tokens, states)
    return _FullLayer() if state is None else _StateAndFullLayer(states)  # type: ignore[no-untyped-call]  # DynamicLayer's


def _window_tokens(lifetime: Lifetime) -> int | None:
    """Tokens that transformers' cache layer keeps; of an attention chunk all that may be in it, and the mask hides the rest."""
    match lifetime:
        case WindowLifetime(tokens) | ChunkLifetime(tokens):
            return tokens
        case _:
            return None


def _number_of_states(tensors: Iterable[TensorDecl]) -> int:
    """States that transformers counts in one layer: each has at most one tensor of a kind."""
    names = {tensor.name for tensor in tensors}
    return next(
        index
        for index in range(len(names) + 1)
        if not names & {state_plane("conv", index), state_plane("recurrent", index)}
    )
