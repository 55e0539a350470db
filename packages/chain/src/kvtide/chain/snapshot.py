"""What pricing is told of a chain: counts, frontiers, and the extents of what may not move (row C4).

    span of a band      [ live  ·  live  FIX  live  ·  NET  · )        · free: a hole, pending or vacated
    snapshot            [first_page … end_page), 5 occupied, 3 free, one fixed extent, one network extent

Never which page is a hole: so a snapshot is made in a few integers a band, whatever the arena holds, and two chains that differ
in where their holes lie are priced alike. Nothing in it changes; when it has gone stale is the chain's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from kvtide.chain.blocked_bytes import merged
from kvtide.chain.errors import ChainError
from kvtide.device import IntArray
from kvtide.plan import ArenaLayout, Growth, PageSpan

ByteExtents: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open runs of arena bytes; two may overlap, as those of two sends of one page do."""


class BandSnapshot(NamedTuple):
    """One band: `occupied + free == end_page − first_page`."""

    first_page: int
    """First page of the span. A grow-up end's is its lowest page, also while it is empty."""

    end_page: int
    """One past the span's last page; equal to `first_page` when the span is empty. A grow-down end's is its highest page + 1."""

    occupied: int
    """Units that a take cannot get: live ones, and free ones that are fixed."""

    free: int
    """Units that a take can get without the band growing: holes, pending and vacated ones."""

    fixed: tuple[PageSpan, ...] = ()
    """Extents of fixed pages, ascending; all of them are occupied."""

    network: tuple[PageSpan, ...] = ()
    """Extents of pages that a transfer reads or writes, ascending; a page of them may be fixed too."""

    network_free: int = 0
    """Free units among the network pages: vacated ones that a send still reads. A take of one waits for the transfer."""


class ChainSnapshot(NamedTuple):
    """A chain at one moment."""

    layout: ArenaLayout
    """The bands' grids."""

    bands: tuple[BandSnapshot, ...]
    """In chain order."""

    network_bytes: ByteExtents = ()
    """Bytes outside all spans that a send still reads: who writes them waits for it on the host."""

    quarantined_bytes: ByteExtents = ()
    """Bytes outside all spans that nobody may write."""


def reclaimed_snapshot(
    snapshot: ChainSnapshot, evictable: Sequence[int], *, around_network: bool = False
) -> ChainSnapshot:
    """The snapshot as if `evictable` units of each band, in chain order, had been freed: they are credited as free.

    With `around_network` no more of a band is credited than is not under a transfer: freed, such a unit would be nobody's.

    A band that keeps nothing, no fixed page and none of a transfer, is as empty as one that never held any: a float becomes
    transparent. Raises `ChainError` for more units than a band holds beside its fixed pages.
    """
    if len(evictable) != len(snapshot.bands):
        raise ChainError(f"cannot credit {list(evictable)}: the chain has {len(snapshot.bands)} bands")
    bands = []
    for grid, band, freed in zip(snapshot.layout.bands, snapshot.bands, evictable, strict=True):
        movable = band.occupied - sum(extent.page_count for extent in band.fixed)
        if not 0 <= freed <= movable:
            raise ChainError(
                f"cannot credit {freed} units of band {grid.name!r}: of its {band.occupied} occupied ones {movable} are not fixed"
            )
        if around_network and band.network:
            freed = min(freed, movable_units(band))  # noqa: PLW2901  # what can be had of it
        if not freed:
            bands.append(band)
        elif freed == band.occupied and not band.network:
            anchor = grid.page_count if grid.growth is Growth.DOWN else grid.first_page
            bands.append(BandSnapshot(anchor, anchor, 0, 0))
        else:
            bands.append(band._replace(occupied=band.occupied - freed, free=band.free + freed))
    return snapshot._replace(bands=tuple(bands))


def movable_units(band: BandSnapshot) -> int:
    """Units in use that are neither fixed nor under a transfer: what could come free at once."""
    # A page may be both, and free besides: fixed ones are among the occupied then, those of a transfer are not.
    firsts, ends = merged([(extent.first_page, extent.end_page) for extent in (*band.fixed, *band.network)])
    return band.occupied - (sum(ends) - sum(firsts) - band.network_free)


def extents_of(pages: IntArray) -> tuple[PageSpan, ...]:
    """The runs that ascending pages, each named once, form."""
    if not len(pages):
        return ()
    breaks = np.flatnonzero(pages[1:] - pages[:-1] > 1)
    firsts = [pages.item(0), *pages[breaks + 1].tolist()]
    lasts = [*pages[breaks].tolist(), pages.item(-1)]
    return tuple(
        PageSpan(first_page=first, end_page=last + 1) for first, last in zip(firsts, lasts, strict=True)
    )
