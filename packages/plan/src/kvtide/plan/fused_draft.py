"""A draft whose layers store into the target's sub-pools (row P4)."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvtide.plan.decl import KVLayerDecl
from kvtide.plan.errors import PlanError
from kvtide.plan.lifetime import StateLifetime


def place_fused_draft(target: Iterable[KVLayerDecl], draft: Iterable[KVLayerDecl]) -> tuple[KVLayerDecl, ...]:
    """One model's declarations out of a target's and its draft's.

    The draft's layers are numbered on behind the target's. Planning then does the rest by lifetime: full layers join the
    target's full sub-pool, a window that the target has joins it, another becomes a band of its own. Recurrent layers join
    the target's state slot and its grid of checkpoints: a rejected token must be undone from one.

    Raises `PlanError` where the draft has state and the target has none, or none with checkpoints.
    """
    target, draft = tuple(target), tuple(draft)
    first = 1 + max((decl.layer for decl in target), default=-1)
    interval = _target_interval(target, draft)
    return (*target, *(_fused(decl, first, interval) for decl in draft))


def _state_lifetimes(layers: Iterable[KVLayerDecl]) -> list[tuple[int, StateLifetime]]:
    return [
        (decl.layer, part.lifetime)
        for decl in layers
        for part in decl.parts
        if isinstance(part.lifetime, StateLifetime)
    ]


def _target_interval(target: tuple[KVLayerDecl, ...], draft: tuple[KVLayerDecl, ...]) -> int | None:
    recurrent = [layer for layer, _ in _state_lifetimes(draft)]
    intervals = {lifetime.checkpoint_interval for _, lifetime in _state_lifetimes(target)}
    if recurrent and not intervals:
        raise PlanError(
            f"draft layers {recurrent} have recurrent state, and the target has no state band to join"
        )
    if recurrent and intervals == {None}:
        raise PlanError(
            f"draft layers {recurrent} have recurrent state, and the target's states have no checkpoints: "
            "give the target a checkpoint_interval"
        )
    return next(iter(intervals), None)


def _fused(decl: KVLayerDecl, first: int, interval: int | None) -> KVLayerDecl:
    parts = tuple(
        attrs.evolve(part, lifetime=StateLifetime(interval))
        if isinstance(part.lifetime, StateLifetime)
        else part
        for part in decl.parts
    )
    shares = None if decl.shares_layer is None else first + decl.shares_layer
    return KVLayerDecl(first + decl.layer, parts, shares_layer=shares, is_draft=True)
