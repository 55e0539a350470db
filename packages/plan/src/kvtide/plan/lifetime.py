"""How long a part's entries are needed (rows P1, P6).

Lifetimes decide sub-pools: parts of one lifetime share pages, because their pages are taken and retired together.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from kvtide.plan.checks import positive


@attrs.frozen
class FullLifetime:
    """Every token's entry lives as long as its request."""


@attrs.frozen
class WindowLifetime:
    """A token's entry is read by itself and the `window_tokens - 1` tokens after it."""

    window_tokens: int = attrs.field(validator=positive)
    """Tokens a query sees, its own included."""


@attrs.frozen
class ChunkLifetime:
    """Chunked-local attention: a token sees its own fixed stretch of the sequence only, `[k × chunk_tokens, …)`.

    The entries of a finished stretch are never read again, so they retire all at once (Llama 4).
    """

    chunk_tokens: int = attrs.field(validator=positive)
    """Tokens of a stretch."""


@attrs.frozen
class StateLifetime:
    """One state per request, overwritten as it advances."""

    checkpoint_interval: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    """Tokens between the states a prefix cache may keep; `None` without checkpoints."""


Lifetime: TypeAlias = FullLifetime | WindowLifetime | ChunkLifetime | StateLifetime
"""How long a part's entries are needed."""
