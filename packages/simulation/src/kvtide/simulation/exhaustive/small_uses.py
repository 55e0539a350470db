"""How copies, transfers and fixed units begin and end in the search; each at one moment, on one rank (compare `use_steps`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtide.device import IntArray
from kvtide.ledger import Access, HostCopy, NetworkTransfer, ReceiveHold, Reservation
from kvtide.simulation.exhaustive.ordered_device import COPIES, FORWARD, NETWORK, SCHEDULE, OrderedEvent
from kvtide.simulation.exhaustive.small_actions import Units, virtual_at
from kvtide.simulation.exhaustive.small_takes import pay, take_units, written
from kvtide.simulation.exhaustive.small_world import SmallUse, SmallWorld


def _back_up(world: SmallWorld, place: int, physical: int) -> str:
    units = ((place, virtual_at(world, place, physical)),)
    cells = world.cells([(place, physical)])
    behind = world.device.behind(FORWARD) | world.device.behind(SCHEDULE)
    event = world.device.work(COPIES, "a backup", cells, (), behind=behind | _load_behind(world))
    copy = HostCopy("copy", Access.READ, event)
    world.chain.uses.begin(copy, _named(world, units))
    world.copy = SmallUse("backup", "open", units, ((place, physical),), copy, event)
    return "queued"


def _load(world: SmallWorld) -> str:
    got = take_units(world, world.facts.shape.filled)
    if got is None:
        return "refused"
    owner = Reservation("load")
    world.chain.uses.fix(owner, _named(world, got[1]))
    world.copy = SmallUse("load", "announced", got[1], world.placed(got[1]), owner, taken=got[0])
    return "reserved"


def _submit(world: SmallWorld) -> str:
    use = world.copy
    assert use is not None, "it was reserved"
    assert isinstance(use.owner, Reservation), "it was reserved"
    behind = world.device.behind(FORWARD) | world.device.behind(SCHEDULE)
    event = world.device.work(COPIES, "a load", (), world.cells(world.placed(use.units)), behind=behind)
    copy = HostCopy("copy", Access.WRITE, event)
    world.chain.uses.begin(copy, _named(world, use.units))
    world.chain.uses.unfix(use.owner)
    if use.taken is not None:
        written(world, use.taken, use.units)
    world.copy = use._replace(stage="open", owner=copy, event=event, taken=None)
    return "submitted"


def _end_copy(world: SmallWorld) -> str:
    use = world.copy
    assert use is not None, "it is open"
    assert isinstance(use.owner, HostCopy), "it is open"
    assert isinstance(use.event, OrderedEvent), "it is open"
    world.device.host |= use.event.behind
    world.chain.uses.end(use.owner)
    world.copy = None
    return "over"


def _withdraw_load(world: SmallWorld) -> str:
    assert world.copy is not None, "it was reserved"
    world.chain.uses.unfix(world.copy.owner)
    if world.copy.taken is not None:
        pay(world, world.copy.taken, world.copy.units)
    world.copy = None
    return "withdrawn"


# ── transfers ──


def _send(world: SmallWorld, place: int, physical: int) -> str:
    units = ((place, virtual_at(world, place, physical)),)
    # Its gate, recorded now, has been seen by the host.
    world.device.host |= world.device.record_event(SCHEDULE).behind
    event = world.device.work(NETWORK, "a send", world.cells([(place, physical)]), ())
    transfer = NetworkTransfer("transfer", Access.READ)
    world.chain.uses.begin(transfer, _named(world, units))
    world.transfer = SmallUse("send", "open", units, ((place, physical),), transfer, event)
    return "begun"


def _receive(world: SmallWorld) -> str:
    got = take_units(world, world.facts.shape.filled)
    if got is None:
        return "refused"
    hold = ReceiveHold("receive")
    world.chain.uses.hold(hold, _named(world, got[1]))
    world.transfer = SmallUse("receive", "announced", got[1], (), hold, taken=got[0])
    return "held"


def _publish(world: SmallWorld) -> str:
    use = world.transfer
    assert use is not None, "it is held"
    assert isinstance(use.owner, ReceiveHold), "it is held"
    world.device.host |= world.device.record_event(SCHEDULE).behind
    places = world.placed(use.units)
    event = world.device.work(NETWORK, "a receive", (), world.cells(places))
    transfer = NetworkTransfer("transfer", Access.WRITE)
    world.chain.uses.begin(transfer, _named(world, use.units))
    world.chain.uses.release_hold(use.owner)
    if use.taken is not None:
        written(world, use.taken, use.units)
    world.transfer = SmallUse("receive", "open", use.units, places, transfer, event)
    return "begun"


def _withdraw_receive(world: SmallWorld) -> str:
    assert world.transfer is not None, "it is held"
    assert isinstance(world.transfer.owner, ReceiveHold), "it is held"
    world.chain.uses.release_hold(world.transfer.owner)
    if world.transfer.taken is not None:
        pay(world, world.transfer.taken, world.transfer.units)
    world.transfer = None
    return "withdrawn"


def _end_transfer(world: SmallWorld) -> str:
    world.end_transfer()
    return "over"


def _fail(world: SmallWorld) -> str:
    use = world.transfer
    assert use is not None, "it is open"
    assert isinstance(use.owner, NetworkTransfer), "it is open"
    world.chain.uses.quarantine(use.owner)
    world.transfer = use._replace(stage="quarantined")
    return "quarantined"


def _prove(world: SmallWorld) -> str:
    """It is proved that a failed transfer's engine touches nothing any more."""
    use = world.transfer
    assert use is not None, "it has failed"
    assert use.event is not None, "it has failed"
    world.device.host |= use.event.behind
    world.chain.uses.unfix(use.owner)
    world.transfer = None
    return "proved"


# ── fixed units ──


def _fix(world: SmallWorld, place: int, physical: int) -> str:
    units = ((place, virtual_at(world, place, physical)),)
    world.chain.uses.fix("fixed", _named(world, units))
    world.fixed = SmallUse("fix", "open", units, ((place, physical),), "fixed")
    return "fixed"


def _unfix(world: SmallWorld) -> str:
    assert world.fixed is not None, "it is fixed"
    world.chain.uses.unfix(world.fixed.owner)
    world.fixed = None
    return "unfixed"


# ── helpers ──


def _named(world: SmallWorld, units: Units) -> dict[str, IntArray]:
    return {
        band.name: np.array([unit for place, unit in units if place == band.place], np.int64)
        for band in world.facts.bands
        if any(place == band.place for place, _ in units)
    }


def _load_behind(world: SmallWorld) -> int:
    """Works behind an open load, which who reads its units waits for."""
    return next((use.event.behind for use in world.uses() if use.kind == "load" and use.event is not None), 0)


USE_STEPS: dict[str, Callable[..., str]] = {
    "back up": _back_up,
    "load": _load,
    "submit": _submit,
    "end copy": _end_copy,
    "withdraw load": _withdraw_load,
    "send": _send,
    "receive": _receive,
    "publish": _publish,
    "withdraw receive": _withdraw_receive,
    "end transfer": _end_transfer,
    "fail": _fail,
    "prove": _prove,
    "fix": _fix,
    "unfix": _unfix,
}
"""By the word of an action."""
