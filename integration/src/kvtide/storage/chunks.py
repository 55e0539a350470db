"""Where a prompt is cut into prefill chunks (rows K6, K9).

A chunk is no longer than its row's limit, and where checkpoints lie on a grid it ends there, but for a prompt's last: so the forward
that ends it leaves a state that a later request can begin with. What rows share says more: `PrefixSharing.chunk_end`.
"""

from __future__ import annotations

from kvtide.storage.errors import StorageError
from kvtide.storage.prefix_sharing import PrefixSharing
from kvtide.storage.requests import RequestTable


def next_chunk_tokens(
    requests: RequestTable, sharing: PrefixSharing | None, grid_tokens: int | None, row: int, most: int
) -> int:
    """See `KVStorage.next_chunk_tokens`; the row is in use. Raises `StorageError` for a `most` below 0."""
    if most < 0:
        raise StorageError(f"cannot cut a chunk of row {row}: most must be 0 or more, found {most}")
    start, prompt = int(requests.prepared[row]), int(requests.prompts[row])
    end = min(prompt, start + min(most, int(requests.chunk_limits[row])))
    if start >= end:
        return 0
    if sharing is not None and sharing.shares(row):
        return sharing.chunk_end(row, start, end) - start
    if grid_tokens is not None and end < prompt:
        end = max(start, end // grid_tokens * grid_tokens)
    return end - start
