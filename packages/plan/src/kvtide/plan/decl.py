"""What each layer stores: the vocabulary in which a model is declared (rows P1, P6).

A layer has *parts*. A part is a *geometry*, the tensors it writes per token or per request, and a *lifetime*, how long a
token's entry is needed. A layer may hold an attention part, a compressed chain and a state part together, or use another
layer's attention part instead of one of its own.

    KVLayerDecl(0, (KVPart(MHAGeometry(8, 64, 64, DType.BFLOAT16), WindowLifetime(128)),))

Everything downstream (sub-pools, bytes, prices, views) is derived from these declarations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from kvtide.plan.checks import not_negative
from kvtide.plan.errors import PlanError
from kvtide.plan.geometry import CompressedGeometry, Geometry, StateGeometry
from kvtide.plan.lifetime import FullLifetime, Lifetime, StateLifetime


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
                "state goes with StateLifetime, attention with FullLifetime, WindowLifetime or ChunkLifetime"
            )
        if isinstance(self.geometry, CompressedGeometry) and not isinstance(self.lifetime, FullLifetime):
            raise PlanError(
                f"CompressedGeometry cannot have {type(self.lifetime).__name__}: "
                "a compressed chain keeps every entry, FullLifetime"
            )


@attrs.frozen
class KVLayerDecl:
    """What one layer stores."""

    layer: int = attrs.field(validator=not_negative)
    """Index of the layer in the model; a fused draft's layers are numbered on behind the target's."""

    parts: tuple[KVPart, ...]
    """At most one attention part, one compressed chain and one state part; empty for a layer that stores nothing."""

    shares_layer: int | None = attrs.field(
        default=None, kw_only=True, validator=attrs.validators.optional(not_negative)
    )
    """Layer whose attention entries this one reads instead of storing its own (Gemma 4 E2B); `None` for its own."""

    is_draft: bool = attrs.field(default=False, kw_only=True)
    """Whether the layer belongs to a fused draft, whose writes a target's forward does not promise (row A5)."""

    def __attrs_post_init__(self) -> None:
        states = sum(isinstance(part.geometry, StateGeometry) for part in self.parts)
        compressed = sum(isinstance(part.geometry, CompressedGeometry) for part in self.parts)
        attention = len(self.parts) - states - compressed
        if max(states, compressed, attention) > 1:
            raise PlanError(
                f"layer {self.layer} declares {attention} attention, {compressed} compressed and {states} state parts: "
                "at most one of each"
            )
        if self.shares_layer is not None and attention + compressed:
            raise PlanError(
                f"layer {self.layer} declares attention of its own and shares layer {self.shares_layer}'s: one or the other"
            )


def page_multiple(layers: Iterable[KVLayerDecl]) -> int:
    """The least page that holds whole entries of every compressed chain: every page size must be a multiple; 1 without."""
    strides = {
        part.geometry.tokens_per_entry
        for decl in layers
        for part in decl.parts
        if isinstance(part.geometry, CompressedGeometry)
    }
    return math.lcm(*strides)
