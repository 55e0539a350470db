"""The bands of one chain by role: who owns virtual pages, who binds parts of them, who holds state (rows C1, P10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvtide.chain.band import Band
from kvtide.chain.errors import ChainError
from kvtide.device import IntArray
from kvtide.ledger import clone_of
from kvtide.plan import ArenaLayout, SubPoolKind


class ChainBands:
    """Bands in chain order."""

    def __init__(self, layout: ArenaLayout, bands: Sequence[Band]) -> None:
        self.layout = layout
        """Their grids."""
        self.ratios = tuple(map(layout.sub_page_ratio, layout.bands))
        """(Sub-)pages that a virtual page has in each band; 0 for state."""
        self._bands = tuple(bands)
        self._by_name = {band.layout.name: band for band in bands}
        self._places = {band.layout.name: place for place, band in enumerate(bands)}
        of_kind = {band.layout.kind: band for band in bands}
        self.state = of_kind.get(SubPoolKind.STATE)
        """The band of state slots, if there is one."""
        self.owner = of_kind.get(SubPoolKind.FULL)
        """The full-attention band, which every virtual page is bound in from mint to free, if there is one."""
        self.windows = tuple(
            (band, ratio)
            for band, ratio in zip(bands, self.ratios, strict=True)
            if ratio and band is not self.owner
        )
        """Attention bands that do not own virtual pages, each with its ratio."""

    def clone(self, bands: Sequence[Band]) -> ChainBands:
        """The same roles for clones of the bands, in chain order (row C13)."""
        by_name = dict(zip(self._by_name, bands, strict=True))
        return clone_of(
            self,
            _bands=tuple(bands),
            _by_name=by_name,
            state=None if self.state is None else by_name[self.state.layout.name],
            owner=None if self.owner is None else by_name[self.owner.layout.name],
            windows=tuple((by_name[band.layout.name], ratio) for band, ratio in self.windows),
        )

    def __iter__(self) -> Iterator[Band]:
        return iter(self._bands)

    def __len__(self) -> int:
        return len(self._bands)

    def __getitem__(self, name: str) -> Band:
        """The band called `name`; raises `ChainError` naming those there are."""
        band = self._by_name.get(name)
        if band is None:
            raise ChainError(f"no band {name!r}; the chain has {self.names}")
        return band

    @property
    def names(self) -> list[str]:
        """In chain order."""
        return list(self._by_name)

    def next_start_byte(self, place: int) -> int:
        """Where the next band that stands somewhere begins, or the arena ends."""
        for band in self._bands[place + 1 :]:
            if band.first_page < band.end_page:
                return band.layout.start_byte(band.first_page)
        return self.layout.arena_bytes

    def ratio(self, band: Band) -> int:
        """(Sub-)pages that a virtual page has in `band`; 0 for state."""
        return self.ratios[self._places[band.layout.name]]


def sub_pages(virtual_pages: IntArray, ratio: int) -> IntArray:
    """Every (sub-)page of each virtual page, in order."""
    if ratio == 1:
        return virtual_pages
    return (virtual_pages[:, None] * ratio + np.arange(ratio)).reshape(-1)
