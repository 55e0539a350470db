"""A draft's layers in the target's sub-pools, and what a prefix tree keeps of each (P4, P5)."""

from __future__ import annotations

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
    TensorDecl,
    TreeSlot,
    WindowLifetime,
    place_fused_draft,
    plan_kv_storage,
)


def mha(layer: int, lifetime: Lifetime) -> KVLayerDecl:
    return KVLayerDecl(layer, (KVPart(MHAGeometry(2, 8, 8, DType.BFLOAT16), lifetime),))


def state(layer: int, interval: int | None = None) -> KVLayerDecl:
    tensor = TensorDecl("recurrent", (4, 4), DType.FLOAT32)
    return KVLayerDecl(layer, (KVPart(StateGeometry((tensor,)), StateLifetime(interval)),))


TARGET = [mha(0, FullLifetime()), mha(1, WindowLifetime(128)), mha(2, WindowLifetime(64))]


@pytest.mark.requirement("P4")
def test_full_layers_of_a_draft_join_the_targets_pages() -> None:
    """One id then serves both, and the draft's memory is never short where the target's is not."""
    fused = place_fused_draft(TARGET, [mha(0, FullLifetime()), mha(1, WindowLifetime(64))])
    plan = plan_kv_storage(fused, page_tokens=4)
    assert [(pool.name, pool.layers, pool.is_draft) for pool in plan.sub_pools] == [
        ("window-128", (1,), False),
        ("window-64", (2, 4), False),
        ("full", (0, 3), False),
    ]
    assert [decl.is_draft for decl in fused] == [False] * 3 + [True] * 2


@pytest.mark.requirement("P4")
def test_a_window_that_the_target_lacks_becomes_a_band_of_its_own() -> None:
    """Its pages live for another time than any of the target's."""
    plan = plan_kv_storage(place_fused_draft(TARGET, [mha(0, WindowLifetime(256))]), page_tokens=4)
    assert [(pool.name, pool.layers, pool.is_draft) for pool in plan.sub_pools] == [
        ("window-256", (3,), True),
        ("window-128", (1,), False),
        ("window-64", (2,), False),
        ("full", (0,), False),
    ]


@pytest.mark.requirement("P4")
def test_recurrent_draft_layers_join_the_targets_slot_and_grid() -> None:
    """A rejected token is undone from a checkpoint, so the draft's state needs the target's grid."""
    fused = place_fused_draft([mha(0, FullLifetime()), state(1, 64)], [state(0, None), state(1, 128)])
    plan = plan_kv_storage(fused, page_tokens=4)
    assert plan.sub_pool("state").layers == (1, 2, 3)
    assert plan.checkpoint_interval == 64


@pytest.mark.requirement("P4")
@pytest.mark.parametrize(
    ("target", "text"),
    [
        (TARGET, "draft layers [0, 2] have recurrent state, and the target has no state band to join"),
        (
            [*TARGET, state(3)],
            (
                "draft layers [0, 2] have recurrent state, and the target's states have no checkpoints: "
                "give the target a checkpoint_interval"
            ),
        ),
    ],
)
def test_recurrent_draft_layers_are_refused_at_startup_otherwise(
    target: list[KVLayerDecl], text: str
) -> None:
    """Found out at the first rejected token, it would be a wrong answer."""
    with pytest.raises(PlanError) as caught:
        place_fused_draft(target, [state(0), mha(1, FullLifetime()), state(2)])
    assert str(caught.value) == text


@pytest.mark.requirement("P4", "P2")
def test_a_draft_of_another_kind_is_refused_naming_the_drafts_layers() -> None:
    """Its pages would need another size; the numbers in the text are the fused ones, so it says which are the draft's."""
    latent = KVLayerDecl(0, (KVPart(MLAGeometry(16, 4, DType.BFLOAT16), FullLifetime()),))
    with pytest.raises(PlanError) as caught:
        plan_kv_storage(place_fused_draft(TARGET, [latent]), page_tokens=4)
    assert str(caught.value) == (
        "sub-pool 'full' mixes kinds of geometry: MHAGeometry in layers [0]; MLAGeometry in layers [3]; "
        "the draft's layers are [3]"
    )


@pytest.mark.requirement("P4", "P6")
def test_layers_that_share_within_a_draft_are_renumbered_with_it() -> None:
    """Its layer 0 is the target's number of layers."""
    fused = place_fused_draft(TARGET, [mha(0, FullLifetime()), KVLayerDecl(1, (), shares_layer=0)])
    assert plan_kv_storage(fused, page_tokens=4).shared_layers == ((4, 3),)


@pytest.mark.requirement("P5")
def test_tree_slots_are_full_then_the_primary_window_then_the_others_then_state() -> None:
    """The tree takes the first window for its generic one, so a draft's longer window must not come before it."""
    target = [*TARGET, state(3, 64)]
    fused = place_fused_draft(target, [mha(0, WindowLifetime(4096)), mha(1, WindowLifetime(96))])
    assert plan_kv_storage(fused, page_tokens=4).tree_slots == (
        TreeSlot("full", None),
        TreeSlot("window-128", 127),
        TreeSlot("window-4096", 4095),
        TreeSlot("window-96", 95),
        TreeSlot("window-64", 63),
        TreeSlot("state", None),
    )


@pytest.mark.requirement("P5")
def test_tree_slots_of_models_that_lack_a_kind() -> None:
    """A window that only the draft has is no primary, and a recurrent model has one slot."""
    only_draft_windows = place_fused_draft([mha(0, FullLifetime())], [mha(0, WindowLifetime(8))])
    plan = plan_kv_storage(only_draft_windows, page_tokens=4)
    assert [slot.sub_pool for slot in plan.tree_slots] == ["full", "window-8"]
    assert plan_kv_storage([state(0)], page_tokens=4).tree_slots == (TreeSlot("state", None),)
    all_windows = plan_kv_storage([mha(0, WindowLifetime(8)), mha(1, WindowLifetime(16))], page_tokens=4)
    assert [slot.sub_pool for slot in all_windows.tree_slots] == ["window-16", "window-8"]
