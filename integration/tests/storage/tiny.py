"""Storages so small that everything they can do can be tried: every unit of every band has 16 bytes, a page one token."""

from __future__ import annotations

from kvtide.arena import CPUDevice, KVArena
from kvtide.ledger import CheckLevel
from kvtide.plan import (
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
    lay_out,
    plan_kv_storage,
)
from kvtide.sizing import ServingPolicy, SizedPlan
from kvtide.storage import KVStorage, Overcommit, StorageSettings

UNIT_BYTES = 16
CHECKED = StorageSettings(check_level=CheckLevel.STRICT)


def tiny_plan(*, window: int | None = None, window_layers: int = 1, state: bool = False) -> KVStoragePlan:
    """Full attention, one window and a state, each of one layer; the window's units are as many times larger as it has layers."""
    part = MLAGeometry(UNIT_BYTES // 4, 0, DType.FLOAT32)
    layers = [KVLayerDecl(0, (KVPart(part, FullLifetime()),))]
    if window is not None:
        lifetime = WindowLifetime(window)
        layers += [KVLayerDecl(1 + layer, (KVPart(part, lifetime),)) for layer in range(window_layers)]
    if state:
        tensors = (TensorDecl("recurrent", (UNIT_BYTES // 4,), DType.FLOAT32),)
        layers.append(KVLayerDecl(len(layers), (KVPart(StateGeometry(tensors), StateLifetime()),)))
    return plan_kv_storage(layers, page_tokens=1)


def tiny_storage(
    plan: KVStoragePlan,
    units: int,
    *,
    rows: int = 3,
    chunk_tokens: int = 4,
    context_tokens: int = 16,
    policy: ServingPolicy | None = None,
    overcommit: Overcommit | None = None,
) -> KVStorage:
    """A storage whose arena has room for exactly `units` units, whatever bands they are of."""
    prefix_bytes = lay_out(plan, 64 * UNIT_BYTES).prefix_bytes
    arena_bytes = prefix_bytes + units * UNIT_BYTES
    sized = SizedPlan(
        plan=plan,
        layout=lay_out(plan, arena_bytes),
        budget_bytes=arena_bytes,
        fixed=(),
        targets=(),
        max_running_requests=rows,
        max_context_tokens=context_tokens,
        chunk_tokens=chunk_tokens,
        policy=ServingPolicy() if policy is None else policy,
        concurrency=1,
    )
    return KVStorage(
        sized,
        CPUDevice(KVArena.allocate(arena_bytes)),
        check_level=CHECKED.check_level,
        overcommit=overcommit,
    )
