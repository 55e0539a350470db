"""Misuse of the storage by its scheduler: a typed error, raised before anything changes (decision D3)."""

from __future__ import annotations


class StorageError(ValueError):
    """A call that names rows, counts or steps the storage cannot act on; nothing was changed."""
