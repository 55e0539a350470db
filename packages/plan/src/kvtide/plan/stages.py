"""Pipeline stages: which layers each one holds (rows P7, S4)."""

from __future__ import annotations

from collections.abc import Iterable

from kvtide.plan.checks import check_positive
from kvtide.plan.decl import KVLayerDecl
from kvtide.plan.errors import PlanError


def split_stages(layers: Iterable[KVLayerDecl], pp_size: int) -> tuple[tuple[KVLayerDecl, ...], ...]:
    """Consecutive layers for each of `pp_size` stages, as even as can be; the first stages hold one more where it is uneven.

    Layers keep their indices. Raises `PlanError` for more stages than layers, and where a layer shares the entries of one
    on another stage, whose bytes it could not reach.
    """
    decls = sorted(layers, key=lambda decl: decl.layer)
    check_positive("pp_size", pp_size)
    if pp_size > len(decls):
        raise PlanError(f"pp_size = {pp_size} is more than the {len(decls)} layers")
    each, more = divmod(len(decls), pp_size)
    ends = [(stage + 1) * each + min(stage + 1, more) for stage in range(pp_size)]
    stages = tuple(tuple(decls[first:end]) for first, end in zip([0, *ends], ends, strict=False))
    for stage, held in enumerate(stages):
        own = {decl.layer for decl in held}
        for decl in held:
            if decl.shares_layer is not None and decl.shares_layer not in own:
                raise PlanError(
                    f"pp_size = {pp_size} puts layer {decl.layer} on stage {stage} without layer {decl.shares_layer}, whose "
                    "entries it shares"
                )
    return stages
