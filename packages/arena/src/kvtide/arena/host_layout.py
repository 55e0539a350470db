"""A band's pages in host memory, laid out as on the device (row A4)."""

from __future__ import annotations

import attrs

from kvtide.plan import ArenaLayout, BandLayout


def host_layout(band: BandLayout, page_count: int) -> ArenaLayout:
    """The layout of a host pool that holds `page_count` pages, or state slots, of `band`.

    A page has the planes of the device's, at the same offsets and of as many bytes, so a page is copied as one block. The
    pool has no sink: every page from 0 on may hold one of the device. `KVArena` and `RoutedKVCache` work over it as over the
    device's. Raises `ValueError` for a negative count.
    """
    if page_count < 0:
        raise ValueError(f"a host pool of band {band.name!r} cannot have {page_count} pages")
    mirrored = attrs.evolve(band, origin_bytes=0, first_page=0, page_count=page_count, has_sink=False)
    return ArenaLayout(
        arena_bytes=page_count * band.unit_bytes, prefix_bytes=0, bands=(mirrored,), owner=None
    )
