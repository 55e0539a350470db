"""Plans that sizing's tests share, small enough to count by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtide.plan import (
    ChunkLifetime,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    plan_kv_storage,
)

MakePlan = Callable[..., KVStoragePlan]


def plan_with_bytes(
    page_tokens: int,
    *,
    state: int = 0,
    windows: dict[int, int] | None = None,
    chunks: dict[int, int] | None = None,
    full: int = 0,
    interval: int | None = None,
    window_page_tokens: int | None = None,
) -> KVStoragePlan:
    """A plan with so many payload bytes a slot and a token of each window, chunk and full attention; 0 leaves one out."""
    parts = []
    if state:
        tensor = TensorDecl("recurrent", (state,), DType.UINT8)
        parts.append(KVPart(StateGeometry((tensor,)), StateLifetime(interval)))
    for window_tokens, byte_count in (windows or {}).items():
        parts.append(KVPart(MLAGeometry(byte_count, 0, DType.UINT8), WindowLifetime(window_tokens)))
    for chunk_tokens, byte_count in (chunks or {}).items():
        parts.append(KVPart(MLAGeometry(byte_count, 0, DType.UINT8), ChunkLifetime(chunk_tokens)))
    if full:
        parts.append(KVPart(MLAGeometry(full, 0, DType.UINT8), FullLifetime()))
    layers = [KVLayerDecl(layer, (part,)) for layer, part in enumerate(parts)]
    return plan_kv_storage(layers, page_tokens=page_tokens, window_page_tokens=window_page_tokens)


@pytest.fixture(scope="session")
def make_plan() -> MakePlan:
    """`plan_with_bytes`."""
    return plan_with_bytes
