"""Admission that never overcommits: what is admitted can always run to its end (row K5, guaranteed form).

Each request is charged its peak in every band from the day it is admitted: every full-attention page of input and output,
the most of each window that any chunking holds, its state slot. The sum of peaks must pack into the arena. Since fewer units
always pack where more do, every take of an admitted request then succeeds, whatever the others hold.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    def __init__(self, sized: SizedPlan) -> None:
        """Nothing promised."""
        self._sized = sized
        band_count = len(sized.layout.bands)
        self._promised: IntArray = np.zeros((sized.max_running_requests, band_count), np.int64)
        self._total: IntArray = np.zeros(band_count, np.int64)

    def demand(self, prompt_tokens: int, output_tokens: int) -> KVDemand:
        """The peak of one request; raises `StorageError` for a length that is no positive integer."""
        try:
            return self._sized.demand(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        except SizingError as error:
            raise StorageError(f"cannot admit a request: {error}") from error

    def refuse(
        self, demands: Sequence[KVDemand], longest_tokens: int, free_rows: int
    ) -> AdmissionRefusal | None:
        """Why requests of these peaks cannot be admitted together now, or `None`."""
        sized = self._sized
        if longest_tokens > sized.max_context_tokens:
            return AdmissionRefusal(
                rule=f"a request of {longest_tokens} tokens, output included, is longer than the {sized.max_context_tokens} "
                "that rows are sized for",
                is_final=True,
            )
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

    def promised_units(self) -> dict[str, int]:
        """By band: peaks promised in all."""
        names = [band.name for band in self._sized.layout.bands]
        return dict(zip(names, self._total.tolist(), strict=True))

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

    def _text(self, asked: IntArray, is_final: bool) -> str:
        layout = self._sized.layout
        units = ", ".join(
            f"{count} × {band.unit_bytes} bytes of {band.name!r}"
            for band, count in zip(layout.bands, asked.tolist(), strict=True)
        )
        promised = ", ".join(
            f"{band.name!r} {count}" for band, count in zip(layout.bands, self._total.tolist(), strict=True)
        )
        room = layout.arena_bytes - layout.prefix_bytes
        return f"{units} at peak do not fit in {room} bytes" + (
            ", not even alone" if is_final else f" beside what is promised ({promised})"
        )
