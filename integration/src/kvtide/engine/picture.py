"""A picture of the arena over time: a row a step, bands coloured, holes tinted, free bytes blank.

    bytes of the arena →
    step 0   |sinks|███ ▒█|            |      ███|      █ live   ▒ hole or pending
    step 1   |sinks|█████ |      ·······   ██████|
    ↓

A row whose step rearranged the bands has a tick beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from html import escape

import attrs

from kvtide.plan import ArenaLayout, BandLayout
from kvtide.storage import KVStorage

_WIDTH, _ROW_HEIGHT, _LEFT, _TOP, _RIGHT, _LINE = 960.0, 4, 64, 84, 24, 18
_COLOURS = ("#2f6f9f", "#d98032", "#4c9a57", "#8e5ea2", "#b5483d", "#6b6b3a")
_SINK_COLOUR, _FREE_COLOUR, _TEXT_COLOUR, _TICK_COLOUR = "#9a9a9a", "#f4f2ec", "#333333", "#c0392b"
_HOLE_OPACITY = 0.35

Run = tuple[int, int]
"""Start and end byte."""


@attrs.frozen
class BandFrame:
    """One band at one step."""

    span: Run
    """From its lowest to its highest page."""

    live: tuple[Run, ...]
    """Live pages, neighbours joined."""


@attrs.frozen
class ArenaFrame:
    """The arena at one step."""

    bands: tuple[BandFrame, ...]
    """In chain order."""

    rearrangements: int
    """Rearrangements since the start."""


def capture(storage: KVStorage) -> ArenaFrame:
    """What the arena holds now; read-only."""
    chain = storage.chain
    frames = []
    for band in storage.layout.bands:
        span = chain.span(band.name)
        live = tuple(_runs(band, chain.live_units(band.name).tolist()))
        frames.append(BandFrame((band.start_byte(span.first_page), band.start_byte(span.end_page)), live))
    return ArenaFrame(tuple(frames), chain.statistics().rearrangements)


def draw(layout: ArenaLayout, frames: Sequence[ArenaFrame], *, title: str, walls: Sequence[int] = ()) -> str:
    """An SVG of `frames`, one row each; `walls` are bytes at which to draw a dashed line, for comparison."""
    height = _TOP + _ROW_HEIGHT * len(frames) + 2 * _LINE
    scale = _WIDTH / layout.arena_bytes
    body = [
        _text(_LEFT, 24, title, size=16, weight="bold"),
        *_legend(layout, bool(walls)),
        _rect(_LEFT, _TOP, _WIDTH, _ROW_HEIGHT * len(frames), _FREE_COLOUR),
        _rect(_LEFT, _TOP, layout.prefix_bytes * scale, _ROW_HEIGHT * len(frames), _SINK_COLOUR),
    ]
    for place, colour in zip(range(len(layout.bands)), itertools.cycle(_COLOURS)):
        spans = _path(([frame.bands[place].span] for frame in frames), scale)
        live = _path((frame.bands[place].live for frame in frames), scale)
        body.append(f'<path d="{spans}" fill="{colour}" fill-opacity="{_HOLE_OPACITY}"/>')
        body.append(f'<path d="{live}" fill="{colour}"/>')
    body += _wall_lines(walls, scale, len(frames))
    body += _ticks(frames)
    body += _axes(layout, len(frames))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT:g}" height="{height}" '
        f'viewBox="0 0 {_LEFT + _WIDTH + _RIGHT:g} {height}" font-family="sans-serif">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _runs(band: BandLayout, pages: Sequence[int]) -> Iterator[Run]:
    """Byte runs of ascending `pages`."""
    for _, group in itertools.groupby(enumerate(pages), key=lambda item: item[1] - item[0]):
        members = [page for _, page in group]
        yield band.start_byte(members[0]), band.start_byte(members[-1] + 1)


def _path(rows: Iterator[Sequence[Run]] | Iterator[list[Run]], scale: float) -> str:
    parts = []
    for row, runs in enumerate(rows):
        top = _TOP + row * _ROW_HEIGHT
        for start, end in runs:
            if end > start:
                left, width = _LEFT + start * scale, (end - start) * scale
                parts.append(f"M{left:.2f} {top}h{width:.2f}v{_ROW_HEIGHT}h-{width:.2f}z")
    return "".join(parts)


def _legend(layout: ArenaLayout, has_walls: bool) -> Iterator[str]:
    entries = [("sinks", _SINK_COLOUR, 1.0)]
    for band, colour in zip(layout.bands, itertools.cycle(_COLOURS)):
        entries.append((f"{band.name} ({band.growth.value})", colour, 1.0))
    entries += [("holes: tinted", _COLOURS[0], _HOLE_OPACITY), ("free: blank", _FREE_COLOUR, 1.0)]
    left = float(_LEFT)
    for label, colour, opacity in entries:
        yield f'<rect x="{left:g}" y="38" width="12" height="12" fill="{colour}" fill-opacity="{opacity}" stroke="#cccccc"/>'
        yield _text(left + 17, 48, label)
        left += 34 + 6.6 * len(label)
    note = "tick at the right: pages moved in this step" + (
        "; dashed: walls of a static split" if has_walls else ""
    )
    yield _text(_LEFT, 70, note)


def _wall_lines(walls: Sequence[int], scale: float, row_count: int) -> Iterator[str]:
    for byte in walls:
        left = _LEFT + byte * scale
        yield (
            f'<line x1="{left:.2f}" x2="{left:.2f}" y1="{_TOP}" y2="{_TOP + row_count * _ROW_HEIGHT}" stroke="{_TEXT_COLOUR}" '
            'stroke-dasharray="6 4"/>'
        )


def _ticks(frames: Sequence[ArenaFrame]) -> Iterator[str]:
    before = 0
    for row, frame in enumerate(frames):
        if frame.rearrangements > before:
            top = _TOP + row * _ROW_HEIGHT
            yield _rect(_LEFT + _WIDTH + 3, top, 10, _ROW_HEIGHT - 1, _TICK_COLOUR)
        before = frame.rearrangements


def _axes(layout: ArenaLayout, row_count: int) -> Iterator[str]:
    bottom = _TOP + row_count * _ROW_HEIGHT
    for row in range(0, row_count, 25):
        yield _text(_LEFT - 6, _TOP + row * _ROW_HEIGHT + 8, f"step {row}", size=10, anchor="end")
    yield _text(_LEFT, bottom + 16, "byte 0", size=11)
    yield _text(_LEFT + _WIDTH, bottom + 16, f"{layout.arena_bytes:,} bytes", size=11, anchor="end")


def _rect(left: float, top: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}" fill="{colour}"/>'


def _text(
    left: float, top: float, text: str, *, size: int = 12, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{left:g}" y="{top:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{_TEXT_COLOUR}">{escape(text)}</text>'
    )
