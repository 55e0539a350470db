"""What others do with a chain's units, as the chain is told of it: copies, transfers, reservations, holds (rows L4, H1, H2, T1-T6).

Units are named by virtual ids and resolved when the call is made: from then on the use is of those bytes, wherever the virtual
unit moves. Each call is one agreed step: every rank makes it at the same place in its order of calls. None waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.chain.band import Band
from kvtide.chain.chain_bands import ChainBands
from kvtide.chain.checks import bound_units, checked
from kvtide.chain.errors import ChainError
from kvtide.chain.units import some
from kvtide.device import IntArray
from kvtide.ledger import HostCopy, NetworkTransfer, ReceiveHold, Signal


class ChainUses:
    """Uses of the units of one chain. Lists of units are one-dimensional int64 arrays of virtual ids, by band name.

    A method raises `ChainError`, with nothing changed, for units that are not bound or named twice and for no unit at all, and `InvariantError` for a use that is begun
    or ended twice.
    """

    def __init__(self, bands: ChainBands) -> None:
        self._bands = bands

    @property
    def has_host_copies(self) -> bool:
        """Whether a host copy is in flight: when it ends it lets go of its units."""
        return any(isinstance(signal, HostCopy) for band in self._bands for signal in band.usage.signals())

    @property
    def bind_layout(self) -> bool:
        """Whether fixed units, transfers or holds bear on where some band may stand."""
        return any(band.usage.binds_layout for band in self._bands)

    @property
    def moment(self) -> Hashable:
        """Alike while `keeps` answers the same."""
        return tuple(band.usage.epoch for band in self._bands)

    def keeps(self, band_name: str, virtual: IntArray) -> npt.NDArray[np.bool_]:
        """Which bound units of a band would not come free if they were given up now: fixed, under a transfer, or held for a peer."""
        band = self._bands[band_name]
        units = bound_units(band, checked(band, virtual, "ask about"), "ask about").ids
        kept: npt.NDArray[np.bool_] = band.usage.withheld(units) | band.usage.is_held(units)
        return kept

    def begin(self, signal: Signal, units: Mapping[str, IntArray]) -> None:
        """A copy or transfer of these units is submitted; whoever writes them next waits for it as `CLEARANCE` says."""
        for band, physical in self._resolved(units, "use"):
            band.usage.record(signal, physical)

    def end(self, signal: Signal) -> None:
        """It is over on every rank: its acknowledgement was agreed on, or the transfer was released."""
        self._of_all(signal, "use", lambda band: signal in band.usage, lambda band: band.usage.end(signal))

    def end_each(self, signals: Sequence[Signal]) -> None:
        """Several are over, in this order."""
        for signal in signals:
            self.end(signal)

    def fix(self, owner: Hashable, units: Mapping[str, IntArray]) -> None:
        """Promise that these units stay where they are until `unfix(owner)`; an owner is anything with an identity.

        A `Reservation` also keeps its units from being freed, until its load is submitted (row H2).
        """
        for band, physical in self._resolved(units, "fix"):
            band.usage.fix(owner, physical)

    def unfix(self, owner: Hashable) -> None:
        """End such a promise, or a quarantine: its units may move again, and those freed meanwhile are free."""
        self._of_all(
            owner, "fixed unit", lambda band: band.usage.fixes(owner), lambda band: band.usage.unfix(owner)
        )

    def hold(self, hold: ReceiveHold, units: Mapping[str, IntArray]) -> None:
        """Keep moves made for gain away from units that a peer will be told of; a move that must be made takes the hold along."""
        for band, physical in self._resolved(units, "hold"):
            band.usage.hold(hold, physical)

    def release_hold(self, hold: ReceiveHold) -> None:
        """The peer knows, or never will."""
        self._of_all(
            hold, "hold", lambda band: band.usage.holds(hold), lambda band: band.usage.release_hold(hold)
        )

    def quarantine(self, transfer: NetworkTransfer) -> None:
        """A failed transfer may still touch its units: nobody waits for it any more, and nobody gets them before `unfix(transfer)`."""
        self._of_all(
            transfer, "use", lambda band: transfer in band.usage, lambda band: band.usage.quarantine(transfer)
        )

    def _resolved(self, units: Mapping[str, IntArray], verb: str) -> list[tuple[Band, IntArray]]:
        """Bands and physical units, all of them looked at before anything is recorded."""
        found = []
        for name, virtual in units.items():
            band = self._bands[name]
            named = checked(band, virtual, verb)
            physical = bound_units(band, named, verb)
            if band.ids.names_twice(virtual, physical):
                raise ChainError(f"cannot {verb} units {some(virtual)} of band {name!r}: one is named twice")
            found.append((band, physical.ids))
        if not any(len(physical) for _, physical in found):
            raise ChainError(f"cannot {verb} no unit at all: nothing would ever end it")
        return found

    def _of_all(
        self, what: object, kind: str, has: Callable[[Band], bool], act: Callable[[Band], object]
    ) -> None:
        """Act on each band that has the use, and let it reuse what that kept from it."""
        of_it = [band for band in self._bands if has(band)]
        if not of_it:
            raise ChainError(f"no band has a {kind} by {what!r}: it was ended before, or never begun")
        for band in of_it:
            act(band)
            band.release_withheld()
