"""What a prefix tree keeps of each sub-pool, and how much of it a hit needs (rows K8, P5, P10).

    full        every page from the beginning to the hit
    window      the pages that the token behind the hit reads: the last `window_tokens - 1` tokens, or the open stretch of a chunk
    state       the checkpoint that lies exactly at the hit

Tokens are counted in virtual pages, since that is where prompts are compared and nodes end; a window's own pages may be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from kvtide.plan import KVStoragePlan, SubPoolKind


@attrs.frozen(kw_only=True)
class TreeWindow:
    """A window, or attention chunk, of the tree."""

    name: str
    """Of its sub-pool."""

    page_tokens: int
    """Tokens of a virtual page."""

    ratio: int
    """Its own pages, *units* here, a virtual page."""

    retained_tokens: int
    """Most tokens behind the next one that its query reads."""

    chunk_tokens: int | None = None
    """Tokens of a stretch, of an attention chunk; `None` for a window."""

    def first_token(self, length: int) -> int:
        """First token that the token behind `length` tokens reads; `length` where it reads none of them."""
        if self.chunk_tokens is not None:
            return length // self.chunk_tokens * self.chunk_tokens
        return max(0, length - self.retained_tokens)

    def first_unit(self, pages: int) -> int:
        """First unit that a hit of so many virtual pages needs; one past its last where it needs none."""
        length = pages * self.page_tokens
        return self.first_token(length) * self.ratio // self.page_tokens if length else 0

    def needs_nothing(self, pages: int) -> int:
        """The longest hit of at most so many virtual pages that needs no unit."""
        if self.retained_tokens == 0:
            return pages
        if self.chunk_tokens is None:
            return 0
        step = math.lcm(self.chunk_tokens, self.page_tokens) // self.page_tokens
        return pages // step * step


@attrs.frozen(kw_only=True)
class TreeShape:
    """Slots of a node, in the order of `KVStoragePlan.tree_slots`."""

    page_tokens: int
    """Tokens of a virtual page."""

    full: str | None
    """Name of the full-attention band, if the plan has one."""

    windows: tuple[TreeWindow, ...]
    """The primary window first."""

    state: str | None
    """Name of the state band, if the plan has one."""

    hit_pages: int = 1
    """Hits end at multiples of so many virtual pages: 1, or the grid where another stage of the model holds the states."""

    unit_bytes: Mapping[str, int]
    """Of a unit, by band: what evicting one frees."""

    @staticmethod
    def of(plan: KVStoragePlan, grid_tokens: int | None = None) -> TreeShape:
        """The slots of a plan's nodes; hits end on the grid, if there is one."""
        pools = {slot.sub_pool: plan.sub_pool(slot.sub_pool) for slot in plan.tree_slots}
        by_kind = {pool.kind: name for name, pool in pools.items()}
        return TreeShape(
            page_tokens=plan.page_tokens,
            full=by_kind.get(SubPoolKind.FULL),
            windows=tuple(
                TreeWindow(
                    name=slot.sub_pool,
                    page_tokens=plan.page_tokens,
                    ratio=plan.sub_page_ratio(slot.sub_pool),
                    retained_tokens=slot.retained_tokens,
                    chunk_tokens=pools[slot.sub_pool].chunk_tokens,
                )
                for slot in plan.tree_slots
                if slot.retained_tokens is not None
            ),
            state=by_kind.get(SubPoolKind.STATE),
            hit_pages=1 if grid_tokens is None else grid_tokens // plan.page_tokens,
            unit_bytes={name: pool.unit.unit_bytes for name, pool in pools.items()},
        )

    @property
    def bands(self) -> tuple[str, ...]:
        """Names of the slots' bands."""
        full, state = (() if name is None else (name,) for name in (self.full, self.state))
        return (*full, *(window.name for window in self.windows), *state)
