"""What a chain holds and has done, exact, as values (row C9: these are no estimates)."""

from __future__ import annotations

import attrs

from kvtide.chain.band import Band


@attrs.frozen(kw_only=True)
class BandStatistics:
    """One band."""

    name: str
    """Band."""

    unit_bytes: int
    """Bytes of a unit."""

    span_units: int
    """Units from the lowest to the highest that is not given back."""

    live_units: int
    """Units in use."""

    hole_units: int
    """Free units inside the span."""

    pending_units: int
    """Freed units that a forward may still touch; free in every question of capacity."""

    vacated_units: int
    """Units moved away from that somebody may still read."""

    withheld_units: int
    """Free units that are fixed or under a transfer."""

    moved_units: int
    """Units moved since the start."""

    zeroed_units: int
    """Units zeroed on hand-out since the start."""

    settles: int
    """Waits queued since the start for pending units that a take needed."""


@attrs.frozen(kw_only=True)
class ChainStatistics:
    """The chain at one moment."""

    bands: tuple[BandStatistics, ...]
    """In chain order."""

    arena_bytes: int
    """Bytes of the arena behind its prefix."""

    free_page_ids: int
    """Virtual pages that can be minted."""

    free_slot_ids: int
    """Virtual state slots that can be minted."""

    owed_units: int
    """Units that came without zeroing and whose forward is neither recorded nor aborted."""

    rearrangements: int
    """Takes that were served by compacting or relocating bands."""

    @property
    def live_bytes(self) -> int:
        """Bytes of units in use."""
        return sum(band.live_units * band.unit_bytes for band in self.bands)

    @property
    def moved_units(self) -> int:
        """Units moved since the start."""
        return sum(band.moved_units for band in self.bands)

    @property
    def moved_bytes(self) -> int:
        """Bytes moved since the start."""
        return sum(band.moved_units * band.unit_bytes for band in self.bands)

    @property
    def zeroed_bytes(self) -> int:
        """Bytes zeroed on hand-out since the start."""
        return sum(band.zeroed_units * band.unit_bytes for band in self.bands)


def band_statistics(band: Band) -> BandStatistics:
    """One band's figures now."""
    return BandStatistics(
        name=band.layout.name,
        unit_bytes=band.layout.unit_bytes,
        span_units=band.end_page - band.first_page,
        live_units=band.live_count,
        hole_units=band.hole_count,
        pending_units=len(band.pending),
        vacated_units=band.usage.vacated_count,
        withheld_units=band.withheld_count,
        moved_units=band.moved_count,
        zeroed_units=band.zeroed_count,
        settles=band.settle_count,
    )
