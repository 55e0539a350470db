"""Policies: which memory of the tree is worth least (row K8)."""

from __future__ import annotations

from typing import Protocol


class Worth(Protocol):
    """What evicting something comes to; looked up when asked for."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that it frees."""

    @property
    def computed_tokens(self) -> int:
        """Tokens that whoever asks for it again computes."""


class EvictionPolicy(Protocol):
    """Ranks what could be evicted; the lowest rank goes first."""

    def stamp(self) -> float:
        """What to note at a use, of every slot that was used."""

    def rank(self, stamp: float, worth: Worth) -> float:
        """Of what was last used at `stamp`; the same while neither the stamp nor its worth changes.

        A rank that rises is looked up when its turn comes; one that falls may be overlooked until what it was has come up.
        """

    def evicted(self, rank: float) -> None:
        """A victim of this rank has gone."""


class LeastRecentlyUsed:
    """What was not used for longest goes first, in each sub-pool: a prefix's window may have been passed over where its pages were used."""

    def __init__(self) -> None:
        """Nothing was used."""
        self._uses = 0

    def stamp(self) -> float:
        """The next use."""
        self._uses += 1
        return float(self._uses)

    def rank(self, stamp: float, worth: Worth) -> float:
        """The last use."""
        return stamp

    def evicted(self, rank: float) -> None:
        """Nothing to learn."""


class CostAware:
    """What frees the most bytes for each token that must be computed again goes first, unless it was used lately.

    The measure is that of Marconi (arXiv 2411.19379), which weighs recency against it by a tuned factor. Here recency needs none: the rank
    of what is used starts from that of the last victim (Cao and Irani, GreedyDual-Size, 1997), so what stays unused is
    overtaken in time, however dear it was.
    """

    def __init__(self) -> None:
        """Nothing was evicted."""
        self._floor = 0.0

    def stamp(self) -> float:
        """The rank of the dearest victim so far."""
        return self._floor

    def rank(self, stamp: float, worth: Worth) -> float:
        """Tokens to compute for each byte, above what has gone when it was last used."""
        return stamp + worth.computed_tokens / max(1, worth.freed_bytes)

    def evicted(self, rank: float) -> None:
        """Later uses count from here."""
        self._floor = max(self._floor, rank)
