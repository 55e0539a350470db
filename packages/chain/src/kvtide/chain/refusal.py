"""Refusals: values that say what was asked, what there is and what is missing (decision D3). Their text serves an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from kvtide.chain.chain_bands import ChainBands
from kvtide.plan import ArenaLayout, pack


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
    """A take that was not served. Figures beyond those at hand are worked out when they are asked for."""

    layout: ArenaLayout = attrs.field(repr=False)
    """The bands' grids."""

    bands: tuple[BandFigures, ...]
    """In chain order."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena behind its prefix."""
        return self.layout.arena_bytes - self.layout.prefix_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of everything live and everything asked."""
        return sum((band.live + band.asked) * band.unit_bytes for band in self.bands)

    @property
    def is_final(self) -> bool:
        """Whether an empty arena could not hold it either: waiting would be for ever."""
        return not self._fits([band.asked for band in self.bands])

    @property
    def largest_share(self) -> float:
        """The largest part of what was asked for that an empty arena holds, in each band alike; 1 for all of it."""
        most = max((band.asked for band in self.bands), default=0)
        parts = _most(most, lambda part: self._fits([band.asked * part // most for band in self.bands]))
        return parts / most if most else 1.0

    def would_serve(self) -> dict[str, int]:
        """By band, the fewest units whose free alone would let it be served, nothing fixed or under a transfer standing in the way;
        bands that could not help are left out.
        """
        held = [band.live + band.asked for band in self.bands]
        freed: dict[str, int] = {}
        for place, band in enumerate(self.bands):

            def fits_with(kept: int, place: int = place, asked: int = band.asked) -> bool:
                return self._fits(
                    [asked + kept if other == place else units for other, units in enumerate(held)]
                )

            if band.live and fits_with(0):
                freed[band.name] = band.live - _most(band.live, fits_with)
        return freed

    def __str__(self) -> str:
        asked = ", ".join(
            f"{band.asked} × {band.unit_bytes} bytes of {band.name!r}" for band in self.bands if band.asked
        )
        held = ", ".join(f"{band.name!r} {band.live} live and {band.free} free" for band in self.bands)
        return f"{self.rule}: asked for {asked}; held {held}; together {self.needed_bytes} of {self.arena_bytes} bytes; {self._remedy()}"

    def _remedy(self) -> str:
        if self.is_final:
            share = self.largest_share
            return f"an empty arena would hold {share:.1%} of what is asked for, so it can never be served"
        if self._fits([band.live + band.asked for band in self.bands]):
            return "the bytes are free, and fixed units or transfers stand in the way"
        freed = self.would_serve()
        if not freed:
            return "units of more than one band must be freed"
        return "to be freed: " + ", or ".join(
            f"{units} of {name!r}" for name, units in freed.items() if units
        )

    def _fits(self, units: Sequence[int]) -> bool:
        return pack(self.layout, units) is not None


def refusal_of(bands: ChainBands, asked: Sequence[int], rule: str) -> TakeRefusal:
    """The refusal of a take of `asked` units a band, with the figures of this moment."""
    return TakeRefusal(
        rule=rule,
        layout=bands.layout,
        bands=tuple(
            BandFigures(
                name=band.layout.name,
                unit_bytes=band.layout.unit_bytes,
                asked=units,
                live=band.live_count,
                free=band.free_count,
            )
            for band, units in zip(bands, asked, strict=True)
        ),
    )


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """The most of `[0, limit]` for which `holds`, which is true of 0 and false from some point on."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
