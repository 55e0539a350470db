"""What each layer stores: the vocabulary in which a model is declared (rows P1, P6).

A layer has *parts*. A part is a *geometry*, the tensors it writes per token or per request, and a *lifetime*, how long a
token's entry is needed. A layer may hold an attention part and a state part together.

    KVLayerDecl(0, (KVPart(MHAGeometry(8, 64, 64, DType.BFLOAT16), WindowLifetime(128)),))

Everything downstream (sub-pools, bytes, prices, views) is derived from these declarations.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import attrs

from kvtide.plan.dtypes import DType
from kvtide.plan.errors import PlanError


def _positive(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise PlanError(
            f"{type(instance).__name__}.{attribute.name} must be a positive integer, found {value!r}"
        )


def _not_negative(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(
            f"{type(instance).__name__}.{attribute.name} must be an integer of 0 or more, found {value!r}"
        )


@attrs.frozen
class TensorDecl:
    """One tensor of a geometry: the shape that one token (attention) or one request (state) stores."""

    name: str
    """Name of the plane, unique within the geometry: `key`, `value`, `latent`, `conv`, `recurrent`, …"""

    shape: tuple[int, ...]
    """Shape per token or per request, e.g. `(kv_heads, key_dim)`."""

    dtype: DType
    """Element type."""

    def __attrs_post_init__(self) -> None:
        if not self.name:
            raise PlanError("TensorDecl.name must not be empty")
        if any(isinstance(size, bool) or not isinstance(size, int) or size <= 0 for size in self.shape):
            raise PlanError(
                f"tensor {self.name!r} has shape {self.shape}: every size must be a positive integer"
            )

    @property
    def byte_count(self) -> int:
        """Bytes per token or per request, without alignment."""
        return math.prod(self.shape) * self.dtype.byte_width


@attrs.frozen
class MHAGeometry:
    """Keys and values per head (multi-head, grouped-query and multi-query attention)."""

    kv_heads: int = attrs.field(validator=_positive)
    """Key-value heads on this rank."""

    key_dim: int = attrs.field(validator=_positive)
    """Width of one head's key."""

    value_dim: int = attrs.field(validator=_positive)
    """Width of one head's value."""

    dtype: DType
    """Element type of both."""

    def tensors(self) -> tuple[TensorDecl, ...]:
        """`key [kv_heads, key_dim]` and `value [kv_heads, value_dim]` per token."""
        return (
            TensorDecl("key", (self.kv_heads, self.key_dim), self.dtype),
            TensorDecl("value", (self.kv_heads, self.value_dim), self.dtype),
        )


@attrs.frozen
class MLAGeometry:
    """A compressed latent shared by all heads, with its rotary key beside it (DeepSeek-V2, arXiv 2405.04434)."""

    latent_dim: int = attrs.field(validator=_positive)
    """Rank of the compressed KV (`kv_lora_rank`)."""

    rope_dim: int = attrs.field(validator=_not_negative)
    """Width of the rotary key; 0 where the model has none."""

    dtype: DType
    """Element type."""

    def tensors(self) -> tuple[TensorDecl, ...]:
        """`latent [latent_dim + rope_dim]` per token; the rotary key is its last `rope_dim` columns."""
        return (TensorDecl("latent", (self.latent_dim + self.rope_dim,), self.dtype),)


@attrs.frozen
class StateGeometry:
    """Recurrent state of one request: any number of tensors, each with a dtype of its own."""

    state_tensors: tuple[TensorDecl, ...]
    """Tensors of one state slot, e.g. `conv` in bf16 and `recurrent` in fp32."""

    def __attrs_post_init__(self) -> None:
        if not self.state_tensors:
            raise PlanError("StateGeometry needs at least one tensor")
        names = [tensor.name for tensor in self.state_tensors]
        if len(set(names)) != len(names):
            raise PlanError(f"StateGeometry names a tensor twice: {names}")

    def tensors(self) -> tuple[TensorDecl, ...]:
        """The tensors of one slot."""
        return self.state_tensors


Geometry: TypeAlias = MHAGeometry | MLAGeometry | StateGeometry
"""What a part stores."""


@attrs.frozen
class FullLifetime:
    """Every token's entry lives as long as its request."""


@attrs.frozen
class WindowLifetime:
    """A token's entry is read by itself and the `window_tokens - 1` tokens after it."""

    window_tokens: int = attrs.field(validator=_positive)
    """Tokens a query sees, its own included."""


@attrs.frozen
class StateLifetime:
    """One state per request, overwritten as it advances."""

    checkpoint_interval: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_positive)
    )
    """Tokens between the states a prefix cache may keep; `None` without checkpoints."""


Lifetime: TypeAlias = FullLifetime | WindowLifetime | StateLifetime
"""How long a part's entries are needed."""


@attrs.frozen
class KVPart:
    """A geometry and its lifetime."""

    geometry: Geometry
    """Tensors stored."""

    lifetime: Lifetime
    """How long they are needed."""

    def __attrs_post_init__(self) -> None:
        if isinstance(self.geometry, StateGeometry) != isinstance(self.lifetime, StateLifetime):
            raise PlanError(
                f"{type(self.geometry).__name__} cannot have {type(self.lifetime).__name__}: "
                "state goes with StateLifetime, attention with FullLifetime or WindowLifetime"
            )


@attrs.frozen
class KVLayerDecl:
    """What one layer stores."""

    layer: int = attrs.field(validator=_not_negative)
    """Index of the layer in the model."""

    parts: tuple[KVPart, ...]
    """At most one attention part and one state part; empty for a layer that stores nothing."""

    def __attrs_post_init__(self) -> None:
        state_count = sum(isinstance(part.lifetime, StateLifetime) for part in self.parts)
        if state_count > 1 or len(self.parts) - state_count > 1:
            raise PlanError(
                f"layer {self.layer} declares {len(self.parts) - state_count} attention and {state_count} "
                "state parts: at most one of each"
            )
