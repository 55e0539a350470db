"""What callers may hand in: lists of virtual units that are theirs (row L8). Everything is checked before anything changes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.chain.band import Band
from kvtide.chain.errors import ChainError
from kvtide.chain.units import Units, some, units_of
from kvtide.device import IntArray
from kvtide.plan import SubPoolKind

_UNSIGNED = np.dtype(np.uint64)


def units_to_free(band: Band, virtual: Units) -> Units:
    """The physical units behind what a caller frees in `band`.

    Raises `ChainError` for ids that are not bound there, named twice, held, or reserved for a load: invariants
    `band.free_of_bound_page` and `band.free_outside_reservation`.
    """
    units = bound_units(band, virtual, "free")
    if band.ids.names_twice(virtual.ids, units):
        entries, times = np.unique(virtual.ids, return_counts=True)
        raise ChainError(_text(band, "free", entries[times > 1], "named twice in one free"))
    if band.usage.binds_layout:
        held = band.usage.is_held(units.ids)
        if held.any():
            raise ChainError(
                _text(
                    band,
                    "free",
                    virtual.ids[held],
                    "held until a peer is told of them; release the hold first",
                )
            )
        reserved = band.usage.reserved(units.ids)
        if reserved.any():
            raise ChainError(
                _text(band, "free", virtual.ids[reserved], "reserved for a load that has not been submitted")
            )
    return units


def bound_units(band: Band, virtual: Units, verb: str) -> Units:
    """The physical units behind checked virtual ones; raises `ChainError` for ids not bound in `band`."""
    units = band.ids.physical(virtual)
    if len(units) and units.item(units.argmin()) <= band.ids.unbound:
        unbound = virtual.ids[units <= band.ids.unbound]
        raise ChainError(_text(band, verb, unbound, "not bound (freed twice, or never taken)"))
    return units_of(units)


def checked(band: Band, virtual: IntArray, verb: str) -> Units:
    """A caller's list of ids of `band`; raises `ChainError` for anything else."""
    check_ids(band, virtual, verb)
    return units_of(virtual)


def check_unbound(
    band: Band, virtual: IntArray, is_minted: npt.NDArray[np.bool_], verb: str = "take"
) -> None:
    """Raise `ChainError` unless each of `virtual`, ids of `band`, is named once, not bound there, and of a page that is minted."""
    unminted = virtual[~is_minted]
    if len(unminted):
        raise ChainError(_text(band, verb, unminted, "of virtual pages that are not minted"))
    bound = virtual[band.ids.is_bound(units_of(virtual))]
    if len(bound):
        raise ChainError(_text(band, verb, bound, "bound already"))
    if len(np.unique(virtual)) != len(virtual):
        raise ChainError(_text(band, verb, virtual, "one is named twice"))


def check_ids(band: Band, virtual: IntArray, verb: str) -> None:
    """Raise `ChainError` unless `virtual` is a list of ids of `band`."""
    if not isinstance(virtual, np.ndarray) or virtual.ndim != 1 or virtual.dtype != np.int64:
        shape = (
            f"{virtual.dtype} {list(virtual.shape)}"
            if isinstance(virtual, np.ndarray)
            else type(virtual).__name__
        )
        raise ChainError(
            f"cannot {verb} {_what(band)} of band {band.layout.name!r}: ids must be a one-dimensional int64 array, found {shape}"
        )
    if len(virtual):
        # As unsigned numbers, negative ids lie beyond every band: one pass instead of two.
        unsigned = virtual.view(_UNSIGNED)
        if unsigned.item(unsigned.argmax()) >= band.ids.virtual_count:
            outside = virtual[(virtual < 0) | (virtual >= band.ids.virtual_count)]
            raise ChainError(_text(band, verb, outside, f"ids run from 0 to {band.ids.virtual_count - 1}"))


def check_places(band: Band, name: str, places: IntArray, count: int) -> None:
    """Raise `ChainError` unless `places` rise within `[0, count)`."""
    if places.ndim != 1 or places.dtype != np.int64:
        found = f"{places.dtype} {list(places.shape)}"
    elif not len(places) or (places[0] >= 0 and places[-1] < count and (places[1:] > places[:-1]).all()):
        return
    else:
        found = some(places)
    raise ChainError(
        f"cannot take {_what(band)} of band {band.layout.name!r}: `{name}` must be places that rise within [0, {count}), a "
        f"one-dimensional int64 array, found {found}"
    )


def _text(band: Band, verb: str, virtual: IntArray, why: str) -> str:
    return f"cannot {verb} {_what(band)} {some(virtual)} of band {band.layout.name!r}: {why}"


def _what(band: Band) -> str:
    return "state slots" if band.layout.kind is SubPoolKind.STATE else "pages"


def check_may_read(band: Band, virtual: IntArray, units: IntArray, verb: str) -> None:
    """Raise `ChainError` for units that a receive still writes."""
    received = band.usage.writers(units).transfers
    if received:
        names = [transfer.name for transfer in received]
        raise ChainError(_text(band, verb, virtual, f"{names} still write some of them"))


def check_may_write(band: Band, virtual: IntArray, units: IntArray, verb: str) -> None:
    """Raise `ChainError` for units that are fixed or under a transfer."""
    if band.usage.binds_layout:
        withheld = band.usage.withheld(units)
        if withheld.any():
            raise ChainError(
                _text(band, verb, virtual[withheld], "fixed, or under a transfer; end that first")
            )


def is_count(value: object) -> bool:
    """Whether a caller's count is an integer of 0 or more, Python's or NumPy's."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0
