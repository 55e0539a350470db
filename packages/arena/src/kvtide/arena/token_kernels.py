"""What models call on the hot path, wherever the tensors lie: Triton on CUDA where it is installed, else torch (row A6)."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kvtide.arena import kernels

HAS_TRITON = find_spec("triton") is not None
"""Whether Triton can be imported. It is, when first needed: it takes a second that a CPU need not spend."""


def translate_ids(
    table: torch.Tensor, ids: torch.Tensor, *, faults: torch.Tensor | None = None
) -> torch.Tensor:
    """`table[ids]` as int64, shape of `ids`, which are int64 or int32; an id of −1 stays −1 (a masked row).

    Strict, with `faults`, int64 `[1]` beside the table: an id outside `[−1, entries)` becomes −1 and adds one to it. Whoever
    reads `faults` waits for the device; nothing here does. Without it, such an id is the caller's fault.
    """
    if _on_gpu(table):
        from kvtide.arena import triton_kernels  # noqa: PLC0415  # Triton is optional

        return triton_kernels.translate_ids(table, ids, faults=faults)
    return kernels.translate_ids(table, ids, faults=faults)


def write_tokens(plane: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values [token_count, …]` at `slots [token_count]`, int64, of `plane [page_count, page_tokens, …]`.

    No slot may come twice, a sink's apart. A slot of −1 is not written. On a GPU, a token's entry must be dense in `plane`,
    else `ValueError`.
    """
    if _on_gpu(plane):
        from kvtide.arena import triton_kernels  # noqa: PLC0415  # Triton is optional

        triton_kernels.write_tokens(plane, slots, values)
    else:
        kernels.write_tokens(plane, slots, values)


def gather_tokens(plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The entries at `slots` (int64, any shape) of `plane [page_count, page_tokens, …]`, contiguous; −1 reads as zeros.

    On a GPU, a token's entry must be dense in `plane`, else `ValueError`.
    """
    if _on_gpu(plane):
        from kvtide.arena import triton_kernels  # noqa: PLC0415  # Triton is optional

        return triton_kernels.gather_tokens(plane, slots)
    return kernels.gather_tokens(plane, slots)


def gather_pages(plane: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """The pages `pages` (int64, any shape) of `plane [page_count, page_tokens, …]`, contiguous; −1 reads as zeros.

    On a GPU, a page must be dense in `plane`, else `ValueError`.
    """
    return gather_tokens(plane.unsqueeze(1), pages)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and HAS_TRITON
