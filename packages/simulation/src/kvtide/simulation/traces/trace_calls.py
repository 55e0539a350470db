"""How the arguments and answers of a trace's calls travel as JSON (kinds: `trace_schema`).

Virtual ids, ordinals and answers are the implementation's; whoever replays a trace is told the recorded ids, so an implementation that
hands out others diverges at the take that does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import attrs
import numpy as np

from kvtide.chain import BandTake, ChainError, Taken, TakeRefusal
from kvtide.device import Event, IntArray
from kvtide.ledger import (
    Access,
    HostCopy,
    InvariantError,
    LaunchRecord,
    NetworkTransfer,
    ReceiveHold,
    RecordedForward,
    Reservation,
)
from kvtide.simulation.traces.trace_schema import TraceError

ERRORS = (ChainError, InvariantError)
"""What a call may raise, as an answer."""


def encoded_answer(result: object, take_count: int) -> dict[str, Any]:
    """What a call returned; a take that was served is number `take_count`."""
    match result:
        case None | RecordedForward():
            return {}
        case Taken():
            pages, slots = result.pages.tolist(), result.state_slots.tolist()
            return {"take": take_count, "pages": pages, "state_slots": slots}
        case TakeRefusal():
            figures = {
                band.name: {
                    "asked": band.asked,
                    "live": band.live,
                    "free": band.free,
                    "withheld": band.withheld,
                }
                for band in result.bands
            }
            return {"refused": figures}
        case LaunchRecord():
            return {"forward": result.forward}
        case bool() | int() | np.integer():
            return {"value": result if isinstance(result, bool) else int(result)}
        case _:
            raise TraceError(f"a trace holds no answer like {result!r}")


def encoded_fault(error: Exception) -> dict[str, Any]:
    """What a call raised that is no answer of an allocator: whoever replays it has come to an end."""
    return {"raised": type(error).__name__, "message": str(error)}


def encoded_error(error: Exception) -> dict[str, Any]:
    """What a call raised."""
    if isinstance(error, InvariantError):
        return {"error": "InvariantError", "invariant": error.invariant}
    return {"error": type(error).__name__}


@attrs.define
class Names:
    """What a trace calls the objects of one life: takes, events, owners. Recording names them, replaying makes them."""

    takes: list[Taken] = attrs.field(factory=list)
    """By number."""

    events: dict[str, Event] = attrs.field(factory=dict)
    """By name."""

    owners: dict[str, Hashable] = attrs.field(factory=dict)
    """By name."""

    _event_names: dict[Event, str] = attrs.field(factory=dict)
    _owner_names: dict[Hashable, str] = attrs.field(factory=dict)

    # ── recording ──

    def encoded(self, kind: str, value: Any) -> Any:
        """An argument as JSON; raises `TraceError` for one that a trace cannot hold."""
        try:
            return self._encoded(kind, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise TraceError(f"a trace holds no {kind} like {value!r}: {error}") from error

    def event_name(self, event: Event, whose: str) -> str:
        """The name of an event; if it has none, `whose`, or a number where another was called so."""
        if event not in self._event_names:
            is_taken = whose in self._event_names.values()
            self._event_names[event] = f"other {len(self._event_names)}" if is_taken else whose
        return self._event_names[event]

    def _encoded(self, kind: str, value: Any) -> Any:
        match kind:
            case "count":
                return _whole(value)
            case "text":
                return str(value)
            case "counts":
                return {name: _whole(count) for name, count in value.items()}
            case "units":
                return _listed(value)
            case "unit lists":
                return {name: None if units is None else _listed(units) for name, units in value.items()}
            case "takes":
                return None if value is None else {name: _take_document(take) for name, take in value.items()}
            case "take":
                return next(number for number, taken in enumerate(self.takes) if taken is value)
            case "record":
                return _whole(value.forward)
            case "recorded":
                return [_whole(value.forward), self._encoded("event", value.event)]
            case "event":
                return self.event_name(value, "other")
            case "owner":
                return self._owner_name(value)
            case _:
                return [self._owner_name(each) for each in value]

    def _owner_name(self, owner: Hashable) -> str:
        name = self._owner_names.get(owner)
        if name is None:
            name = self._owner_names[owner] = f"{_kind_of(owner)} {len(self._owner_names)}"
        return name

    # ── replaying ──

    def decoded(self, kind: str, value: Any, record_event: Callable[[], Event]) -> Any:
        """An argument from JSON; events and owners that were never named before are made."""
        match kind:
            case "units":
                return _array(value)
            case "unit lists":
                return {name: None if units is None else _array(units) for name, units in value.items()}
            case "takes":
                return None if value is None else {name: _take_from(each) for name, each in value.items()}
            case "take":
                # One that this life has refused: nobody owes anything for it.
                empty = Taken(_array([]), _array([]))
                return self.takes[value] if value < len(self.takes) else empty
            case "record":
                return LaunchRecord(value)
            case "recorded":
                return RecordedForward(value[0], self._event(value[1], record_event))
            case "event":
                return self._event(value, record_event)
            case "owner":
                return self._owner(value, record_event)
            case "owners":
                return [self._owner(each, record_event) for each in value]
            case _:
                return value

    def _event(self, name: str, record_event: Callable[[], Event]) -> Event:
        if name not in self.events:
            self.events[name] = record_event()
        return self.events[name]

    def _owner(self, name: str, record_event: Callable[[], Event]) -> Hashable:
        if name not in self.owners:
            self.owners[name] = _owner_of(name, record_event)
        return self.owners[name]


def _kind_of(owner: Hashable) -> str:
    match owner:
        case HostCopy():
            return f"copy-{owner.access.value}"
        case NetworkTransfer():
            return f"transfer-{owner.access.value}"
        case Reservation():
            return "reservation"
        case ReceiveHold():
            return "hold"
        case _:
            return "owner"


def _owner_of(name: str, record_event: Callable[[], Event]) -> Hashable:
    kind, _, access = name.split(" ", maxsplit=1)[0].partition("-")
    match kind:
        case "copy":
            return HostCopy(name, Access(access), record_event())
        case "transfer":
            return NetworkTransfer(name, Access(access))
        case "reservation":
            return Reservation(name)
        case "hold":
            return ReceiveHold(name)
        case _:
            return name


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError("a whole number is needed")
    return int(value)


def _listed(units: Any) -> list[int]:
    if not isinstance(units, np.ndarray) or units.ndim != 1 or units.dtype != np.int64:
        raise TypeError("a one-dimensional int64 array is needed")
    listed: list[int] = units.tolist()
    return listed


def _array(units: list[int]) -> IntArray:
    return np.array(units, np.int64)


def _take_document(take: BandTake) -> dict[str, Any]:
    return {
        "fresh": None if take.fresh is None else _listed(take.fresh),
        "held": _listed(take.held),
        "unwritten": None if take.unwritten is None else _listed(take.unwritten),
    }


def _take_from(document: Mapping[str, Any]) -> BandTake:
    fresh, unwritten = document["fresh"], document["unwritten"]
    return BandTake(
        None if fresh is None else _array(fresh),
        _array(document["held"]),
        None if unwritten is None else _array(unwritten),
    )
