"""What a take asks for and hands out, and the zeroing it puts off (rows C1, A5, P10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvtide.chain.band import Band
from kvtide.chain.chain_bands import ChainBands, sub_pages
from kvtide.chain.checks import check_ids, check_places, check_unbound, is_count
from kvtide.chain.errors import ChainError
from kvtide.chain.id_space import VirtualPages
from kvtide.chain.units import NO_UNITS, Units, joined, some, units_of
from kvtide.device import IntArray


class BandTake(NamedTuple):
    """What a take binds in one band. In the owner and the state band only `unwritten` has a say: they bind all that is minted."""

    fresh: IntArray | None = None
    """Places among the (sub-)pages of the new virtual pages, `[0, pages × ratio)`, each once; `None` for all of them."""

    held: IntArray = NO_UNITS
    """Virtual (sub-)pages of pages minted before, not bound in this band, to bind now."""

    unwritten: IntArray | None = None
    """Places, counted over `fresh` and then `held`, of units that the taking forward does not write whole in every layer before
    any kernel loads them: they are zeroed. `None` for all."""


WHOLE = BandTake()
"""Every (sub-)page of the new pages, zeroed."""


@attrs.frozen(eq=False)
class Taken:
    """What a take handed out: virtual ids, bound. What the taking forward is to write whole came without zeroing: a debt, which
    `ChainAllocator.written` ends once that forward is recorded; after an aborted launch `pay_zero_debt` zeroes it.
    """

    pages: IntArray
    """New virtual pages."""

    state_slots: IntArray
    """New virtual state slots."""


class Asked(NamedTuple):
    """What a take asks of one band, once checked."""

    unit_count: int
    """Units."""

    how: BandTake
    """Which."""

    def virtual(self, minted: Units, ratio: int) -> Units:
        """The virtual units to bind, once the take's virtual pages (or slots, for a ratio of 0) are minted."""
        fresh = minted if ratio in (0, 1) else units_of(sub_pages(minted.ids, ratio))
        if self.how.fresh is not None:
            fresh = units_of(fresh.ids[self.how.fresh])
        return joined(fresh, units_of(self.how.held)) if len(self.how.held) else fresh


def asked_of_bands(
    chain: ChainBands,
    virtual_pages: VirtualPages,
    pages: int,
    state_slots: int,
    wanted: Mapping[str, BandTake] | None,
) -> list[Asked]:
    """What a take asks of each band, in chain order; raises `ChainError` for what it may not ask."""
    _check_counts(chain, pages, state_slots)
    if wanted is None:
        return [Asked(pages * ratio if ratio else state_slots, WHOLE) for ratio in chain.ratios]
    for name in wanted:
        chain[name]
    asked = []
    for band, ratio in zip(chain, chain.ratios, strict=True):
        whole = pages * ratio if ratio else state_slots
        how = wanted.get(band.layout.name)
        if band is chain.owner or band is chain.state:
            asked.append(_asked_where_minted(band, whole, WHOLE if how is None else how))
        elif how is None:
            asked.append(Asked(0, WHOLE))
        else:
            asked.append(_asked_of_window(chain, virtual_pages, band, pages, how))
    if chain.owner is None and pages:
        _check_all_bound(chain, asked, pages)
    return asked


def _check_counts(chain: ChainBands, pages: int, state_slots: int) -> None:
    for count in (pages, state_slots):
        if not is_count(count):
            raise ChainError(
                f"cannot take {pages!r} pages and {state_slots!r} state slots: counts must be integers of 0 or more"
            )
    if (pages and not any(chain.ratios)) or (state_slots and chain.state is None):
        raise ChainError(
            f"cannot take {pages} pages and {state_slots} state slots: the chain has bands {chain.names}"
        )


def _asked_where_minted(band: Band, whole: int, how: BandTake) -> Asked:
    if how.fresh is not None or len(how.held):
        raise ChainError(
            f"band {band.layout.name!r} binds all that is minted: `fresh` and `held` are for the other bands"
        )
    if how.unwritten is not None:
        check_places(band, "unwritten", how.unwritten, whole)
    return Asked(whole, how)


def _asked_of_window(
    chain: ChainBands, virtual_pages: VirtualPages, band: Band, pages: int, how: BandTake
) -> Asked:
    ratio = chain.ratio(band)
    count = whole = pages * ratio
    if how.fresh is not None:
        check_places(band, "fresh", how.fresh, whole)
        count = len(how.fresh)
    if len(how.held):
        check_ids(band, how.held, "take")
        held_pages = how.held // ratio
        is_minted = (
            virtual_pages.is_bound(held_pages)
            if chain.owner is None
            else chain.owner.ids.is_bound(units_of(held_pages))
        )
        check_unbound(band, how.held, is_minted)
        count += len(how.held)
    if how.unwritten is not None:
        check_places(band, "unwritten", how.unwritten, count)
    return Asked(count, how)


def _check_all_bound(chain: ChainBands, asked: list[Asked], pages: int) -> None:
    """Without an owner a page lives as long as a part of it is bound, so each new one must have a part bound."""
    is_bound: npt.NDArray[np.bool_] = np.zeros(pages, np.bool_)
    for ask, ratio in zip(asked, chain.ratios, strict=True):
        if not ratio or not ask.unit_count:
            continue
        if ask.how.fresh is None:
            return
        is_bound[ask.how.fresh // ratio] = True
    if not is_bound.all():
        raise ChainError(
            f"cannot take {pages} pages: no band binds any part of those at places {some(np.flatnonzero(~is_bound))}, and no "
            "full-attention band would ever free them"
        )


class Owed(NamedTuple):
    """Units of one band that a take did not zero; which of them is worked out only if anybody must know."""

    virtual: IntArray
    """Virtual units of the take."""

    zeroed: IntArray
    """Places of those that were zeroed after all."""

    @property
    def unit_count(self) -> int:
        """Units owed."""
        return len(self.virtual) - len(self.zeroed)

    def units(self) -> IntArray:
        """Virtual units owed."""
        return np.delete(self.virtual, self.zeroed) if len(self.zeroed) else self.virtual


class ZeroDebts:
    """Zero debts that are neither written nor paid. Usually one, from a step's take to its forward's recording."""

    def __init__(self) -> None:
        self._open: dict[Taken, dict[str, Owed]] = {}

    def __bool__(self) -> bool:
        """Whether any take's debt is open."""
        return bool(self._open)

    @property
    def unit_count(self) -> int:
        """Units owed."""
        return sum(owed.unit_count for debt in self._open.values() for owed in debt.values())

    def debts(self) -> list[dict[str, Owed]]:
        """What is owed by band, one a take."""
        return list(self._open.values())

    def open(self, taken: Taken, debt: dict[str, Owed]) -> None:
        """Note what a take did not zero, by band."""
        self._open[taken] = debt

    def of(self, taken: Taken) -> dict[str, Owed]:
        """What of a debt is still held, by band. Nothing for one that is over, or never was."""
        return self._open.get(taken, {})

    def close(self, taken: Taken) -> None:
        """End a debt, if it is open."""
        self._open.pop(taken, None)

    def forget(self, band_name: str, virtual: IntArray) -> None:
        """Units that are freed, or written otherwise, are owed no longer: soon they may be somebody else's."""
        for debt in self._open.values():
            owed = debt.get(band_name)
            if owed is not None:
                units = owed.units()
                debt[band_name] = Owed(units[~np.isin(units, virtual)], NO_UNITS)
        self._open = {
            taken: debt
            for taken, debt in self._open.items()
            if any(owed.unit_count for owed in debt.values())
        }

    def rename(self, band_name: str, sources: IntArray, targets: IntArray) -> None:
        """Units that were owed under the virtual ids `sources` are owed under `targets`, one each."""
        for debt in self._open.values():
            owed = debt.get(band_name)
            if owed is None:
                continue
            units = owed.units().copy()
            order = np.argsort(sources, kind="stable")
            places = np.minimum(np.searchsorted(sources, units, sorter=order), len(sources) - 1)
            named = sources[order[places]] == units
            units[named] = targets[order[places[named]]]
            debt[band_name] = Owed(units, NO_UNITS)

    def clone(self) -> ZeroDebts:
        """The same debts, which go their own way (row C13)."""
        clone = ZeroDebts()
        clone._open = {taken: dict(debt) for taken, debt in self._open.items()}
        return clone
