"""What planning yields: the sub-pools of a model in chain order, as values (rows P2, P5, P9, P10)."""

from __future__ import annotations

import enum

import attrs

from kvtide.plan.lifetime import ChunkLifetime, FullLifetime, Lifetime, StateLifetime, WindowLifetime
from kvtide.plan.unit import UnitLayout


class SubPoolKind(enum.Enum):
    """What a sub-pool's unit is tied to."""

    STATE = "state"
    WINDOW = "window"
    CHUNK = "chunk"
    FULL = "full"


@attrs.frozen(kw_only=True)
class SubPool:
    """Parts of one lifetime: one kind of unit, one band of the chain."""

    name: str
    """`full`, `window-128`, `chunk-8192`, `state`."""

    lifetime: Lifetime
    """Shared by every part."""

    page_tokens: int | None
    """Tokens a page; `None` for state."""

    unit: UnitLayout
    """Planes of one page or state slot."""

    is_draft: bool = False
    """Whether only layers of a fused draft store here."""

    @property
    def kind(self) -> SubPoolKind:
        """Full, window, chunk or state."""
        match self.lifetime:
            case FullLifetime():
                return SubPoolKind.FULL
            case WindowLifetime():
                return SubPoolKind.WINDOW
            case ChunkLifetime():
                return SubPoolKind.CHUNK
            case StateLifetime():
                return SubPoolKind.STATE

    @property
    def window_tokens(self) -> int | None:
        """Tokens that a query of a window sees, its own included; `None` for other kinds."""
        return self.lifetime.window_tokens if isinstance(self.lifetime, WindowLifetime) else None

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a stretch of chunked-local attention; `None` for other kinds."""
        return self.lifetime.chunk_tokens if isinstance(self.lifetime, ChunkLifetime) else None

    @property
    def retained_tokens(self) -> int | None:
        """Most tokens behind the next one that its query reads; `None` where it reads all, and for state."""
        seen = self.window_tokens or self.chunk_tokens
        return None if seen is None else seen - 1

    @property
    def has_sink(self) -> bool:
        """Whether page 0 is a sink: attention bands have one, padded state rows are masked instead (A8)."""
        return self.kind is not SubPoolKind.STATE

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with a plane here, ascending."""
        return tuple(sorted({plane.layer for plane in self.unit.planes}))

    @property
    def payload_bytes_per_token(self) -> int:
        """Bytes the model asked for, per token (per slot for state); rounded down where entries stand for several tokens."""
        return self.unit.payload_bytes // (self.page_tokens or 1)


@attrs.frozen
class TreeSlot:
    """What a node of the prefix tree keeps for one sub-pool."""

    sub_pool: str
    """Its name."""

    retained_tokens: int | None
    """Tokens before the node's end that a hit on it needs; `None` for all of them, and for state."""


@attrs.frozen(kw_only=True)
class KVStoragePlan:
    """The sub-pools of a model, in chain order."""

    page_tokens: int
    """Tokens of a virtual page: the owner's page."""

    sub_pools: tuple[SubPool, ...]
    """First grows up, last grows down, the rest float."""

    shared_layers: tuple[tuple[int, int], ...] = ()
    """Pairs of a layer that stores no attention and the layer whose entries it reads."""

    @property
    def token_sub_pools(self) -> tuple[SubPool, ...]:
        """Those whose unit is a page of tokens."""
        return tuple(pool for pool in self.sub_pools if pool.kind is not SubPoolKind.STATE)

    @property
    def state_sub_pool(self) -> SubPool | None:
        """The one that holds state slots, if the model is recurrent."""
        return next((pool for pool in self.sub_pools if pool.kind is SubPoolKind.STATE), None)

    @property
    def checkpoint_interval(self) -> int | None:
        """Tokens between states that a prefix cache may keep; `None` without state or without checkpoints."""
        state = self.state_sub_pool
        return (
            state.lifetime.checkpoint_interval
            if state and isinstance(state.lifetime, StateLifetime)
            else None
        )

    @property
    def owner(self) -> SubPool | None:
        """The sub-pool that holds a token longest: full attention, else the longest window; `None` without attention."""
        full = next((pool for pool in self.sub_pools if pool.kind is SubPoolKind.FULL), None)
        return full or next(iter(self.token_sub_pools), None)

    @property
    def tree_slots(self) -> tuple[TreeSlot, ...]:
        """Slots of a prefix tree's node: full, the target's primary window, the other windows from the longest, state (P5).

        The primary window is the target's longest. It stays first even when a fused draft adds a longer one, since a tree
        takes the first window as its generic one.
        """
        kinds = (SubPoolKind.WINDOW, SubPoolKind.CHUNK)
        windows = [pool for pool in self.sub_pools if pool.kind in kinds]
        full = [pool for pool in self.sub_pools if pool.kind is SubPoolKind.FULL]
        state = [pool for pool in self.sub_pools if pool.kind is SubPoolKind.STATE]
        primary = next((pool for pool in windows if not pool.is_draft), None)
        windows.sort(key=lambda pool: pool is not primary)
        return tuple(TreeSlot(pool.name, pool.retained_tokens) for pool in (*full, *windows, *state))

    def sub_page_ratio(self, name: str) -> int:
        """Pages of sub-pool `name` that make one virtual page; virtual page v has sub-pages `v × ratio + i` (P10)."""
        return self.page_tokens // (self.sub_pool(name).page_tokens or self.page_tokens)

    def sub_pool(self, name: str) -> SubPool:
        """The sub-pool called `name`; raises `KeyError` naming those there are."""
        for pool in self.sub_pools:
            if pool.name == name:
                return pool
        raise KeyError(f"no sub-pool {name!r}; the plan has {[pool.name for pool in self.sub_pools]}")
