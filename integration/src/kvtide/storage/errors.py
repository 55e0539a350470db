"""Typed errors of the storage, raised before anything changes (decision D3): misuse by its scheduler, and want of host memory."""

from __future__ import annotations


class StorageError(ValueError):
    """A call that names rows, counts or steps the storage cannot act on; nothing was changed."""


class HostMemoryError(RuntimeError):
    """The host has no memory for a backup; nothing was changed. The request can be retracted without one."""
