"""Byte work on an arena, in torch (row A6). Each is one function over tensors; none reads the host's books.

Unit bytes and origins are multiples of 16, so units are moved as int64 words whatever they hold, bit for bit.
"""

from __future__ import annotations

import torch

from kvtide.plan import MOVE_SCRATCH_BYTES

SCRATCH_BYTES = MOVE_SCRATCH_BYTES
"""Most bytes that `copy_units` holds at once beside the arena, as budgets charge it."""


def unit_words(arena: torch.Tensor, origin_bytes: int, unit_bytes: int) -> torch.Tensor:
    """The arena as `[unit_count, unit_bytes / 8]` int64 on one band's grid; a view."""
    count = (arena.numel() - origin_bytes) // unit_bytes
    region = arena[origin_bytes : origin_bytes + count * unit_bytes]
    return region.view(torch.int64).view(count, unit_bytes // 8)


def copy_units(
    arena: torch.Tensor, origin_bytes: int, unit_bytes: int, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Copy unit `sources[i]` to `targets[i]`, in order; no later source may be an earlier target.

    Pairs go through scratch in batches. Within a batch every source is read before any target is written, which by the
    caller's promise is the same as one after another. Units larger than the scratch are copied one by one without it.
    """
    words = unit_words(arena, origin_bytes, unit_bytes)
    batch = SCRATCH_BYTES // unit_bytes
    if not batch:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            words[target].copy_(words[source])
        return
    for start in range(0, sources.numel(), batch):
        moved = words.index_select(0, sources[start : start + batch])
        words.index_copy_(0, targets[start : start + batch], moved)


def zero_units(arena: torch.Tensor, origin_bytes: int, unit_bytes: int, units: torch.Tensor) -> None:
    """Fill whole units with zero bytes."""
    unit_words(arena, origin_bytes, unit_bytes).index_fill_(0, units, 0)


def translate_ids(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`table[ids]` as int64, shape of `ids`; an id of −1 stays −1 (a masked row)."""
    return torch.where(ids < 0, -1, table[ids.clamp(min=0)]).to(torch.int64)


def token_slots(pages: torch.Tensor, offsets: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Slot ids of tokens: `page × page_tokens + offset`, int64."""
    return pages * page_tokens + offsets


def write_tokens(plane: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values [token_count, …]` at `slots [token_count]` of `plane [page_count, page_tokens, …]`."""
    page_tokens = plane.shape[1]
    plane[slots // page_tokens, slots % page_tokens] = values


def gather_tokens(plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The entries at `slots` (any shape) of `plane [page_count, page_tokens, …]`, contiguous."""
    page_tokens = plane.shape[1]
    return plane[slots // page_tokens, slots % page_tokens]
