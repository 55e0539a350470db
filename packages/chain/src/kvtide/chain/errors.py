"""Misuse of the allocator by its caller: a typed error, raised before anything changes (decision D3)."""

from __future__ import annotations


class ChainError(ValueError):
    """A call that names what it does not hold; nothing was changed."""
