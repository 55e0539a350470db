"""Estimates of what is free, for logs, metrics and error text, never for a decision (row C9).

They count free bytes and id room; they ignore alignment between bands and units that cannot move. A decision asks `units_fit`,
`ensure_capacity` or a take, inside `decision`, where an estimate that is read all the same is a broken invariant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtide.chain.band import Band
from kvtide.chain.chain_bands import ChainBands
from kvtide.chain.id_space import VirtualPages
from kvtide.ledger import InvariantChecks


class Estimates:
    """Of one chain. It changes nothing and waits for nothing."""

    def __init__(self, bands: ChainBands, pages: VirtualPages, checks: InvariantChecks) -> None:
        """Of these bands and virtual pages, which others change."""
        self._bands = bands
        self._pages = pages
        self._checks = checks
        self._decision: str | None = None

    @contextmanager
    def decision(self, what: str) -> Iterator[None]:
        """Within it `what` is decided, and no estimate may be read."""
        outer, self._decision = self._decision, what
        try:
            yield
        finally:
            self._decision = outer

    def pages(self, reader: str) -> int:
        """Virtual pages that could be minted and bound whole in every attention band."""
        self._observe(reader)
        page_bytes = sum(
            band.layout.unit_bytes * ratio
            for band, ratio in zip(self._bands, self._bands.ratios, strict=True)
        )
        return min(self._free_bytes() // page_bytes, self._pages.free_count) if page_bytes else 0

    def units(self, reader: str, band: Band) -> int:
        """Units that one band could take, the others taking none."""
        self._observe(reader)
        return min(self._free_bytes() // band.layout.unit_bytes, band.layout.capacity_pages - band.live_count)

    def tokens(self, reader: str, band: Band) -> int:
        """Tokens that one attention band could take, the others taking none."""
        return self.units(reader, band) * (band.layout.page_tokens or 0)

    def used_share(self, reader: str) -> float:
        """Bytes in use, of those behind the prefix."""
        self._observe(reader)
        return 1 - self._free_bytes() / (self._bands.layout.arena_bytes - self._bands.layout.prefix_bytes)

    def _free_bytes(self) -> int:
        held = sum(band.layout.unit_bytes * band.live_count for band in self._bands)
        return self._bands.layout.arena_bytes - self._bands.layout.prefix_bytes - held

    def _observe(self, reader: str) -> None:
        if self._decision is not None and self._checks.checks("capacity.observe_only_read"):
            self._checks.broken(
                "capacity.observe_only_read",
                f"{reader} was read while {self._decision} was decided",
                "ask units_fit, ensure_capacity or a take instead",
            )
