"""Rehoming: pages of a window come to stand for other virtual pages (row K8). Nothing is taken, freed, moved or zeroed.

    virtual   source ──┐                  source → sink
                       ├──→ unit 7   ⇒
    virtual   target → sink               target ──→ unit 7

A prefix tree asks for it when a request has computed a prompt again whose window pages the tree had let go of: the request's pages
are the tree's from then on, under the tree's virtual pages, and the request's own virtual pages can return.

The unit stays where it is, so everything the ledger knows of it, by physical page, stays true: forwards that resolved the source
read and write the same bytes, copies, transfers and claims go on. Only the id tables change, which the next upload carries.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvtide.chain.band import Band
from kvtide.chain.chain_bands import ChainBands
from kvtide.chain.checks import bound_units, check_unbound, checked
from kvtide.chain.errors import ChainError
from kvtide.chain.id_space import VirtualPages
from kvtide.chain.units import Units, some, units_of
from kvtide.device import IntArray


class Rehoming(NamedTuple):
    """A planned rehoming of one window's (sub-)pages; `carry_out` cannot fail."""

    band: Band
    """The window's."""

    sources: Units
    """Virtual (sub-)pages that are bound."""

    targets: Units
    """As many that are not, of pages that are minted."""

    units: Units
    """What the sources bind."""

    def carry_out(self, virtual_pages: VirtualPages, ratio: int) -> None:
        """Bind the targets in the sources' place; without an owner, pages of which nothing is bound any more return."""
        self.band.ids.unbind(self.sources, self.units)
        self.band.ids.bind(self.targets, self.units)
        # Bound first: a page on both sides must not return between the two.
        virtual_pages.bound(self.targets.ids, ratio)
        virtual_pages.unbound(self.sources.ids, ratio)


def plan_rehoming(
    bands: ChainBands, virtual_pages: VirtualPages, band_name: str, sources: IntArray, targets: IntArray
) -> Rehoming:
    """What `ChainAllocator.rehome_window` does; raises `ChainError` for what it may not be asked."""
    band = bands[band_name]
    if all(band is not window for window, _ in bands.windows):
        raise ChainError(
            f"cannot rehome pages of band {band_name!r}: only windows bind pages that others mint; those are "
            f"{[window.layout.name for window, _ in bands.windows]}"
        )
    named = checked(band, sources, "rehome")
    units = bound_units(band, named, "rehome")
    if band.ids.names_twice(sources, units):
        raise ChainError(f"cannot rehome pages {some(sources)} of band {band_name!r}: one is named twice")
    to = checked(band, targets, "rehome to")
    if len(sources) != len(targets):
        raise ChainError(
            f"cannot rehome {len(sources)} pages of band {band_name!r} to {len(targets)}: each source needs one target"
        )
    pages = targets // bands.ratio(band)
    if bands.owner is not None:
        is_minted = bands.owner.ids.is_bound(units_of(pages))
    else:
        is_minted = virtual_pages.is_bound(pages)
    check_unbound(band, targets, np.asarray(is_minted, np.bool_), "rehome to")
    return Rehoming(band, named, to, units)
