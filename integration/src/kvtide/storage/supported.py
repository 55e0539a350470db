"""Which plans the storage runs: what it cannot run yet it refuses before anything is allocated."""

from __future__ import annotations

from kvtide.plan import KVStoragePlan
from kvtide.sizing import ChunkReads, ServingPolicy
from kvtide.storage.errors import StorageError


def check_policy(policy: ServingPolicy) -> None:
    """Raise `StorageError` where requests are priced for less than they hold here: every chunk is written to window pages."""
    if policy.chunk_reads is not ChunkReads.PAGES:
        raise StorageError(
            f"cannot run a plan priced for chunks that read {policy.chunk_reads.value}: a step takes window pages for its whole "
            "chunk, so admission would promise too little"
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
