"""From layer declarations to sub-pools in chain order (rows P2, P3).

Parts of one lifetime share a sub-pool: its page holds the planes of all their layers for the same tokens, so one id serves
every layer. Two kinds of geometry in one sub-pool are refused, since one page size could not serve both well.

Chain order puts the shortest lifetime first: state, then windows from the longest, then full attention. The ends are the
bands that grow and shrink most, and full attention, which is never retired, has the arena's end to itself.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import attrs

from kvtide.plan.decl import (
    FullLifetime,
    KVLayerDecl,
    KVPart,
    Lifetime,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
)
from kvtide.plan.errors import PlanError
from kvtide.plan.unit import UnitLayout, lay_out_unit


class SubPoolKind(enum.Enum):
    """What a sub-pool's unit is tied to."""

    STATE = "state"
    WINDOW = "window"
    FULL = "full"


@attrs.frozen(kw_only=True)
class SubPool:
    """Parts of one lifetime: one kind of unit, one band of the chain."""

    name: str
    """`full`, `window-128`, `state`."""

    lifetime: Lifetime
    """Shared by every part."""

    page_tokens: int | None
    """Tokens a page; `None` for state."""

    unit: UnitLayout
    """Planes of one page or state slot."""

    @property
    def kind(self) -> SubPoolKind:
        """Full, window or state."""
        match self.lifetime:
            case FullLifetime():
                return SubPoolKind.FULL
            case WindowLifetime():
                return SubPoolKind.WINDOW
            case StateLifetime():
                return SubPoolKind.STATE

    @property
    def window_tokens(self) -> int | None:
        """Tokens a query sees, `None` where it sees all or the sub-pool holds state."""
        return self.lifetime.window_tokens if isinstance(self.lifetime, WindowLifetime) else None

    @property
    def has_sink(self) -> bool:
        """Whether page 0 is a sink: attention bands have one, padded state rows are masked instead (A8)."""
        return self.kind is not SubPoolKind.STATE

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with a plane here, ascending."""
        return tuple(sorted({plane.layer for plane in self.unit.planes}))

    @property
    def payload_bytes_per_token(self) -> int:
        """Bytes the model asked for, per token (per slot for state)."""
        return self.unit.payload_bytes // (self.page_tokens or 1)


@attrs.frozen(kw_only=True)
class KVStoragePlan:
    """The sub-pools of a model, in chain order."""

    page_tokens: int
    """Tokens of a virtual page."""

    sub_pools: tuple[SubPool, ...]
    """First grows up, last grows down, the rest float."""

    @property
    def token_sub_pools(self) -> tuple[SubPool, ...]:
        """Those whose unit is a page of tokens."""
        return tuple(pool for pool in self.sub_pools if pool.kind is not SubPoolKind.STATE)

    @property
    def state_sub_pool(self) -> SubPool | None:
        """The one that holds state slots, if the model is recurrent."""
        return next((pool for pool in self.sub_pools if pool.kind is SubPoolKind.STATE), None)

    @property
    def owner(self) -> SubPool | None:
        """The sub-pool that holds a token longest: full attention, else the longest window; `None` without attention."""
        full = next((pool for pool in self.sub_pools if pool.kind is SubPoolKind.FULL), None)
        return full or next(iter(self.token_sub_pools), None)

    def sub_pool(self, name: str) -> SubPool:
        """The sub-pool called `name`; raises `KeyError` naming those there are."""
        for pool in self.sub_pools:
            if pool.name == name:
                return pool
        raise KeyError(f"no sub-pool {name!r}; the plan has {[pool.name for pool in self.sub_pools]}")


def plan_kv_storage(layers: Iterable[KVLayerDecl], *, page_tokens: int) -> KVStoragePlan:
    """Group the parts of `layers` into sub-pools with pages of `page_tokens` tokens.

    Raises `PlanError` for no layer at all, a layer declared twice, a page size that is no positive integer, and two kinds of
    geometry with one lifetime (naming the layers of each).
    """
    if isinstance(page_tokens, bool) or not isinstance(page_tokens, int) or page_tokens <= 0:
        raise PlanError(f"page_tokens must be a positive integer, found {page_tokens!r}")
    groups: dict[Lifetime, list[tuple[int, KVPart]]] = {}
    seen: set[int] = set()
    for decl in sorted(layers, key=lambda decl: decl.layer):
        if decl.layer in seen:
            raise PlanError(f"layer {decl.layer} is declared twice")
        seen.add(decl.layer)
        for part in decl.parts:
            groups.setdefault(part.lifetime, []).append((decl.layer, part))
    if not groups:
        raise PlanError("no layer declares a part: there is nothing to store")
    state_lifetimes = [lifetime for lifetime in groups if isinstance(lifetime, StateLifetime)]
    if len(state_lifetimes) > 1:
        intervals = sorted(str(lifetime.checkpoint_interval) for lifetime in state_lifetimes)
        raise PlanError(
            f"state layers disagree on checkpoint_interval ({', '.join(intervals)}): a request has one state slot"
        )
    pools = [_sub_pool(lifetime, parts, page_tokens) for lifetime, parts in groups.items()]
    return KVStoragePlan(page_tokens=page_tokens, sub_pools=tuple(sorted(pools, key=_chain_rank)))


def _sub_pool(lifetime: Lifetime, parts: list[tuple[int, KVPart]], page_tokens: int) -> SubPool:
    layers_by_kind: dict[str, list[int]] = {}
    for layer, part in parts:
        layers_by_kind.setdefault(type(part.geometry).__name__, []).append(layer)
    name = _name(lifetime)
    if len(layers_by_kind) > 1:
        found = "; ".join(f"{kind} in layers {layers}" for kind, layers in layers_by_kind.items())
        raise PlanError(f"sub-pool {name!r} mixes kinds of geometry: {found}")
    tokens = None if isinstance(lifetime, StateLifetime) else page_tokens
    tensors: list[tuple[int, TensorDecl]] = [
        (layer, tensor) for layer, part in parts for tensor in part.geometry.tensors()
    ]
    return SubPool(name=name, lifetime=lifetime, page_tokens=tokens, unit=lay_out_unit(tensors, tokens))


def _name(lifetime: Lifetime) -> str:
    match lifetime:
        case FullLifetime():
            return SubPoolKind.FULL.value
        case WindowLifetime(window_tokens):
            return f"{SubPoolKind.WINDOW.value}-{window_tokens}"
        case StateLifetime():
            return SubPoolKind.STATE.value


def _chain_rank(pool: SubPool) -> tuple[int, int]:
    match pool.lifetime:
        case StateLifetime():
            return (0, 0)
        case WindowLifetime(window_tokens):
            return (1, -window_tokens)
        case FullLifetime():
            return (2, 0)
