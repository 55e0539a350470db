"""Divergences for people and programs: what differs, and the calls and states around it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtide.simulation.traces.replay import Divergence
from kvtide.simulation.traces.trace_format import TraceLine

_LINES_BEFORE = 2  # of a trace file: lines count from 1, and the header is the first


def told(
    divergence: Divergence,
    lines: Sequence[TraceLine],
    *,
    around: int,
    first: str = "recorded",
    second: str = "found",
) -> Iterator[str]:
    """The calls around a divergence, what the two sides have there, and the state that both came from, line by line."""
    place = divergence.place
    for before in range(max(0, place - around), min(place, len(lines))):
        yield f"  {before + _LINES_BEFORE:6} {_call(lines[before])} → {_json(lines[before].answer)}"
    if 0 < place <= len(lines):
        yield f"         state {_json(lines[place - 1].state)}"
    if place < len(lines):
        yield f"> {place + _LINES_BEFORE:6} {_call(lines[place])}"
    for name, found in zip((first, second), _parts_that_differ(divergence), strict=True):
        yield f"         {divergence.what} {name}: {_json(found)}"
    for unit in divergence.units:
        one, other = ("nothing" if place is None else place for place in (unit.first, unit.second))
        yield f"         band {unit.band!r} binds unit {unit.virtual} to {one} in {first}, to {other} in {second}"
    for after in range(place + 1, min(place + 1 + around, len(lines))):
        yield f"  {after + _LINES_BEFORE:6} {_call(lines[after])} → {_json(lines[after].answer)}"


def document(divergence: Divergence) -> dict[str, Any]:
    """As JSON; `line` is that of a trace file."""
    first, second = _parts_that_differ(divergence)
    return {
        "line": divergence.place + _LINES_BEFORE,
        "what": divergence.what,
        "first": first,
        "second": second,
        "units": [unit._asdict() for unit in divergence.units],
    }


def _parts_that_differ(divergence: Divergence) -> tuple[Any, Any]:
    """What the two sides have there; of states no more than differs."""
    if divergence.what != "state":
        return divergence.first, divergence.second
    return _apart(divergence.first, divergence.second)


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for key in one.keys() & other.keys():
        if one[key] == other[key]:
            continue
        are_objects = isinstance(one[key], Mapping) and isinstance(other[key], Mapping)
        found[0][key], found[1][key] = _apart(one[key], other[key]) if are_objects else (one[key], other[key])
    return found


def _call(line: TraceLine) -> str:
    shown = ", ".join(f"{name}={_json(value)}" for name, value in line.args.items())
    return f"{line.call}({shown})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
