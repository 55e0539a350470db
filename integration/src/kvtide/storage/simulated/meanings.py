"""What every unit of a sharing request or of the tree was computed from: the dumbest model of a prefix tree.

A unit *means* an extra key and tokens: those from the beginning of the prompt to the last one that was written into it, or, of a state,
that it has seen. A forward gives its units their meaning, a copy and a rehoming carry it along, a take clears it. Whoever begins
with a hit, and each of its forwards, must find in every unit that it reads the meaning of its own prompt, whoever computed it:

    prompt          a b c d │ e f g h │ i j
    page 1 means    a b c d e f g h         whatever row or node its id lies in
    state means     a b c d e f g h i j     never more, never less, than the row's length

Bytes are the shadow's to compare; this says whose bytes they must be.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvtide.device import IntArray
from kvtide.simulation import CheckFailedError, SimulatedBand
from kvtide.storage.simulated.prompts import SharingRequest


class Meaning(NamedTuple):
    """Of one unit."""

    extra_key: Hashable
    """Of the prompt."""

    tokens: bytes
    """From its beginning, int64."""


class Meanings:
    """Of all units that sharers or the tree hold, by virtual id; one for all ranks."""

    def __init__(self, bands: Sequence[SimulatedBand]) -> None:
        """Nothing is held."""
        self._bands = bands
        self._of: dict[str, dict[int, Meaning | None]] = {band.name: {} for band in bands}

    def held(self, band: SimulatedBand) -> int:
        """How many units of a band sharers and the tree hold."""
        return len(self._of[band.name])

    def pages(self) -> IntArray:
        """Virtual pages of which sharers or the tree hold a unit."""
        held = [
            np.array(list(self._of[band.name]), np.int64) // band.ratio
            for band in self._bands
            if not band.is_state
        ]
        return np.unique(np.concatenate([*held, np.empty(0, np.int64)]))

    def taken(self, band: SimulatedBand, units: IntArray) -> None:
        """They mean nothing yet."""
        self._of[band.name].update(dict.fromkeys(units.tolist()))

    def freed(self, band: SimulatedBand, units: IntArray) -> None:
        """They are nobody's."""
        for unit in units.tolist():
            del self._of[band.name][unit]

    def moved(self, band: SimulatedBand, sources: IntArray, targets: IntArray) -> None:
        """What `sources` meant is called `targets`."""
        of = self._of[band.name]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            of[target] = of.pop(source)

    def copied(self, band: SimulatedBand, sources: IntArray, targets: IntArray) -> None:
        """`targets` mean what `sources` do."""
        of = self._of[band.name]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            of[target] = of[source]

    def whole(self, band: SimulatedBand, units: Iterable[int]) -> list[int]:
        """Those of `units` that no later forward writes: of pages the filled ones."""
        of, page_bytes = self._of[band.name], band.page_tokens * 8
        return [
            unit
            for unit in units
            if (meaning := of[unit]) is not None and (band.is_state or len(meaning.tokens) % page_bytes == 0)
        ]

    def written(self, request: SharingRequest, start: int, end: int) -> None:
        """A forward over tokens `[start, end)` was launched."""
        for band in self._bands:
            of = self._of[band.name]
            if band.is_state:
                of[request.state_slots[0]] = _meaning(request, end)
                continue
            for place in range(start // band.page_tokens, -(-end // band.page_tokens)):
                unit = int(request.pages[place])
                if unit in of:
                    of[unit] = _meaning(request, min(end, (place + 1) * band.page_tokens))

    def check_reads(self, reader: str, request: SharingRequest, length: int) -> None:
        """Raise `CheckFailedError` unless all that the token behind `length` reads is there, and is that of the request's own prompt."""
        for band in self._bands:
            if band.is_state:
                self._check(
                    reader, band, request.state_slots[0], _meaning(request, length) if length else None
                )
                continue
            first = 0 if band.window_tokens is None else max(0, length - band.window_tokens + 1)
            for place in range(first // band.page_tokens, -(-length // band.page_tokens)):
                expected = _meaning(request, min(length, (place + 1) * band.page_tokens))
                self._check(reader, band, int(request.pages[place]), expected)

    def _check(self, reader: str, band: SimulatedBand, unit: int, expected: Meaning | None) -> None:
        of = self._of[band.name]
        if unit not in of:
            raise CheckFailedError(
                "wrong_binding",
                f"{reader} reads virtual unit {unit} of band {band.name!r}, which neither it nor the tree holds",
            )
        if of[unit] != expected:
            raise CheckFailedError(
                "lost_write",
                f"{reader} reads virtual unit {unit} of band {band.name!r}, computed from {_told(of[unit])}, where its own prompt is "
                f"{_told(expected)}",
            )


def _meaning(request: SharingRequest, length: int) -> Meaning:
    return Meaning(request.extra_key, request.text[:length].tobytes())


def _told(meaning: Meaning | None) -> str:
    if meaning is None:
        return "nothing"
    return f"{len(meaning.tokens) // 8} tokens of key {meaning.extra_key}, {zlib.crc32(meaning.tokens):08x}"
