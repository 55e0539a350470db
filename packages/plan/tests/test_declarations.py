"""Declarations accept what a layer can store, and refuse the rest where it is written (P1)."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MHAGeometry,
    MLAGeometry,
    PlanError,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
)

ATTENTION = KVPart(MHAGeometry(2, 4, 4, DType.BFLOAT16), FullLifetime())
WINDOW = KVPart(MHAGeometry(2, 4, 4, DType.BFLOAT16), WindowLifetime(8))
STATE = KVPart(StateGeometry((TensorDecl("recurrent", (4, 4), DType.FLOAT32),)), StateLifetime())


@pytest.mark.requirement("P1")
def test_a_layer_may_hold_an_attention_part_and_a_state_part_together() -> None:
    """Falcon-H1 has both in every layer, so one part a layer would not do."""
    decl = KVLayerDecl(3, (ATTENTION, STATE))
    assert [type(part.lifetime) for part in decl.parts] == [FullLifetime, StateLifetime]


@pytest.mark.requirement("P1")
def test_a_layer_may_store_nothing() -> None:
    """Nemotron-H counts its MLP layers among the layers."""
    assert KVLayerDecl(0, ()).parts == ()


@pytest.mark.requirement("P1")
@pytest.mark.parametrize("parts", [(ATTENTION, WINDOW), (STATE, STATE)])
def test_two_parts_of_one_kind_are_refused_naming_the_layer(parts: tuple[KVPart, ...]) -> None:
    """One layer has one key-value tensor pair and one state; a second would have no name to be addressed by."""
    with pytest.raises(
        PlanError,
        match=r"^layer 5 declares \d attention, 0 compressed and \d state parts: at most one of each$",
    ):
        KVLayerDecl(5, parts)


@pytest.mark.requirement("P1")
@pytest.mark.parametrize(
    ("geometry", "lifetime"),
    [
        (ATTENTION.geometry, StateLifetime()),
        (STATE.geometry, FullLifetime()),
        (STATE.geometry, WindowLifetime(4)),
    ],
)
def test_a_geometry_with_a_lifetime_it_cannot_have_is_refused(geometry: Any, lifetime: Any) -> None:
    """State that lived as long as a token's entry would be allocated by the page."""
    with pytest.raises(PlanError, match="cannot have"):
        KVPart(geometry, lifetime)


@pytest.mark.requirement("P1")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: MHAGeometry(0, 4, 4, DType.BFLOAT16), "MHAGeometry.kv_heads"),
        (lambda: MHAGeometry(2, -4, 4, DType.BFLOAT16), "MHAGeometry.key_dim"),
        (lambda: MHAGeometry(2, 4, True, DType.BFLOAT16), "MHAGeometry.value_dim"),
        (lambda: MLAGeometry(0, 4, DType.BFLOAT16), "MLAGeometry.latent_dim"),
        (lambda: MLAGeometry(4, -1, DType.BFLOAT16), "MLAGeometry.rope_dim"),
        (lambda: WindowLifetime(0), "WindowLifetime.window_tokens"),
        (lambda: StateLifetime(0), "StateLifetime.checkpoint_interval"),
        (lambda: KVLayerDecl(-1, ()), "KVLayerDecl.layer"),
        (lambda: TensorDecl("conv", (4, 0), DType.BFLOAT16), "'conv'"),
        (lambda: TensorDecl("", (4,), DType.BFLOAT16), "TensorDecl.name"),
        (lambda: StateGeometry(()), "StateGeometry"),
        (lambda: StateGeometry((TensorDecl("a", (1,), DType.INT8),) * 2), "twice"),
    ],
)
def test_senseless_numbers_are_refused_naming_the_field(make: Any, named: str) -> None:
    """A zero or a bool that slipped through would become a page of no bytes."""
    with pytest.raises(PlanError) as caught:
        make()
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.requirement("P1")
def test_a_latent_without_a_rotary_key_is_as_wide_as_its_rank() -> None:
    """Rope width 0 is a real geometry, not a missing value."""
    (latent,) = MLAGeometry(512, 0, DType.BFLOAT16).tensors()
    assert latent.shape == (512,)
    assert latent.byte_count == 1024


@pytest.mark.requirement("P1")
def test_keys_and_values_may_differ_in_width() -> None:
    """One width for both would overcharge such a model by the difference."""
    key, value = MHAGeometry(4, 192, 128, DType.FLOAT8_E4M3).tensors()
    assert (key.shape, value.shape) == ((4, 192), (4, 128))
    assert key.byte_count + value.byte_count == 4 * (192 + 128)


@pytest.mark.parametrize(("dtype", "byte_width"), [(DType.FLOAT32, 4), (DType.FLOAT16, 2), (DType.UINT8, 1)])
def test_element_types_have_the_width_their_name_says(dtype: DType, byte_width: int) -> None:
    """Every byte count downstream is a multiple of this."""
    assert dtype.byte_width == byte_width


def test_every_element_type_has_a_width() -> None:
    """A type without one would fail only once a model uses it."""
    assert {dtype.byte_width for dtype in DType} == {1, 2, 4}
