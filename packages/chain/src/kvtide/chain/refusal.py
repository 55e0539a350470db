"""Refusals: values that say what was asked, what there is and what is missing (decision D3)."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Refusal:
    """An operation that could not be served; nothing was changed."""

    rule: str
    """Which rule stopped it, in words."""

    def __str__(self) -> str:
        return self.rule


@attrs.frozen(kw_only=True)
class BandFigures:
    """One band at the moment of a refusal, in units."""

    name: str
    """Band."""

    unit_bytes: int
    """Bytes of a unit."""

    asked: int
    """Units the take asked for."""

    live: int
    """Units in use."""

    free: int
    """Free units inside the band's span, pending ones included."""


@attrs.frozen(kw_only=True)
class TakeRefusal(Refusal):
    """A take that no layout of the arena can serve."""

    bands: tuple[BandFigures, ...]
    """In chain order."""

    arena_bytes: int
    """Bytes of the arena behind its prefix."""

    @property
    def needed_bytes(self) -> int:
        """Bytes of everything live and everything asked."""
        return sum((band.live + band.asked) * band.unit_bytes for band in self.bands)

    def __str__(self) -> str:
        asked = ", ".join(
            f"{band.asked} × {band.unit_bytes} bytes of {band.name!r}" for band in self.bands if band.asked
        )
        held = ", ".join(f"{band.name!r} {band.live} live and {band.free} free" for band in self.bands)
        missing = self.needed_bytes - self.arena_bytes
        short = (
            f"{missing} bytes must be freed" if missing > 0 else "the rest is lost to alignment between bands"
        )
        return f"{self.rule}: asked for {asked}; held {held}; together {self.needed_bytes} of {self.arena_bytes} bytes, {short}"
