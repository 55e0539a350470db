"""Refusals: values that say what was asked, what there is and what is missing (decision D3). Their text serves an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs

from kvtide.chain.chain_bands import ChainBands
from kvtide.chain.pricing import feasible
from kvtide.chain.snapshot import ChainSnapshot, movable_units, reclaimed_snapshot
from kvtide.plan import pack


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

    withheld: int
    """Free units that are fixed or under a transfer, and so not to be had."""


@attrs.frozen(kw_only=True)
class TakeRefusal(Refusal):
    """A take that was not served. Figures beyond those at hand are worked out when they are asked for."""

    snapshot: ChainSnapshot = attrs.field(repr=False)
    """The chain at that moment."""

    around_network: bool = attrs.field(repr=False)
    """Whether what transfers touch could not be had."""

    bands: tuple[BandFigures, ...]
    """In chain order."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena behind its prefix."""
        return self.snapshot.layout.arena_bytes - self.snapshot.layout.prefix_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of everything live and everything asked."""
        return sum((band.live + band.asked) * band.unit_bytes for band in self.bands)

    @property
    def is_final(self) -> bool:
        """Whether an empty arena could not hold it either: waiting would be for ever."""
        return not self._fits([band.asked for band in self.bands])

    def largest(self) -> dict[str, int]:
        """The most of what was asked for, in each band alike, that an empty arena holds: units by band."""
        most = max((band.asked for band in self.bands), default=0)
        parts = _most(most, lambda part: self._fits([band.asked * part // most for band in self.bands]))
        return {band.name: band.asked * parts // most for band in self.bands if band.asked}

    def would_serve(self) -> dict[str, int]:
        """By band, the fewest units whose free alone would let it be served; bands that could not help are left out.

        None of them may be fixed or under a transfer.
        """
        freed: dict[str, int] = {}
        for place, band in enumerate(self.bands):
            most = movable_units(self.snapshot.bands[place])
            if most and self._serves(place, most):
                freed[band.name] = most - _most(most, partial(self._serves_keeping, place, most))
        return freed

    def __str__(self) -> str:
        asked = ", ".join(
            f"{band.asked} × {band.unit_bytes} bytes of {band.name!r}" for band in self.bands if band.asked
        )
        held = ", ".join(
            f"{band.name!r} {band.live} live and {band.free} free"
            + (f", {band.withheld} withheld" if band.withheld else "")
            for band in self.bands
        )
        return f"{self.rule}: asked for {asked}; held {held}; together {self.needed_bytes} of {self.arena_bytes} bytes; {self._remedy()}"

    def _remedy(self) -> str:
        if self.is_final:
            largest = ", ".join(f"{units} of {name!r}" for name, units in self.largest().items())
            return f"an empty arena would hold {largest} of it, so it can never be served"
        freed = self.would_serve()
        if freed:
            return "to be freed: " + ", or ".join(f"{units} of {name!r}" for name, units in freed.items())
        if self._fits([band.live + band.asked for band in self.bands]):
            return "the bytes are free, and fixed units or transfers stand in the way"
        return "units of more than one band must be freed"

    def _serves(self, place: int, freed: int) -> bool:
        """Whether it would be served with so many units of one band freed."""
        credited = [freed if other == place else 0 for other in range(len(self.bands))]
        snapshot = reclaimed_snapshot(self.snapshot, credited)
        return feasible(snapshot, [band.asked for band in self.bands], around_network=self.around_network)

    def _serves_keeping(self, place: int, most: int, kept: int) -> bool:
        return self._serves(place, most - kept)

    def _fits(self, units: Sequence[int]) -> bool:
        return pack(self.snapshot.layout, units) is not None


def refusal_of(
    bands: ChainBands, asked: Sequence[int], snapshot: ChainSnapshot, *, around_network: bool
) -> TakeRefusal:
    """The refusal of a take of `asked` units a band, with the figures of this moment."""
    return TakeRefusal(
        rule="no layout of the arena that can be reached holds the take",
        snapshot=snapshot,
        around_network=around_network,
        bands=tuple(
            BandFigures(
                name=band.layout.name,
                unit_bytes=band.layout.unit_bytes,
                asked=units,
                live=band.live_count,
                free=band.free_count,
                withheld=band.withheld_count,
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
