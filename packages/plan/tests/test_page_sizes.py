"""Pages of a size per band, whole numbers of which make an owner's page (P10)."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.plan import (
    ChunkLifetime,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    Lifetime,
    MHAGeometry,
    PlanError,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    lay_out,
    plan_kv_storage,
)


def mha(layer: int, lifetime: Lifetime) -> KVLayerDecl:
    return KVLayerDecl(layer, (KVPart(MHAGeometry(2, 8, 8, DType.BFLOAT16), lifetime),))


def state(layer: int, interval: int | None) -> KVLayerDecl:
    tensor = TensorDecl("recurrent", (4, 4), DType.FLOAT32)
    return KVLayerDecl(layer, (KVPart(StateGeometry((tensor,)), StateLifetime(interval)),))


LAYERS = [mha(0, FullLifetime()), mha(1, WindowLifetime(128)), mha(2, WindowLifetime(32)), state(3, None)]


@pytest.mark.requirement("P10")
@pytest.mark.parametrize(
    ("window_page_tokens", "pages"),
    [
        (None, [None, 64, 64, 64]),
        (16, [None, 16, 16, 64]),
        ({"window-32": 8}, [None, 64, 8, 64]),
        ({"window-32": 8, "window-128": 32}, [None, 32, 8, 64]),
        ({}, [None, 64, 64, 64]),
    ],
)
def test_windows_have_pages_of_their_own_size(window_page_tokens: Any, pages: list[int | None]) -> None:
    """A window of 128 tokens in pages of 64 wastes up to half; the owner's stay large."""
    plan = plan_kv_storage(LAYERS, page_tokens=64, window_page_tokens=window_page_tokens)
    assert [pool.page_tokens for pool in plan.sub_pools] == pages
    assert [band.page_tokens for band in lay_out(plan, 10**6).bands] == pages
    assert plan.page_tokens == 64
    for pool in plan.token_sub_pools:
        assert pool.unit.planes[0].shape[0] == pool.page_tokens
        assert plan.sub_page_ratio(pool.name) == 64 // (pool.page_tokens or 1)


@pytest.mark.requirement("P10")
def test_a_virtual_page_has_as_many_ids_in_a_band_as_sub_pages() -> None:
    """Virtual page v of the owner is the window's v × ratio + i, page 0's among them: the tables must be as long."""
    layout = lay_out(plan_kv_storage(LAYERS, page_tokens=64, window_page_tokens=16), 10**6)
    counts = {band.name: layout.id_count(band) for band in layout.bands}
    virtual = layout.virtual_page_count
    assert counts == {
        "state": layout.band("state").capacity_pages,
        "window-128": 4 * virtual,
        "window-32": 4 * virtual,
        "full": virtual,
    }
    assert virtual == 1 + layout.band("full").capacity_pages


@pytest.mark.requirement("P10")
def test_without_full_attention_the_longest_window_owns_the_virtual_pages() -> None:
    """Its page is the plan's, a multiple of every other window's."""
    plan = plan_kv_storage(LAYERS[1:3], page_tokens=32, window_page_tokens=8)
    assert [(pool.name, pool.page_tokens) for pool in plan.sub_pools] == [
        ("window-128", 32),
        ("window-32", 8),
    ]
    assert plan.owner is plan.sub_pools[0]


@pytest.mark.requirement("P10")
def test_a_window_below_its_page_and_one_beyond_any_context_are_planned() -> None:
    """Odd, not wrong: the first keeps one page or two, the second what full attention keeps."""
    plan = plan_kv_storage([mha(0, WindowLifetime(4)), mha(1, WindowLifetime(2**40))], page_tokens=64)
    assert [pool.name for pool in plan.sub_pools] == [f"window-{2**40}", "window-4"]


@pytest.mark.requirement("P10")
@pytest.mark.parametrize(
    ("layers", "pages", "text"),
    [
        (
            LAYERS,
            {"page_tokens": 64, "window_page_tokens": 24},
            "pages of 24 tokens in band 'window-128' do not divide the owner's pages of 64",
        ),
        (
            LAYERS,
            {"page_tokens": 64, "window_page_tokens": 128},
            "pages of 128 tokens in band 'window-128' do not divide the owner's pages of 64",
        ),
        (
            LAYERS,
            {"page_tokens": 64, "window_page_tokens": 0},
            "window_page_tokens must be a positive integer, found 0",
        ),
        (
            LAYERS,
            {"page_tokens": 64, "window_page_tokens": True},
            "window_page_tokens must be a positive integer, found True",
        ),
        (
            LAYERS,
            {"page_tokens": 64, "window_page_tokens": {"window-32": -1}},
            "window_page_tokens['window-32'] must be a positive integer, found -1",
        ),
        (
            LAYERS,
            {"page_tokens": 64, "window_page_tokens": {"full": 8}},
            "window_page_tokens names 'full'; windows beside the owner are ['window-128', 'window-32']",
        ),
        (
            [*LAYERS, mha(4, ChunkLifetime(96))],
            {"page_tokens": 64},
            (
                "pages of 64 tokens do not divide the attention chunk of band 'chunk-96': a page across its end would outlive "
                "it; give a smaller page, or a smaller window page"
            ),
        ),
        (
            [*LAYERS[:3], state(3, 128), mha(4, ChunkLifetime(192))],
            {"page_tokens": 64},
            (
                "checkpoint_interval = 128 and the attention chunk of 192 tokens must divide one another: checkpoints and ends of "
                "chunks would drift apart"
            ),
        ),
        (
            [*LAYERS[:3], state(3, 96)],
            {"page_tokens": 64},
            "page_tokens = 64 does not divide checkpoint_interval = 96: a checkpoint would lie inside a page",
        ),
    ],
)
def test_pages_that_do_not_divide_are_refused(
    layers: list[KVLayerDecl], pages: dict[str, Any], text: str
) -> None:
    """One line with the band and both numbers."""
    with pytest.raises(PlanError) as caught:
        plan_kv_storage(layers, **pages)
    assert str(caught.value) == text


@pytest.mark.requirement("P10")
def test_a_smaller_window_page_makes_an_attention_chunk_fit() -> None:
    """The remedy that the refusal names."""
    plan = plan_kv_storage([*LAYERS, mha(4, ChunkLifetime(96))], page_tokens=64, window_page_tokens=32)
    assert plan.sub_pool("chunk-96").page_tokens == 32
