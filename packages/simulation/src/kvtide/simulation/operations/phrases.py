"""What operations may say: phrases made of parts, so that what one declares and what it says are made of the same words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

UNDER = ("idle", "under a forward")
"""What `under` says."""


def under(forwards: object) -> str:
    """Whether any forwards are in flight, or over a request."""
    return UNDER[bool(forwards)]


def phrases(*parts: str | Iterable[str]) -> frozenset[str]:
    """Every phrase that has one alternative of each part, in order; a part that is a text has no other."""
    alternatives = [(part,) if isinstance(part, str) else tuple(part) for part in parts]
    return frozenset(map("".join, itertools.product(*alternatives)))
