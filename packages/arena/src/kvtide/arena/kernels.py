"""Byte work on an arena, in torch (row A6): the path of the CPU, and what `triton_kernels` must equal bit for bit.

Each is one function over tensors; none reads the host's books.

Unit bytes and origins are multiples of 16, so units are moved as int64 words whatever they hold, bit for bit.
"""

from __future__ import annotations

import torch

from kvtide.arena.copy_plan import CopyRuns, copy_runs
from kvtide.plan import MOVE_SCRATCH_BYTES

SCRATCH_BYTES = MOVE_SCRATCH_BYTES
"""Most bytes that `copy_units` holds at once beside the arena, as budgets charge it."""

RUN_BYTES = 1 << 12
"""From this many bytes a run on average, one copy a run is faster than scratch."""


def unit_words(arena: torch.Tensor, origin_bytes: int, unit_bytes: int) -> torch.Tensor:
    """The arena as `[unit_count, unit_bytes / 8]` int64 on one band's grid; a view."""
    count = (arena.numel() - origin_bytes) // unit_bytes
    region = arena[origin_bytes : origin_bytes + count * unit_bytes]
    return region.view(torch.int64).view(count, unit_bytes // 8)


def copy_units(
    arena: torch.Tensor, origin_bytes: int, unit_bytes: int, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Copy unit `sources[i]` to `targets[i]`, in order; no later source may be an earlier target, no target comes twice.

    State slots are units of their band, and are copied so too. On host memory, neighbouring units are copied as one run (see
    `copy_plan`). Pairs without neighbours go through scratch in batches: within a batch every source is read before any
    target is written, which by the caller's promise is the same as one after another. Scratch takes `SCRATCH_BYTES` at most.
    """
    batch = SCRATCH_BYTES // unit_bytes
    if arena.device.type == "cpu":
        runs = copy_runs(sources.numpy(), targets.numpy())
        if not batch or sources.numel() * unit_bytes >= len(runs.unit_counts) * RUN_BYTES:
            _copy_runs(arena, origin_bytes, unit_bytes, runs)
            return
    words = unit_words(arena, origin_bytes, unit_bytes)
    for start in range(0, sources.numel(), max(batch, 1)):
        moved = words.index_select(0, sources[start : start + max(batch, 1)])
        words.index_copy_(0, targets[start : start + max(batch, 1)], moved)


def _copy_runs(arena: torch.Tensor, origin_bytes: int, unit_bytes: int, runs: CopyRuns) -> None:
    """One copy a run; source and target of a run may overlap, since a memoryview assigns as if through a copy."""
    region = arena.numpy().data
    sources = (origin_bytes + runs.first_sources * unit_bytes).tolist()
    targets = (origin_bytes + runs.first_targets * unit_bytes).tolist()
    sizes = (runs.unit_counts * unit_bytes).tolist()
    for source, target, size in zip(sources, targets, sizes, strict=True):
        region[target : target + size] = region[source : source + size]


def zero_units(arena: torch.Tensor, origin_bytes: int, unit_bytes: int, units: torch.Tensor) -> None:
    """Fill whole units with zero bytes."""
    unit_words(arena, origin_bytes, unit_bytes).index_fill_(0, units, 0)


def translate_ids(
    table: torch.Tensor, ids: torch.Tensor, *, faults: torch.Tensor | None = None
) -> torch.Tensor:
    """See `token_kernels.translate_ids`."""
    if faults is not None:
        is_outside = (ids < -1) | (ids >= table.numel())
        faults += is_outside.sum()
        ids = ids.masked_fill(is_outside, -1)
    # A third of the time of indexing, on a CPU, whose ids need not become int64; a sign's bits are those of −1, or none.
    physical = table.index_select(0, ids.clamp(min=0).reshape(-1)).view(ids.shape)
    return (physical | (ids >> (8 * ids.element_size() - 1))).to(torch.int64)


def token_slots(pages: torch.Tensor, offsets: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Slot ids of tokens: `page × page_tokens + offset`, int64, of pages and offsets that are int64 or int32."""
    return torch.add(offsets, pages.to(torch.int64), alpha=page_tokens)


def write_tokens(plane: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """See `token_kernels.write_tokens`."""
    page_tokens = plane.shape[1]
    if (slots < 0).any():
        slots, values = slots[slots >= 0], values[slots >= 0]
    plane[slots // page_tokens, slots % page_tokens] = values


def gather_tokens(plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """See `token_kernels.gather_tokens`."""
    page_tokens = plane.shape[1]
    gathered = plane[slots // page_tokens, slots % page_tokens]
    masked = slots < 0
    if masked.any():
        # As bytes: torch cannot fill every type that it stores.
        gathered.view(slots.numel(), -1).view(torch.uint8).masked_fill_(masked.flatten()[:, None], 0)
    return gathered


def gather_pages(plane: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """See `token_kernels.gather_pages`."""
    return gather_tokens(plane.unsqueeze(1), pages)
