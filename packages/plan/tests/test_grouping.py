"""Parts of one lifetime share a sub-pool, and sub-pools stand in chain order (P2, P3)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    Lifetime,
    MHAGeometry,
    MLAGeometry,
    PlanError,
    StateGeometry,
    StateLifetime,
    SubPoolKind,
    TensorDecl,
    WindowLifetime,
    plan_kv_storage,
)


def mha(layer: int, lifetime: Lifetime, heads: int = 2) -> KVLayerDecl:
    return KVLayerDecl(layer, (KVPart(MHAGeometry(heads, 8, 8, DType.BFLOAT16), lifetime),))


def mla(layer: int, lifetime: Lifetime) -> KVLayerDecl:
    return KVLayerDecl(layer, (KVPart(MLAGeometry(16, 8, DType.BFLOAT16), lifetime),))


def state(layer: int, interval: int | None = None) -> KVLayerDecl:
    tensors = (
        TensorDecl("conv", (5, 3), DType.BFLOAT16),
        TensorDecl("recurrent", (2, 4, 4), DType.FLOAT32),
    )
    return KVLayerDecl(layer, (KVPart(StateGeometry(tensors), StateLifetime(interval)),))


@pytest.mark.requirement("P2")
def test_layers_of_one_lifetime_share_a_page_even_when_their_shapes_differ() -> None:
    """One id serves all layers of the sub-pool, so a page holds the planes of each for the same tokens."""
    plan = plan_kv_storage([mha(0, FullLifetime(), heads=1), mha(1, FullLifetime(), heads=3)], page_tokens=4)
    (pool,) = plan.sub_pools
    assert [(plane.layer, plane.name, plane.shape) for plane in pool.unit.planes] == [
        (0, "key", (4, 1, 8)),
        (0, "value", (4, 1, 8)),
        (1, "key", (4, 3, 8)),
        (1, "value", (4, 3, 8)),
    ]
    assert pool.payload_bytes_per_token == (1 + 3) * 2 * 8 * 2


@pytest.mark.requirement("P2")
def test_a_layer_with_two_parts_appears_in_two_sub_pools() -> None:
    """Its attention entries are paged and its state is not."""
    both = KVLayerDecl(0, (*mha(0, FullLifetime()).parts, *state(0).parts))
    plan = plan_kv_storage([both], page_tokens=4)
    assert [(pool.name, pool.layers) for pool in plan.sub_pools] == [("state", (0,)), ("full", (0,))]


@pytest.mark.requirement("P2")
def test_two_kinds_of_geometry_in_one_sub_pool_are_refused_naming_the_layers() -> None:
    """The reader has to find the layers to change; one page size could not serve both kinds well."""
    layers = [mha(0, FullLifetime()), mla(1, FullLifetime()), mha(4, FullLifetime())]
    with pytest.raises(PlanError) as caught:
        plan_kv_storage(layers, page_tokens=4)
    assert str(caught.value) == (
        "sub-pool 'full' mixes kinds of geometry: MHAGeometry in layers [0, 4]; MLAGeometry in layers [1]"
    )


@pytest.mark.requirement("P2")
def test_the_same_kinds_with_two_lifetimes_are_two_sub_pools() -> None:
    """The refusal is about sharing a page, not about a model that has both kinds."""
    plan = plan_kv_storage([mha(0, WindowLifetime(8)), mla(1, FullLifetime())], page_tokens=4)
    assert [pool.name for pool in plan.sub_pools] == ["window-8", "full"]


@pytest.mark.requirement("P3")
def test_the_chain_is_state_then_windows_from_the_longest_then_full() -> None:
    """The order is the rank of the lifetimes, whatever order layers are declared in."""
    layers = [
        mha(0, FullLifetime()),
        mha(1, WindowLifetime(16)),
        state(2),
        mha(3, WindowLifetime(4096)),
        mha(4, WindowLifetime(128)),
    ]
    for seed in range(20):
        shuffled = random.Random(seed).sample(layers, len(layers))
        names = [pool.name for pool in plan_kv_storage(shuffled, page_tokens=4).sub_pools]
        assert names == ["state", "window-4096", "window-128", "window-16", "full"]


@pytest.mark.requirement("P2")
def test_the_order_of_declarations_changes_no_byte() -> None:
    """Ranks that read one config must agree on every offset."""
    layers = [mha(layer, FullLifetime(), heads=layer + 1) for layer in range(5)]
    assert plan_kv_storage(layers, page_tokens=4) == plan_kv_storage(reversed(layers), page_tokens=4)


@pytest.mark.parametrize(
    ("layers", "owner", "state_name"),
    [
        ([mha(0, WindowLifetime(8)), mha(1, FullLifetime()), state(2)], "full", "state"),
        ([mha(0, WindowLifetime(8)), mha(1, WindowLifetime(32))], "window-32", None),
        ([state(0)], None, "state"),
    ],
)
def test_the_owner_is_the_sub_pool_that_holds_a_token_longest(
    layers: list[KVLayerDecl], owner: str | None, state_name: str | None
) -> None:
    """Virtual ids are minted for it, so an all-window model needs one too, and a recurrent one none."""
    plan = plan_kv_storage(layers, page_tokens=4)
    assert (plan.owner and plan.owner.name, plan.state_sub_pool and plan.state_sub_pool.name) == (
        owner,
        state_name,
    )


@pytest.mark.requirement("P2", "A8")
def test_a_state_slot_has_no_page_tokens_and_no_sink() -> None:
    """A slot holds one request; padded state rows are masked instead of sunk."""
    (pool,) = plan_kv_storage([state(0), state(1)], page_tokens=4).sub_pools
    assert pool.kind is SubPoolKind.STATE
    assert (pool.page_tokens, pool.has_sink) == (None, False)
    assert [plane.shape for plane in pool.unit.planes] == [(5, 3), (2, 4, 4)] * 2
    assert pool.payload_bytes_per_token == 2 * (5 * 3 * 2 + 2 * 4 * 4 * 4)


@pytest.mark.requirement("P2")
@pytest.mark.parametrize(
    ("layers", "page_tokens", "text"),
    [
        ([], 4, "no layer declares a part: there is nothing to store"),
        ([KVLayerDecl(0, ())], 4, "no layer declares a part: there is nothing to store"),
        ([mha(3, FullLifetime()), mha(3, FullLifetime())], 4, "layer 3 is declared twice"),
        ([mha(0, FullLifetime())], 0, "page_tokens must be a positive integer, found 0"),
        ([mha(0, FullLifetime())], True, "page_tokens must be a positive integer, found True"),
        ([mha(0, FullLifetime())], 4.0, "page_tokens must be a positive integer, found 4.0"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(layers: Any, page_tokens: Any, text: str) -> None:
    """The line names the layer or the value, so that nobody has to read the planner."""
    with pytest.raises(PlanError) as caught:
        plan_kv_storage(layers, page_tokens=page_tokens)
    assert str(caught.value) == text


@pytest.mark.requirement("P2")
def test_state_layers_that_disagree_on_checkpoints_are_refused() -> None:
    """A request has one state slot, so one grid of checkpoints."""
    with pytest.raises(PlanError, match=r"disagree on checkpoint_interval \(256, None\)"):
        plan_kv_storage([state(0, 256), state(1)], page_tokens=4)


def test_asking_for_a_sub_pool_that_is_not_there_names_those_that_are() -> None:
    """A misspelt band name is the caller's slip; the remedy is in the text."""
    plan = plan_kv_storage([mha(0, FullLifetime()), state(1)], page_tokens=4)
    assert plan.sub_pool("state").kind is SubPoolKind.STATE
    with pytest.raises(KeyError, match=r"no sub-pool 'window'; the plan has \['state', 'full'\]"):
        plan.sub_pool("window")
