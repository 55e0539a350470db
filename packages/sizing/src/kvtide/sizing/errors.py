"""Errors of sizing: one base, so that a command line can turn any of them into one line."""

from __future__ import annotations


class SizingError(ValueError):
    """A budget or a request that cannot be sized; the text names every term and what is missing."""
