"""What two other policies would hold on the same bytes: our models of them, not measurements of any engine.

*Static split*: each kind has a pool of its own, divided once for requests of one length, exactly in proportion to what such a
request needs: better than an operator could know. Bytes never change hands.

*Single page size*: one pool of equal pages for every kind. Layers form groups of as many as the rarest kind has; a page holds
one unit of a group, and is as large as the largest kind needs, so the others put more tokens into theirs, or leave the rest
empty. A state takes a page a group.
"""

from __future__ import annotations

import attrs

from kvtide.plan import ArenaLayout, KVStoragePlan, SubPool
from kvtide.sizing import KVDemand, ServingPolicy, context_demand


def static_split_requests(layout: ArenaLayout, reference: KVDemand, demand: KVDemand) -> int:
    """Requests of `demand` in pools divided for requests of `reference`."""
    room = layout.arena_bytes - layout.prefix_bytes
    shares = [band.unit_bytes * units for band, units in zip(layout.bands, reference.units, strict=True)]
    pools = [
        room * share // sum(shares) // band.unit_bytes
        for band, share in zip(layout.bands, shares, strict=True)
    ]
    return min(pool // units for pool, units in zip(pools, demand.units, strict=True) if units)


@attrs.frozen(kw_only=True)
class SinglePage:
    """A pool of equal pages."""

    page_bytes: int
    """Bytes of each."""

    group_layers: int
    """Layers of a group."""

    page_tokens: dict[str, int]
    """Tokens that a page of each attention kind holds, by sub-pool."""

    groups: dict[str, int]
    """Groups of each kind."""


def single_page(plan: KVStoragePlan) -> SinglePage:
    """The equal pages that would serve `plan`."""
    group_layers = min(len(pool.layers) for pool in plan.sub_pools)
    layer_bytes = max(_layer_bytes(pool) for pool in plan.sub_pools)
    return SinglePage(
        page_bytes=layer_bytes * group_layers,
        group_layers=group_layers,
        page_tokens={
            pool.name: pool.page_tokens * (layer_bytes // _layer_bytes(pool))
            for pool in plan.sub_pools
            if pool.page_tokens is not None
        },
        groups={pool.name: -(-len(pool.layers) // group_layers) for pool in plan.sub_pools},
    )


def single_page_requests(
    plan: KVStoragePlan,
    arena_bytes: int,
    *,
    context_tokens: int,
    chunk_tokens: int,
    policy: ServingPolicy,
) -> int:
    """Requests of `context_tokens` in a pool of equal pages of `arena_bytes`."""
    pages = single_page(plan)
    needed = 0
    for pool in plan.sub_pools:
        (units,) = context_demand(
            only(pool, pages.page_tokens.get(pool.name, plan.page_tokens)),
            context_tokens=context_tokens,
            chunk_tokens=chunk_tokens,
            # Its retention floor rests on pages that divide the checkpoint interval, which these need not.
            policy=attrs.evolve(policy, strategy=type(policy.strategy).NONE),
        ).units
        needed += units * pages.groups[pool.name]
    return arena_bytes // pages.page_bytes // needed


def only(pool: SubPool, page_tokens: int) -> KVStoragePlan:
    """A plan of one sub-pool, with pages of another size: its demand is that of the same layers in such pages."""
    own = None if pool.page_tokens is None else page_tokens
    return KVStoragePlan(page_tokens=page_tokens, sub_pools=(attrs.evolve(pool, page_tokens=own),))


def _layer_bytes(pool: SubPool) -> int:
    """Bytes of a unit in the layer that needs most."""
    by_layer: dict[int, int] = {}
    for plane in pool.unit.planes:
        by_layer[plane.layer] = by_layer.get(plane.layer, 0) + plane.byte_count
    return max(by_layer.values())
