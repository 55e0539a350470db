"""From a plan and a budget to a storage: size, allocate, construct (row K1)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import SupportsIndex

import torch

from kvtide.arena import OFFSET_BITS, CPUDevice, KVArena, TensorDevice
from kvtide.ledger import CheckLevel
from kvtide.plan import GPU_SCRATCH_BYTES, MOVE_SCRATCH_BYTES, KVStoragePlan
from kvtide.sizing import ServingPolicy, size_plan
from kvtide.storage.errors import StorageError
from kvtide.storage.overcommit import Overcommit
from kvtide.storage.storage import KVStorage
from kvtide.storage.supported import check_device, check_policy, check_supported
from kvtide.storage.tree import EvictionPolicy
from kvtide.storage.whole_numbers import whole_number

PLAIN_POLICY = ServingPolicy()
"""Neither overlap nor sharing nor drafts."""


def build_kv_storage(
    plan: KVStoragePlan,
    *,
    budget_bytes: SupportsIndex,
    max_running_requests: SupportsIndex,
    max_context_tokens: SupportsIndex,
    chunk_tokens: SupportsIndex,
    state_slots: SupportsIndex | None = None,
    state_share: Fraction | float | None = None,
    make_device: Callable[[KVArena], TensorDevice] = CPUDevice,
    memory: torch.device | str = "cpu",
    scratch_bytes: SupportsIndex | None = None,
    check_level: CheckLevel = CheckLevel.OFF,
    kernel_offset_bits: int = OFFSET_BITS,
    writes_whole_pages: bool = False,
    policy: ServingPolicy = PLAIN_POLICY,
    overcommit: Overcommit | None = None,
    eviction_policy: EvictionPolicy | None = None,
) -> KVStorage:
    """A storage whose arena, mirrors and scratch lie within `budget_bytes`.

    Args:
        plan: the model's sub-pools, from `kvtide.plan.plan_kv_storage`.
        budget_bytes: bytes of memory to use in all.
        max_running_requests: rows, the most requests admitted at once.
        max_context_tokens: length of the longest request, output included.
        chunk_tokens: longest prefill chunk that `prepare_step` is asked for.
        state_slots: boot target of the state band; excludes `state_share`.
        state_share: the part of the chain's bytes that is for state slots at boot, at most one for each row; by default a half.
        make_device: the device to drive over the arena; by default the CPU device. `CUDADevice` for a GPU.
        memory: where the arena is allocated, "cuda" for a GPU.
        scratch_bytes: what the device holds there beside arena and mirrors; by default what `CPUDevice` or `CUDADevice` does.
        check_level: how much is checked beyond what always is, such as the ids that forwards translate.
        kernel_offset_bits: of the offsets that the model's kernels compute with.
        writes_whole_pages: whether every forward writes its tokens' entries in every layer before any kernel loads their pages. Pages
            that a step fills are then handed out without being zeroed first. A draft whose layers run apart does not.
        policy: how the engine serves. With overlap, a row's next step may be prepared before its last one is processed; requests are
            priced for it. With chunks read in activations, windows bind the tail of a chunk only: the model's attention must read its
            own tokens there.
        overcommit: promise less than requests may come to hold; without it, whatever is admitted runs to its end.
        eviction_policy: what the prefix tree lets go of first, where the policy shares prefixes; by default what was not used for longest.

    Raises:
        StorageError: a plan, policy or device that the storage cannot run, such as several page sizes, drafts, a device without tensors,
            memory whose work has no streams, or a device that holds more beside the arena than the budget has for it; bytes, rows or
            tokens that are no whole numbers.
        ValueError: the model's kernels cannot address the arena to its end.
        kvtide.sizing.SizingError: the budget is below the floor of one request at batch size 1, or the state slots or their share
            make no sense.
    """
    check_supported(plan)
    check_policy(policy)
    if scratch_bytes is None:
        scratch_bytes = GPU_SCRATCH_BYTES if torch.device(memory).type == "cuda" else MOVE_SCRATCH_BYTES
    scratch_bytes = whole_number("scratch_bytes", scratch_bytes)
    sized = size_plan(
        plan,
        budget_bytes=whole_number("budget_bytes", budget_bytes),
        max_running_requests=whole_number("max_running_requests", max_running_requests),
        max_context_tokens=whole_number("max_context_tokens", max_context_tokens),
        chunk_tokens=whole_number("chunk_tokens", chunk_tokens),
        state_slots=None if state_slots is None else whole_number("state_slots", state_slots),
        state_share=state_share,
        beside_arena={"scratch of the device": scratch_bytes},
        policy=policy,
    )
    device = make_device(KVArena.allocate(sized.layout.arena_bytes, memory))
    check_device(device)
    if device.scratch_bytes > scratch_bytes:
        raise StorageError(
            f"the device holds {device.scratch_bytes} bytes beside arena and mirrors, the budget has {scratch_bytes} for them: "
            f"build with scratch_bytes={device.scratch_bytes}, or make the device with less"
        )
    return KVStorage(
        sized,
        device,
        check_level=check_level,
        kernel_offset_bits=kernel_offset_bits,
        writes_whole_pages=writes_whole_pages,
        overcommit=overcommit,
        eviction_policy=eviction_policy,
    )
