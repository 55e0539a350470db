"""Admission that never overcommits: what is admitted can always run to its end (row K5, guaranteed form).

Each request is charged its peak in every band from the day it is admitted: every full-attention page of input and output,
the most of each window that any chunking holds, its state slot. The sum of peaks must pack into the arena. Since fewer units
always pack where more do, every take of an admitted request then succeeds, whatever the others hold.

So two figures differ: the units *admitted at peak*, which admission keeps to, and those *resident now*, which a gauge shows. A
refusal names both, since whoever reads it sees bytes that nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from kvtide.chain import Refusal
from kvtide.device import IntArray
from kvtide.ledger import InvariantError
from kvtide.plan import pack
from kvtide.sizing import KVDemand, SizedPlan, SizingError
from kvtide.storage.errors import StorageError


@attrs.frozen(kw_only=True)
class AdmissionRefusal(Refusal):
    """Requests that cannot be admitted."""

    is_final: bool
    """Whether they could not be admitted even alone in an empty arena: waiting would be for ever."""


class Admission:
    """Peaks promised to admitted rows. One owner: the storage."""

    def __init__(self, sized: SizedPlan, resident_units: Callable[[], Sequence[int]]) -> None:
        """Nothing promised. `resident_units`: what the bands hold at the moment, in chain order; only text depends on it."""
        self._sized = sized
        self._resident_units = resident_units
        band_count = len(sized.layout.bands)
        self._promised: IntArray = np.zeros((sized.max_running_requests, band_count), np.int64)
        self._total: IntArray = np.zeros(band_count, np.int64)

    @property
    def total_units(self) -> IntArray:
        """Units promised in all, in chain order: what is admitted at peak."""
        return self._total.copy()

    def demand(self, prompt_tokens: int, output_tokens: int) -> KVDemand:
        """The peak of one request; raises `StorageError` for a length that is no positive integer."""
        try:
            return self._sized.demand(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        except SizingError as error:
            raise StorageError(f"cannot admit a request: {error}") from error

    def most_output_tokens(self, prompt_tokens: int) -> int:
        """Most output with which one request could be admitted alone; raises `StorageError` for a prompt of no length."""
        try:
            return self._sized.max_new_tokens_for_memory(prompt_tokens)
        except SizingError as error:
            raise StorageError(f"cannot clip a request: {error}") from error

    def refuse_for_ever(self, prompt_tokens: int, output_tokens: int) -> AdmissionRefusal | None:
        """Why one request can never be admitted, with the lengths that could be, or `None`; raises what `demand` raises."""
        units = np.array(self.demand(prompt_tokens, output_tokens).units)
        if self._is_too_long(prompt_tokens + output_tokens):
            reason = self._too_long(prompt_tokens + output_tokens)
        elif pack(self._sized.layout, units.tolist()) is None:
            reason = self._text(units, is_final=True)
        else:
            return None
        return AdmissionRefusal(
            rule=f"{reason}; {self._largest(prompt_tokens, output_tokens)}", is_final=True
        )

    def refuse(
        self, demands: Sequence[KVDemand], longest_tokens: int, free_rows: int
    ) -> AdmissionRefusal | None:
        """Why requests of these peaks cannot be admitted together now, or `None`."""
        sized = self._sized
        if self._is_too_long(longest_tokens):
            return AdmissionRefusal(rule=self._too_long(longest_tokens), is_final=True)
        if len(demands) > free_rows:
            return AdmissionRefusal(
                rule=f"{len(demands)} requests need as many rows; {free_rows} of {sized.max_running_requests} are free",
                is_final=len(demands) > sized.max_running_requests,
            )
        asked = self._sum(demands)
        if pack(sized.layout, (self._total + asked).tolist()) is not None:
            return None
        is_final = pack(sized.layout, asked.tolist()) is None
        return AdmissionRefusal(rule=self._text(asked, is_final), is_final=is_final)

    def promise(self, rows: IntArray, demands: Sequence[KVDemand]) -> None:
        """Charge admitted rows with their peaks."""
        for row, demand in zip(rows.tolist(), demands, strict=True):
            self._promised[row] = demand.units
        self._total += self._sum(demands)

    def release(self, rows: IntArray) -> None:
        """Return the peaks of rows."""
        self._total -= self._promised[rows].sum(axis=0)
        self._promised[rows] = 0

    def verify(self, rows: IntArray) -> None:
        """Raise `InvariantError` unless the total promised is what `rows`, those in use, were promised."""
        of_rows = self._promised[rows].sum(axis=0)
        if (of_rows != self._total).any():
            raise InvariantError(
                "storage.promise_leak",
                f"{self._total.tolist()} units are promised, the rows in use hold promises of {of_rows.tolist()}",
                "a row was closed without its promise",
            )

    def _sum(self, demands: Sequence[KVDemand]) -> IntArray:
        units: IntArray = np.zeros(len(self._total), np.int64)
        for demand in demands:
            units += demand.units
        return units

    def _is_too_long(self, tokens: int) -> bool:
        return tokens > self._sized.max_context_tokens

    def _too_long(self, tokens: int) -> str:
        return (
            f"a request of {tokens} tokens, output included, is longer than the {self._sized.max_context_tokens} that rows are "
            "sized for"
        )

    def _text(self, asked: IntArray, is_final: bool) -> str:
        layout = self._sized.layout
        units = ", ".join(
            f"{count} × {band.unit_bytes} bytes of {band.name!r}"
            for band, count in zip(layout.bands, asked.tolist(), strict=True)
        )
        text = f"{units} at peak do not fit in {layout.arena_bytes - layout.prefix_bytes} bytes"
        if is_final:
            return f"{text}, not even alone"
        return (
            f"{text} beside what is promised: admitted at peak are {self._by_band(self._total.tolist())}, of which resident now "
            f"{self._by_band(self._resident_units())}"
        )

    def _by_band(self, units: Sequence[int]) -> str:
        bands = self._sized.layout.bands
        return ", ".join(f"{band.name!r} {count}" for band, count in zip(bands, units, strict=True))

    def _largest(self, prompt_tokens: int, output_tokens: int) -> str:
        output = self._sized.max_new_tokens_for_memory(prompt_tokens)
        prompt = self._sized.max_prompt_tokens_for_memory(output_tokens)
        with_prompt = f"at most {output} output tokens" if output else "no output"
        with_output = f"at most {prompt} prompt tokens" if prompt else "no prompt"
        return f"with {prompt_tokens} prompt tokens {with_prompt} could be served, with {output_tokens} output tokens {with_output}"
