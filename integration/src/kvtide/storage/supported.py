"""Which plans, policies and devices the storage runs: what it cannot run yet it refuses before anything is allocated."""

from __future__ import annotations

from kvtide.arena import KVArena, TensorDevice
from kvtide.device import ImmediateStreams
from kvtide.plan import KVStoragePlan
from kvtide.sizing import ServingPolicy
from kvtide.storage.errors import StorageError


def check_policy(policy: ServingPolicy) -> None:
    """Raise `StorageError` where requests are priced for another life than they lead here."""
    if policy.draft_tokens:
        raise StorageError(
            f"cannot run {policy.draft_tokens} draft tokens a step: a step past the prompt is one token a row"
        )


def check_device(device: TensorDevice) -> None:
    """Raise `StorageError` for a device without tensors, and for one that works asynchronously and has no streams to order that work (K4)."""
    if not isinstance(getattr(device, "arena", None), KVArena):
        raise StorageError(
            f"cannot run {type(device).__name__}: it has no tensors that kernels could index, such as `arena`; make a "
            "kvtide.arena.TensorDevice over the arena that make_device is called with, to model one "
            "kvtide.engine.ModelledTensorDevice"
        )
    memory = device.arena.bytes.device.type
    if isinstance(device, ImmediateStreams) and memory != "cpu":
        raise StorageError(
            f"cannot run {type(device).__name__} over memory of {memory!r}: work there is not done when a call returns, and this "
            "device has no streams that could wait for it; give a device of that memory, such as CUDADevice"
        )
    if device.schedule_stream is device.forward_stream:
        raise StorageError(
            f"cannot run {type(device).__name__}: its schedule stream is its forward stream, so whatever the allocator does would "
            "wait for the forward that it should overlap"
        )


def check_supported(plan: KVStoragePlan) -> None:
    """Raise `StorageError` for smaller window pages, compressed chains, chunks that own others' pages, and shared layers.

    Such plans can be planned, sized and priced; takes and kernels know one page size, one entry a token, an owner that outlives
    every window, and one band of attention for each layer that reads any.
    """
    for pool in plan.token_sub_pools:
        if pool.page_tokens != plan.page_tokens:
            raise StorageError(
                f"cannot run pages of {pool.page_tokens} tokens in band {pool.name!r} beside the owner's of "
                f"{plan.page_tokens}: give every band one page size"
            )
        strided = {plane.layer for plane in pool.unit.planes if plane.shape[0] != pool.page_tokens}
        if strided:
            raise StorageError(
                f"cannot run the compressed chains of layers {sorted(strided)}: kernels write one entry a token"
            )
    owner = plan.owner
    if owner is not None and owner.chunk_tokens is not None and len(plan.token_sub_pools) > 1:
        others = [pool.name for pool in plan.token_sub_pools if pool is not owner]
        raise StorageError(
            f"cannot run bands {others} with {owner.name!r} as their owner: a finished attention chunk gives up its virtual "
            "pages at once, and they may still hold some"
        )
    if plan.shared_layers:
        layers = [layer for layer, _ in plan.shared_layers]
        raise StorageError(
            f"cannot run layers {layers}, which share other layers' entries: declare them without parts if the model hands "
            "them the entries itself"
        )
