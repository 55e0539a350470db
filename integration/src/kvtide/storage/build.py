"""From a plan and a budget to a storage: size, allocate, construct (row K1)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtide.arena import CPUDevice, KVArena, TensorDevice
from kvtide.ledger import CheckLevel
from kvtide.plan import MOVE_SCRATCH_BYTES, KVStoragePlan
from kvtide.sizing import ServingPolicy, size_plan
from kvtide.storage.storage import KVStorage
from kvtide.storage.supported import check_policy, check_supported

PLAIN_POLICY = ServingPolicy()
"""Neither overlap nor sharing nor drafts."""


def build_kv_storage(
    plan: KVStoragePlan,
    *,
    budget_bytes: int,
    max_running_requests: int,
    max_context_tokens: int,
    chunk_tokens: int,
    state_slots: int | None = None,
    make_device: Callable[[KVArena], TensorDevice] = CPUDevice,
    memory: torch.device | str = "cpu",
    scratch_bytes: int = MOVE_SCRATCH_BYTES,
    writes_whole_pages: bool = False,
    policy: ServingPolicy = PLAIN_POLICY,
    check_level: CheckLevel = CheckLevel.OFF,
) -> KVStorage:
    """A storage whose arena, mirrors and scratch lie within `budget_bytes`.

    Args:
        plan: the model's sub-pools, from `kvtide.plan.plan_kv_storage`.
        budget_bytes: bytes of memory to use in all.
        max_running_requests: rows, the most requests admitted at once.
        max_context_tokens: length of the longest request, output included.
        chunk_tokens: longest prefill chunk that `prepare_step` is asked for.
        state_slots: boot target of the state band; by default a share of the chain, at most one for each row.
        make_device: the device to drive over the arena; by default the CPU device. For a GPU,
            `partial(CUDADevice, scratch_bytes=…)`.
        memory: where the arena is allocated, "cuda" for a GPU.
        scratch_bytes: what the device holds beside the arena for moves.
        writes_whole_pages: whether every forward writes its tokens' entries in every layer before any kernel loads their pages. Pages
            that a step fills are then handed out without being zeroed first. A draft whose layers run apart does not.
        policy: how the engine serves. With overlap, a row's next step may be prepared before its last one is processed; requests are
            priced for it.
        check_level: how much is checked beyond what always is.

    Raises:
        StorageError: a plan, policy or device that the storage cannot run, such as several page sizes, drafts, or memory whose
            work has no streams.
        kvtide.sizing.SizingError: the budget is below the floor of one request at batch size 1.
    """
    check_supported(plan)
    check_policy(policy)
    sized = size_plan(
        plan,
        budget_bytes=budget_bytes,
        max_running_requests=max_running_requests,
        max_context_tokens=max_context_tokens,
        chunk_tokens=chunk_tokens,
        state_slots=state_slots,
        beside_arena={"scratch of moves": scratch_bytes},
        policy=policy,
    )
    return KVStorage(
        sized,
        make_device(KVArena.allocate(sized.layout.arena_bytes, memory)),
        writes_whole_pages=writes_whole_pages,
        check_level=check_level,
    )
