"""Divergences for people and programs: what differs, and the calls and states around it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
    yield f"         {divergence.what} {first}: {_json(divergence.first)}"
    yield f"         {divergence.what} {second}: {_json(divergence.second)}"
    for after in range(place + 1, min(place + 1 + around, len(lines))):
        yield f"  {after + _LINES_BEFORE:6} {_call(lines[after])} → {_json(lines[after].answer)}"


def document(divergence: Divergence) -> dict[str, Any]:
    """As JSON; `line` is that of a trace file."""
    return {
        "line": divergence.place + _LINES_BEFORE,
        "what": divergence.what,
        "first": divergence.first,
        "second": divergence.second,
    }


def _call(line: TraceLine) -> str:
    shown = ", ".join(f"{name}={_json(value)}" for name, value in line.args.items())
    return f"{line.call}({shown})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
