"""What a trace may hold: its calls, the kinds of their arguments, and what is refused where it is read.

| kind of argument | JSON |
| - | - |
| `count` | a whole number |
| `text` | a string |
| `counts` | band → units |
| `units` | a list of virtual units |
| `unit lists` | band → such a list, or null for "unknown" |
| `takes` | null, or band → `fresh`, `held`, `unwritten`, each null or a list |
| `take` | the number of an earlier take, as its answer says |
| `record` | a forward's ordinal, as `steps.forward_launched` answered |
| `recorded` | the ordinal and its event |
| `event` | `forward 3`, `completion 3`, or `other`: whose end it is |
| `owner`, `owners` | `transfer-read 4`: what it is, then a number of its own |

Whole numbers fit in 64 bits. That a call names bands and units that exist is not asked here: what it is answered then is part of a life.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


class TraceError(ValueError):
    """A file that is no trace, or a call that a trace cannot hold."""


CALLS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "chain.take": {"pages": "count", "state_slots": "count", "bands": "takes"},
        "chain.ensure_capacity": {"units": "counts"},
        "chain.units_fit": {"units": "counts"},
        "chain.admits": {"units": "counts", "evictable": "counts"},
        "chain.fits_after_frees": {"units": "counts", "freed": "counts"},
        "chain.prealloc_fits": {"units": "counts", "held_back": "counts"},
        "chain.flush_opportunistic": {"max_moves": "count"},
        "chain.written": {"taken": "take"},
        "chain.pay_zero_debt": {"taken": "take"},
        "chain.forward_recorded": {"forward": "recorded", "writes": "unit lists"},
        "chain.forward_processed": {"forward": "count"},
        "chain.copy_state_slots": {"sources": "units", "targets": "units"},
        "chain.rehome_window": {"band_name": "text", "sources": "units", "targets": "units"},
        "chain.free_pages": {"band_name": "text", "virtual": "units"},
        "chain.free_state_slots": {"virtual_slots": "units"},
        "uses.begin": {"signal": "owner", "units": "unit lists"},
        "uses.end": {"signal": "owner"},
        "uses.end_each": {"signals": "owners"},
        "uses.fix": {"owner": "owner", "units": "unit lists"},
        "uses.unfix": {"owner": "owner"},
        "uses.hold": {"hold": "owner", "units": "unit lists"},
        "uses.release_hold": {"hold": "owner"},
        "uses.quarantine": {"transfer": "owner"},
        "steps.forward_launched": {},
        "steps.forward_recorded": {"record": "record", "event": "event"},
        "steps.completion_recorded": {"record": "record", "completion": "event"},
        "steps.forward_aborted": {"record": "record"},
        "steps.host_synchronised": {"event": "event"},
        "steps.wait_queued": {"event": "event"},
        "steps.forward_processed": {"record": "record"},
    }
)
"""Every call that a trace may hold → its parameters, each with the kind of its argument."""

OWNERS = ("copy-read", "copy-write", "transfer-read", "transfer-write", "reservation", "hold", "owner")
"""What an owner's name may begin with."""


def check_call(call: Any, args: Any) -> None:
    """Raise `TraceError` for a call that no trace holds, and for arguments that are not what it takes.

    Keys that are no parameters are passed over.
    """
    if call not in CALLS:
        raise TraceError(f"no call {call!r}; a trace holds {', '.join(CALLS)}")
    if not isinstance(args, dict):
        raise TraceError(f"the args of {call} are {_shown(args)}, not an object")
    for parameter, kind in CALLS[call].items():
        if parameter not in args:
            raise TraceError(f"the args of {call} are without {parameter!r}: {_shown(args)}")
        if not _KINDS[kind](args[parameter]):
            raise TraceError(f"{parameter!r} of {call} is {_shown(args[parameter])}, not of kind {kind!r}")


def is_whole(value: Any) -> bool:
    """Whether it is a whole number of 64 bits; `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_whole, value))


def _is_list_or_null(value: Any) -> bool:
    return value is None or _is_list(value)


def _is_by_band(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_one, value.values()))


def _is_take(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"fresh", "held", "unwritten"} <= value.keys()
        and _is_list(value["held"])
        and _is_list_or_null(value["fresh"])
        and _is_list_or_null(value["unwritten"])
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_owner(value: Any) -> bool:
    return isinstance(value, str) and value.split(" ", maxsplit=1)[0] in OWNERS


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "count": is_whole,
    "text": _is_text,
    "counts": lambda value: _is_by_band(value, is_whole),
    "units": _is_list,
    "unit lists": lambda value: _is_by_band(value, _is_list_or_null),
    "takes": lambda value: value is None or _is_by_band(value, _is_take),
    "take": lambda value: is_whole(value) and value >= 0,
    "record": is_whole,
    "recorded": lambda value: (
        isinstance(value, list) and len(value) == 2 and is_whole(value[0]) and _is_text(value[1])
    ),
    "event": _is_text,
    "owner": _is_owner,
    "owners": lambda value: isinstance(value, list) and all(map(_is_owner, value)),
}


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"
