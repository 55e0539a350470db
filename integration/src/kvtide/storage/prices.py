"""What requests cost, and what an empty arena holds of them (rows K5, K6): pure, nothing here knows who is in service.

A request is priced at its peak in every band by the one demand function, under a chunk limit. Where it begins with a hit, full attention of the
hit costs it nothing, for the tree holds that to the end; the tail of each window is in its price, for it lets go of that as it moves on,
and takes other units instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import attrs
import numpy as np

from kvtide.device import IntArray
from kvtide.plan import pack
from kvtide.sizing import DemandPurpose, KVDemand, SizedPlan, SizingError
from kvtide.storage.errors import StorageError


@attrs.frozen(kw_only=True, eq=False)
class Hits:
    """What requests would begin with, as far as admission counts it. A prefix cache has locked it."""

    tokens: tuple[int, ...]
    """That each is given."""

    tails: IntArray
    """Window units of each hit, which its request needs until it has moved on, `[bands, requests]`."""

    checkpoints: IntArray
    """State slots that are kept for them, `[bands]`, which are nobody's need once they are copied."""

    @staticmethod
    @lru_cache(maxsize=8)
    def none(band_count: int, request_count: int) -> Hits:
        """Everything is computed."""
        tails: IntArray = np.zeros((band_count, request_count), np.int64)
        checkpoints: IntArray = np.zeros(band_count, np.int64)
        # Whoever asks again is given the same.
        tails.flags.writeable = checkpoints.flags.writeable = False
        return Hits(tokens=(0,) * request_count, tails=tails, checkpoints=checkpoints)


class Prices:
    """Of one sized plan."""

    def __init__(self, sized: SizedPlan, *, recomputes: bool) -> None:
        """`recomputes`: requests may be retracted, and then compute again what they had."""
        self._sized = sized
        self._recomputes = recomputes
        self._is_window = np.array(
            [pool.window_tokens is not None or pool.chunk_tokens is not None for pool in sized.plan.sub_pools]
        )
        self._has_windows = bool(self._is_window.any())
        # What waits is priced in every iteration, with the same lengths.
        self._demand = lru_cache(maxsize=64, typed=True)(self._priced)

    def demands(
        self, prompts: Sequence[int], outputs: Sequence[int], chunk: int, cached: Sequence[int] | None = None
    ) -> tuple[KVDemand, ...]:
        """Peaks of requests that begin with `cached` tokens of their prompts; raises `StorageError` for lengths that are none."""
        try:
            return tuple(
                self._demand(prompt, output, chunk, tokens)
                for prompt, output, tokens in zip(prompts, outputs, cached or [0] * len(prompts), strict=True)
            )
        except SizingError as error:
            raise StorageError(f"cannot admit a request: {error}") from error

    def restored(
        self, prompts: Sequence[int], outputs: Sequence[int], written: Sequence[int], chunk: int
    ) -> tuple[KVDemand, ...]:
        """Peaks of requests that come back with `written` tokens each: as arrivals of those, or as anew while they still prefill."""
        return tuple(
            self._sized.demand(
                prompt_tokens=max(prompt, tokens),
                output_tokens=output - max(0, tokens - prompt),
                chunk_tokens=chunk,
                purpose=DemandPurpose.ADMIT if tokens < prompt else DemandPurpose.DECODE_PREALLOC,
            )
            for prompt, output, tokens in zip(prompts, outputs, written, strict=True)
        )

    def total(self, demands: Sequence[KVDemand]) -> IntArray:
        """Units by band, in chain order."""
        units: IntArray = np.zeros(len(self._is_window), np.int64)
        for demand in demands:
            units += demand.units
        return units

    # ── in an empty arena ──

    def packs(self, demands: Sequence[KVDemand]) -> bool:
        """Whether an arena that holds nothing else holds all of these at their peaks."""
        return pack(self._sized.layout, self.total(demands).tolist()) is not None

    def fits_alone(self, prompts: Sequence[int], outputs: Sequence[int], chunk: int) -> bool:
        """Whether a storage that holds nothing else serves them together, in chunks of `chunk` tokens, to their ends."""
        lengths = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
        return (
            len(lengths) <= self._sized.max_running_requests
            and max(lengths, default=0) <= self._sized.max_context_tokens
            and self.packs(self.demands(prompts, outputs, chunk))
            and self._fits_recomputed([length - 1 for length in lengths])
        )

    def most_output_tokens(self, prompt_tokens: int) -> int:
        """Most output with which one request could be admitted alone; raises `StorageError` for a prompt of no length."""
        try:
            most = self._sized.max_new_tokens_for_memory(prompt_tokens)
        except SizingError as error:
            raise StorageError(f"cannot clip a request: {error}") from error
        return longest(lambda output: self._fits_recomputed([prompt_tokens + output - 1]), 1, most) or 0

    def largest(self, prompt_tokens: int, output_tokens: int) -> str:
        """Text: what of a request that does not fit alone would."""
        output = self.most_output_tokens(prompt_tokens)
        prompt = longest(
            lambda prompt: self._fits_recomputed([prompt + output_tokens - 1]),
            1,
            self._sized.max_prompt_tokens_for_memory(output_tokens),
        )
        with_prompt = f"at most {output} output tokens" if output else "no output"
        with_output = f"at most {prompt} prompt tokens" if prompt else "no prompt"
        return f"with {prompt_tokens} prompt tokens {with_prompt} could be served, with {output_tokens} output tokens {with_output}"

    def never(self, prompts: Sequence[int], outputs: Sequence[int]) -> str:
        """Text: why requests that an empty storage would not admit are not."""
        sized, chunk = self._sized, self._sized.least_chunk_tokens
        most = max(sum(pair) for pair in zip(prompts, outputs, strict=True))
        if most > sized.max_context_tokens:
            return f"a request of {most} tokens, output included, is longer than the {sized.max_context_tokens} that rows are sized for"
        if len(prompts) > sized.max_running_requests:
            return f"they need as many rows, of which there are {sized.max_running_requests}"
        alone = "alone" if len(prompts) == 1 else "in an empty arena"
        return f"{self.does_not_fit(self.demands(prompts, outputs, chunk), chunk)}, not even {alone}"

    def does_not_fit(self, demands: Sequence[KVDemand], chunk: int) -> str:
        """Text: what is asked for, and the bytes that there are."""
        layout = self._sized.layout
        units = ", ".join(
            f"{count} × {band.unit_bytes} bytes of {band.name!r}"
            for band, count in zip(layout.bands, self.total(demands).tolist(), strict=True)
        )
        chunks = f", in chunks of {chunk} tokens," if chunk > 1 else ", token by token,"
        if chunk == self._sized.chunk_tokens:
            chunks = ""
        return f"{units} at peak{chunks} do not fit in {layout.arena_bytes - layout.prefix_bytes} bytes"

    # ── helpers ──

    def _priced(self, prompt: int, output: int, chunk: int, cached: int) -> KVDemand:
        """The peak of one request."""

        def priced_for(purpose: DemandPurpose) -> KVDemand:
            return self._sized.demand(
                prompt_tokens=prompt,
                output_tokens=output,
                chunk_tokens=chunk,
                purpose=purpose,
                cached_tokens=cached,
            )

        beside = priced_for(DemandPurpose.ADMIT)
        if not cached or not self._has_windows:
            return beside
        windows = np.where(self._is_window, priced_for(DemandPurpose.LOAD_BACK).units, beside.units)
        return KVDemand(tuple(windows.tolist()))

    def _fits_recomputed(self, written_tokens: Sequence[int]) -> bool:
        """Whether requests that write so many tokens fit alone wherever they are retracted: what they had generated is prompt then."""
        least = self._sized.least_chunk_tokens
        return not self._recomputes or self.packs(
            [self._sized.context_demand(tokens, chunk_tokens=least) for tokens in written_tokens]
        )


def longest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """The longest of `[least, most]` that fits, where shorter ones fit too; `None` where none does."""
    if least > most:
        return None
    if fits(most):
        return most
    if least == most or not fits(least):
        return None
    most -= 1
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
