"""Mistakes over units that somebody else uses, and in telling of uses.

Whoever uses the unit is made up for the call, so that no mistake has to wait until a run has such a use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np

from kvtide.chain import Taken
from kvtide.device import IntArray
from kvtide.ledger import Access, NetworkTransfer, ReceiveHold, Reservation
from kvtide.simulation.bands import NONE
from kvtide.simulation.operations.mistakes import Call, Mistake, free_of
from kvtide.simulation.rank import Rank


def _reserved(at: Mistake) -> Call | None:
    """What a load has reserved, beside what it has not."""
    held = at.world.held(at.band)
    if not len(held):
        return None
    return _while_fixed(at, held[[at.pick % len(held)]], free_of(at.band, held), Reservation("a load"))


def _held(at: Mistake) -> Call | None:
    """What a receive holds, beside what it does not."""
    held = at.world.held(at.band)
    if not len(held):
        return None

    def free(rank: Rank) -> object:
        hold = ReceiveHold("a receive")
        rank.chain.uses.hold(hold, {at.band.name: held[[at.pick % len(held)]]})
        try:
            return free_of(at.band, held)(rank)
        finally:
            rank.chain.uses.release_hold(hold)

    return free


def _copied_onto_fixed(at: Mistake) -> Call | None:
    """A state slot that stays as it is for somebody."""
    slots = _two_slots(at)
    return None if slots is None else _while_fixed(at, slots[1:], _copy(slots), "a promise")


def _copied_onto_sent(at: Mistake) -> Call | None:
    """A state slot that a peer reads."""
    slots = _two_slots(at)
    return None if slots is None else _under_transfer(at, slots[1:], _copy(slots), Access.READ)


def _copied_from_received(at: Mistake) -> Call | None:
    """A state slot that a peer still writes."""
    slots = _two_slots(at)
    return None if slots is None else _under_transfer(at, slots[:1], _copy(slots), Access.WRITE)


def _paid_onto_fixed(at: Mistake) -> Call | None:
    """Zeroing what stays as it is for somebody; the debt stays open."""
    name = at.band.name
    # A unit that was freed may be owed by a later take, or by a load's or a receive's.
    others = [use.units.get(name, NONE) for use in at.world.uses.uses if use.taken is not None]
    for take in reversed(at.world.batch.takes):
        units = take.promised[name]
        owed = units[
            at.world.shadow.undefined[name][units] & ~np.isin(units, np.concatenate([*others, NONE]))
        ]
        if len(owed):
            return _while_fixed(at, owed[[at.pick % len(owed)]], partial(_pay, take.taken), "a promise")
        others.append(units)
    return None


def _pay(taken: Sequence[Taken], rank: Rank) -> object:
    rank.chain.pay_zero_debt(taken[rank.place])
    return None


def _begun_twice(at: Mistake) -> Call | None:
    """One submission told of twice."""
    units = _one(at)

    def begin(rank: Rank) -> None:
        transfer = NetworkTransfer("a send", Access.READ)
        rank.chain.uses.begin(transfer, {at.band.name: units})
        try:
            rank.chain.uses.begin(transfer, {at.band.name: units})
        finally:
            rank.chain.uses.end(transfer)

    return begin if len(units) else None


def _ended_twice(at: Mistake) -> Call | None:
    """What is over ends again, in one of the four ways in which uses do."""
    units = _one(at)

    def end(rank: Rank) -> object:
        uses, named = rank.chain.uses, {at.band.name: units}
        transfer, hold, owner = NetworkTransfer("a send", Access.READ), ReceiveHold("a receive"), "a promise"
        uses.begin(transfer, named)
        uses.end(transfer)
        uses.hold(hold, named)
        uses.release_hold(hold)
        uses.fix(owner, named)
        uses.unfix(owner)
        again: tuple[Call, ...] = (
            lambda _: uses.end(transfer),
            lambda _: uses.release_hold(hold),
            lambda _: uses.unfix(owner),
            lambda _: uses.quarantine(transfer),
        )
        return again[at.pick % len(again)](rank)

    return end if len(units) else None


def _unbound(at: Mistake) -> Call | None:
    """A use of what nobody holds, beside what somebody does."""
    free = np.flatnonzero(~at.world.shadow.bound[at.band.name])[0 if at.band.is_state else at.band.ratio :]
    return _fix(at, np.append(_one(at), free[at.pick % len(free)])) if len(free) else None


def _named_twice(at: Mistake) -> Call | None:
    """A use that names one unit twice."""
    units = _one(at)
    return _fix(at, np.concatenate([units, units])) if len(units) else None


def _of_nothing(at: Mistake) -> Call | None:
    """A use of no unit, which nothing would ever end."""
    return _fix(at, NONE)


def collect(at: Mistake, rank: Rank) -> None:
    """The end of any use has a band look for units that have come free since: let that be done before."""
    units = _one(at)
    if len(units):
        transfer = NetworkTransfer("a send", Access.READ)
        rank.chain.uses.begin(transfer, {at.band.name: units})
        rank.chain.uses.end(transfer)


def _one(at: Mistake) -> IntArray:
    """One unit that somebody holds, if anybody does."""
    held = at.world.held(at.band)
    return held[[at.pick % len(held)]] if len(held) else NONE


def _two_slots(at: Mistake) -> IntArray | None:
    held = at.world.held(at.band)
    if not at.band.is_state or len(held) < 2:
        return None
    return held[[at.pick % len(held), (at.pick + 1) % len(held)]]


def _copy(slots: IntArray) -> Call:
    return lambda rank: rank.chain.copy_state_slots(slots[:1], slots[1:])


def _fix(at: Mistake, units: IntArray) -> Call:
    return lambda rank: rank.chain.uses.fix("a promise", {at.band.name: units})


def _while_fixed(at: Mistake, units: IntArray, call: Call, owner: Reservation | str) -> Call:
    def fixed(rank: Rank) -> object:
        rank.chain.uses.fix(owner, {at.band.name: units})
        try:
            return call(rank)
        finally:
            rank.chain.uses.unfix(owner)

    return fixed


def _under_transfer(at: Mistake, units: IntArray, call: Call, access: Access) -> Call:
    def under(rank: Rank) -> object:
        transfer = NetworkTransfer("a transfer", access)
        rank.chain.uses.begin(transfer, {at.band.name: units})
        try:
            return call(rank)
        finally:
            rank.chain.uses.end(transfer)

    return under


OF_USES: Mapping[str, Callable[[Mistake], Call | None]] = MappingProxyType(
    {
        "a free of what a load has reserved": _reserved,
        "a free of what a receive holds": _held,
        "a copy onto what is fixed": _copied_onto_fixed,
        "a copy onto what is sent": _copied_onto_sent,
        "a copy of what is received": _copied_from_received,
        "a payment onto what is fixed": _paid_onto_fixed,
        "a use that is begun twice": _begun_twice,
        "a use that is ended twice": _ended_twice,
        "a use of what is not bound": _unbound,
        "a use of one unit twice": _named_twice,
        "a use of nothing": _of_nothing,
    }
)
"""By name."""
