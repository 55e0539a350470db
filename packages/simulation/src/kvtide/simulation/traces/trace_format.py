"""Traces of an allocator's life as JSON Lines (row X3): one header, then one line a call.

    {"trace": 1, "layout": {…}, "settings": {"waits_for_transfers": false}, "versions": {…}, "about": "…"}
    {"call": "chain.take", "args": {"pages": 2, "state_slots": 1, "bands": null},
     "answer": {"take": 0, "pages": [1, 2], "state_slots": [0]}, "state": {…}}

`docs/traces.md` is the schema. A line's `state` stands only where it differs from that of the line before. Keys that a reader does
not know are passed over; a header of another version is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import attrs

from kvtide.plan import ArenaLayout, BandLayout, Growth, SubPoolKind

VERSION = 1
"""Of the schema."""


class TraceError(ValueError):
    """A file that is no trace, or a call that a trace cannot hold."""


@attrs.frozen(kw_only=True)
class TraceHeader:
    """What a trace's calls are about."""

    layout: ArenaLayout
    """The arena's grids; planes are left out, no allocator decides by them."""

    waits_for_transfers: bool
    """Whether a relief may wait for transfers on the host."""

    about: str = ""
    """What the trace shows, for people."""

    versions: Mapping[str, str] = attrs.field(factory=dict)
    """Distribution → version that it was recorded with."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        layout = self.layout
        return {
            "trace": VERSION,
            "about": self.about,
            "layout": {
                "arena_bytes": layout.arena_bytes,
                "prefix_bytes": layout.prefix_bytes,
                "owner": layout.owner,
                "bands": [
                    {
                        "name": band.name,
                        "kind": band.kind.name,
                        "growth": band.growth.name,
                        "unit_bytes": band.unit_bytes,
                        "origin_bytes": band.origin_bytes,
                        "first_page": band.first_page,
                        "page_count": band.page_count,
                        "has_sink": band.has_sink,
                        "page_tokens": band.page_tokens,
                    }
                    for band in layout.bands
                ],
            },
            "settings": {"waits_for_transfers": self.waits_for_transfers},
            "versions": dict(self.versions),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TraceHeader:
        """What `document` made; raises `TraceError` for another version."""
        if document.get("trace") != VERSION:
            raise TraceError(f"its version is {document.get('trace')!r}, this one reads {VERSION}")
        layout = document["layout"]
        bands = tuple(
            BandLayout(
                **{
                    **band,
                    "kind": SubPoolKind[band["kind"]],
                    "growth": Growth[band["growth"]],
                    "planes": (),
                }
            )
            for band in layout["bands"]
        )
        return cls(
            layout=ArenaLayout(**{**layout, "bands": bands}),
            waits_for_transfers=document["settings"]["waits_for_transfers"],
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
            document = json.loads(text)
            state = document.get("state", state)
            found.append(TraceLine(document["call"], document["args"], document["answer"], state))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{name}, line {number}: no trace: {type(error).__name__}: {error}") from error
    return header, found
