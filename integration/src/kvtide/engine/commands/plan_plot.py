"""A picture of what fits: requests in memory against their length, for the arena and the two other policies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 460, 84, 176, 56, 56
_COLOURS = ("#2f6f9f", "#d98032", "#8e5ea2")
_TEXT, _GRID, _PAPER = "#333333", "#dddddd", "#fbfaf7"

Point = tuple[int, int]
"""Tokens of a request, and how many such requests fit."""


def capacity_svg(title: str, lines: Mapping[str, Sequence[Point]]) -> str:
    """An SVG document with one line a policy, both axes logarithmic; lengths of which none fits end a line."""
    fitting = [(tokens, count) for points in lines.values() for tokens, count in points if count > 0]
    if not fitting:
        fitting = [(1, 1)]
    across = _Axis.over([tokens for tokens, _ in fitting], _LEFT, _WIDTH - _RIGHT)
    up = _Axis.over([count for _, count in fitting], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
            f'font-size="13" fill="{_TEXT}">'
        ),
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="{_PAPER}"/>',
        f'<text x="{_LEFT}" y="26" font-size="15">{escape(title)}</text>',
        *_axes(across, up),
    ]
    for colour, (name, points) in zip(_COLOURS, lines.items(), strict=False):
        parts += _line(
            name, [(across.at(tokens), up.at(count)) for tokens, count in points if count > 0], colour
        )
    parts += _legend(lines)
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """A logarithmic scale with a mark a power of its base."""

    def __init__(self, low: int, high: int, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    @classmethod
    def over(cls, values: Sequence[int], start: float, end: float) -> _Axis:
        low = 2 ** math.floor(math.log2(min(values)))
        high = 2 ** math.ceil(math.log2(max(values)))
        return cls(low, max(high, 2 * low), start, end)

    def at(self, value: int) -> float:
        share = math.log2(value / self.low) / math.log2(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def marks(self) -> list[int]:
        powers = range(round(math.log2(self.low)), round(math.log2(self.high)) + 1)
        step = max(1, len(powers) // 8)
        return [2**power for power in powers[::step]]


def _axes(across: _Axis, up: _Axis) -> Iterator[str]:
    for mark in across.marks():
        x = across.at(mark)
        yield f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{_HEIGHT - _BOTTOM}" stroke="{_GRID}"/>'
        yield f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{_short(mark)}</text>'
    for mark in up.marks():
        y = up.at(mark)
        yield f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="{_GRID}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{_short(mark)}</text>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 14}" text-anchor="middle">tokens a request, prompt and output</text>'
    yield f'<text x="{_LEFT}" y="{_TOP - 10}">requests in memory, each at its peak</text>'


def _line(name: str, points: Sequence[tuple[float, float]], colour: str) -> Iterator[str]:
    path = " ".join(f"{x},{y}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"><title>{escape(name)}</title></polyline>'
    yield from (f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points)


def _legend(lines: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    for place, (colour, name) in enumerate(zip(_COLOURS, lines, strict=False)):
        y = _TOP + 22 * place
        yield f'<rect x="{_WIDTH - _RIGHT + 16}" y="{y}" width="14" height="4" fill="{colour}"/>'
        yield f'<text x="{_WIDTH - _RIGHT + 38}" y="{y + 7}">{escape(name)}</text>'


def _short(count: int) -> str:
    for factor, unit in ((2**20, "Mi"), (2**10, "Ki")):
        if count >= factor:
            return f"{count // factor} {unit}"
    return str(count)
