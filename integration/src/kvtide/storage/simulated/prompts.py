"""Requests that share prefixes, and what they say: prompts that begin alike and part where a number's bits say so."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import attrs
import numpy as np

from kvtide.device import IntArray
from kvtide.simulation import Request

_BITS = 16

TOLD_BITS = 16
"""Places behind which what is told repeats."""


@attrs.define(eq=False, kw_only=True)
class SharingRequest(Request):
    """A request of the world that is a row of each rank's storage; its pages are those of the row."""

    table_row: int
    """In the storages' own tables."""

    text: IntArray
    """Prompt, and what it will generate."""

    prompt_tokens: int
    """Of the text."""

    limit: int
    """Tokens that forwards write: all but the last one generated."""

    extra_key: Hashable
    """Adapter or tenant."""

    tells: int
    """Which tokens behind the prompt its scheduler tells, as bits of their places."""

    price: tuple[int, ...]
    """Most units of each band that it may hold."""

    steps: deque[tuple[int, int]] = attrs.field(factory=deque)
    """Tokens of its forwards in flight, oldest first."""

    checkpoints: deque[tuple[int, int]] = attrs.field(factory=deque)
    """Those on their way to the tree: at how many tokens, in which state slot."""

    is_over: bool = False
    """Whether its row was released."""

    def told(self, place: int) -> int:
        """What an advance to `place` tokens is told of the next one; −1 for nothing, as within the prompt."""
        is_told = place >= self.prompt_tokens and self.tells >> place % TOLD_BITS & 1
        return int(self.text[place]) if is_told else -1

    def is_known(self, length: int) -> bool:
        """Whether its scheduler tells all of the first `length` tokens: the tree takes nothing behind one that it is not told."""
        return all(self.told(place) >= 0 for place in range(self.prompt_tokens, length))


def text_of(bits: int, length: int, page_tokens: int) -> IntArray:
    """Tokens: a run of some of them is one of two, as a bit says, and both differ from run to run. Equal bits are equal texts."""
    places = np.arange(length)
    # Prompts part inside pages as well as between them.
    runs = places // (page_tokens + page_tokens // 2 if page_tokens > 1 else 2)
    variants = bits >> (runs % _BITS) & 1
    text: IntArray = places * 2 + variants
    return text
