"""Traces of an allocator's life as JSON Lines (row X3): one header, then one line a call.

    {"trace": 1, "layout": {…}, "settings": {…}, "versions": {…}, "about": "…"}
    {"call": "chain.take", "args": {"pages": 2, "state_slots": 1, "bands": null},
     "answer": {"take": 0, "pages": [1, 2], "state_slots": [0]}, "state": {…}, "rebound": {…}}

`docs/traces.md` is the schema. A line's `state` stands only where it differs from that of the line before, `rebound` only where
something is. Keys that a reader does not know are passed over; a header of another version, a layout that is none, and calls and
arguments that no trace holds are refused, with their line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeAlias

import attrs

from kvtide.chain import FLUSH_REACH
from kvtide.plan import ArenaLayout
from kvtide.simulation.traces.trace_layouts import layout_document, layout_of
from kvtide.simulation.traces.trace_schema import TraceError, check_call, is_whole

VERSION = 1
"""Of the schema."""


Rebound: TypeAlias = dict[str, list[list[int | None]]]
"""Band → pairs of a virtual unit and the physical one that it is bound to from now on, None for none."""


@attrs.frozen(kw_only=True)
class TraceHeader:
    """What a trace's calls are about."""

    layout: ArenaLayout
    """The arena's grids; planes are left out, no allocator decides by them."""

    waits_for_transfers: bool
    """Whether a relief may wait for transfers on the host."""

    flush_reach: int = FLUSH_REACH
    """How many times as far as a take needs a flush retreats."""

    about: str = ""
    """What the trace shows, for people."""

    versions: Mapping[str, str] = attrs.field(factory=dict)
    """Distribution → version that it was recorded with."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "trace": VERSION,
            "about": self.about,
            "layout": layout_document(self.layout),
            "settings": {
                "waits_for_transfers": self.waits_for_transfers,
                "flush_reach": self.flush_reach,
            },
            "versions": dict(self.versions),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TraceHeader:
        """What `document` made; raises `TraceError` for another version, and for a layout that is none."""
        if document.get("trace") != VERSION:
            raise TraceError(f"its version is {document.get('trace')!r}, this one reads {VERSION}")
        settings = document["settings"]
        waits, flush_reach = settings["waits_for_transfers"], settings.get("flush_reach", FLUSH_REACH)
        if not isinstance(waits, bool):
            raise TraceError(f"waits_for_transfers is {waits!r}, not true or false")
        if not is_whole(flush_reach) or flush_reach < 1:
            raise TraceError(f"flush_reach is {flush_reach!r}, not a whole number from 1")
        return cls(
            layout=layout_of(document["layout"]),
            waits_for_transfers=waits,
            flush_reach=flush_reach,
            about=document.get("about", ""),
            versions=document.get("versions", {}),
        )


class TraceLine(NamedTuple):
    """One call."""

    call: str
    """Key of `CALLS`."""

    args: dict[str, Any]
    """By name of the parameter."""

    answer: dict[str, Any]
    """What it returned or raised."""

    state: dict[str, Any]
    """Of the allocator afterwards."""

    rebound: Rebound = {}  # noqa: RUF012  (nobody writes to it)
    """What the call has bound anew, or let go of, as far as it was told."""


class TraceWriter:
    """Writes a trace, line by line."""

    def __init__(self, out: TextIO, header: TraceHeader) -> None:
        """Begin with the header."""
        self._out = out
        self._state: dict[str, Any] = {}
        self.line_count = 0
        """Calls written."""
        self._write(header.document())

    def write(self, line: TraceLine) -> None:
        """One more call."""
        document: dict[str, Any] = {"call": line.call, "args": line.args, "answer": line.answer}
        if line.state != self._state:
            document["state"] = self._state = line.state
        if line.rebound:
            document["rebound"] = line.rebound
        self._write(document)
        self.line_count += 1

    def _write(self, document: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> tuple[TraceHeader, list[TraceLine]]:
    """Read a whole trace; raises `TraceError` that says which line is none, `OSError` for no file."""
    with path.open(encoding="utf-8") as lines:
        return parse_trace(lines, str(path))


def parse_trace(lines: Iterable[str], name: str) -> tuple[TraceHeader, list[TraceLine]]:
    """As `read_trace`, of a file's lines."""
    number = 1
    found = []
    state: dict[str, Any] = {}
    try:
        numbered = iter(lines)
        header = TraceHeader.from_document(json.loads(next(numbered, "")))
        for text in numbered:
            number += 1
            line = _line_of(json.loads(text), state)
            state = line.state
            found.append(line)
    except TraceError as error:
        raise TraceError(f"{name}, line {number}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{name}, line {number}: no trace: {type(error).__name__}: {error}") from error
    return header, found


def _line_of(document: Any, state: dict[str, Any]) -> TraceLine:
    """One call; its state is that of the line before where it tells none."""
    line = TraceLine(
        document["call"],
        document["args"],
        document["answer"],
        document.get("state", state),
        document.get("rebound", {}),
    )
    check_call(line.call, line.args)
    for key in ("answer", "state", "rebound"):
        if not isinstance(getattr(line, key), dict):
            raise TraceError(f"its {key} is {getattr(line, key)!r}, not an object")
    for band, entries in line.rebound.items():
        if not all(len(entry) == 2 and is_whole(entry[0]) for entry in entries):
            raise TraceError(f"rebound units of band {band!r} are no pairs")
    return line
