"""From a Hugging Face model to layer declarations: what its cache layers really hold, not what a config says they should.

A config would have to be understood family by family, and transformers stores more than a serving kernel does (a
convolution's state has `conv_kernel` columns, not one fewer; recurrent state is fp32 in a bf16 model). So a few tokens are
run through the model with transformers' own cache, and the shapes and types of its tensors are read off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from kvtide.engine.errors import EngineError
from kvtide.plan import (
    ChunkLifetime,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MHAGeometry,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
)

PROBE_TOKENS = 6
"""Tokens of the probe: more than one, so that it is a prefill."""

KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Their tensors are all declared. Other classes, subclasses of these among them, keep more (an indexer's keys, scales)."""


def declare_layers(model: PreTrainedModel) -> tuple[KVLayerDecl, ...]:
    """What each layer of `model` stores. Runs one forward of a few tokens.

    Raises `EngineError` for a cache layer that keeps what a declaration cannot say yet, naming the layer and its class.
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    token_ids = torch.ones((1, PROBE_TOKENS), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token_ids, cache=cache, use_cache=True)
    kinds, _ = get_layer_types_and_kwargs(config)
    return tuple(
        KVLayerDecl(index, tuple(_parts(index, layer, kind, config)))
        for index, (layer, kind) in enumerate(zip(cache.layers, kinds, strict=True))
    )


def with_checkpoints(layers: Sequence[KVLayerDecl], interval_tokens: int) -> tuple[KVLayerDecl, ...]:
    """The same layers, whose states a prefix tree may keep every `interval_tokens`."""
    lifetime = StateLifetime(interval_tokens)
    return tuple(
        attrs.evolve(
            layer,
            parts=tuple(
                attrs.evolve(part, lifetime=lifetime) if isinstance(part.lifetime, StateLifetime) else part
                for part in layer.parts
            ),
        )
        for layer in layers
    )


def state_plane(kind: str, index: int) -> str:
    """Plane of a layer's `index`-th `conv` or `recurrent` tensor; few layers have more than one of a kind."""
    return kind if index == 0 else f"{kind}_{index}"


def _parts(index: int, layer: object, kind: str, config: PreTrainedConfig) -> Iterator[KVPart]:
    if isinstance(layer, DummyLayer):
        return
    if type(layer) not in KNOWN_LAYERS:
        known = ", ".join(kind.__name__ for kind in KNOWN_LAYERS)
        raise EngineError(
            f"layer {index} keeps a {type(layer).__name__}, whose tensors kvtide cannot declare; known are {known}"
        )
    if isinstance(layer, CacheLayerMixin) and layer.keys is not None and layer.values is not None:
        yield KVPart(_attention_geometry(layer.keys, layer.values, config), _attention_lifetime(layer, kind))
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        tensors = tuple(_state_tensors(layer))
        if tensors:
            yield KVPart(StateGeometry(tensors), StateLifetime())


def _attention_lifetime(layer: CacheLayerMixin, kind: str) -> FullLifetime | WindowLifetime | ChunkLifetime:
    """A window's layer keeps one token fewer than a query sees: the query brings its own.

    So does an attention chunk's, in transformers, with a mask on top; only the layer's `kind` tells them apart.
    """
    if isinstance(layer, DynamicSlidingWindowLayer):
        if kind == "chunked_attention":
            return ChunkLifetime(layer.sliding_window)
        return WindowLifetime(layer.sliding_window)
    return FullLifetime()


def _attention_geometry(
    keys: torch.Tensor, values: torch.Tensor, config: PreTrainedConfig
) -> MHAGeometry | MLAGeometry:
    """Geometry of `keys` and `values`, `[1, kv_heads, tokens, width]`.

    transformers caches a latent as one head of keys and its rotary part as one head of values.
    """
    kv_heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    latent = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
    if kv_heads == 1 and latent == (key_dim, value_dim):
        return MLAGeometry(latent_dim=key_dim, rope_dim=value_dim, dtype=_dtype(keys))
    return MHAGeometry(kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, dtype=_dtype(keys))


def _state_tensors(layer: LinearAttentionCacheLayerMixin) -> Iterator[TensorDecl]:
    for kind, tensors in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
        for index, tensor in tensors.items():
            if tensor is not None:
                yield TensorDecl(state_plane(kind, index), tuple(tensor.shape[1:]), _dtype(tensor))


def _dtype(tensor: torch.Tensor) -> DType:
    return DType(str(tensor.dtype).removeprefix("torch."))
