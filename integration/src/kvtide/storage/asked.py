"""What admission is asked for: requests that begin, or that come back whole, together (rows K5, K8).

Both are judged by one ladder (`kvtide.storage.admission`), which asks the same of either: would an empty arena hold them, what do they
need under a chunk limit, and what is to be said of them. Any part of them can be asked about, for refusals that name who is in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtide.device import IntArray
from kvtide.sizing import KVDemand, SizedPlan
from kvtide.storage.prices import Hits, Prices


class Asked(Protocol):
    """Requests that are asked for together; `part` is some of them."""

    @property
    def noun(self) -> str:
        """Text: what one of them is called."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Output that each is to be promised."""

    @property
    def longest_chunk(self) -> int | None:
        """The longest chunks that they may have, and wait for while something will free; `None` where no empty arena holds all of them."""

    def fits_alone(self, part: slice) -> bool:
        """Whether an empty arena holds them, in the shortest chunks."""

    def never(self, part: slice) -> str:
        """Text: why it does not."""

    def demands(self, part: slice, chunk: int) -> tuple[KVDemand, ...]:
        """Peak of each."""

    def needed(self, part: slice, chunk: int) -> IntArray:
        """Units, in chain order, that are to be free for them."""


class Arriving:
    """Requests that begin, with hits or with nothing."""

    noun = "request"

    def __init__(
        self,
        prices: Prices,
        sized: SizedPlan,
        prompts: Sequence[int],
        outputs: Sequence[int],
        *,
        promised: Sequence[int],
        hits: Hits,
        longest_chunk: int | None,
    ) -> None:
        """Lengths of each, of its output the limit and what of it is promised; what they begin with."""
        self._prices = prices
        self._least = sized.least_chunk_tokens
        self._prompts, self._limits, self._hits = prompts, outputs, hits
        self.outputs = tuple(promised)
        self.longest_chunk = longest_chunk

    def fits_alone(self, part: slice) -> bool:
        """See `Asked.fits_alone`: a request that does not to its limit is not promised a share either."""
        return self._prices.fits_alone(self._prompts[part], self._limits[part], self._least)

    def never(self, part: slice) -> str:
        """See `Asked.never`."""
        return self._prices.never(self._prompts[part], self._limits[part])

    def demands(self, part: slice, chunk: int) -> tuple[KVDemand, ...]:
        """See `Asked.demands`."""
        return self._prices.demands(self._prompts[part], self.outputs[part], chunk, self._hits.tokens[part])

    def needed(self, part: slice, chunk: int) -> IntArray:
        """See `Asked.needed`: the tails of windows that came with hits are there."""
        needed: IntArray = self._prices.total(self.demands(part, chunk)) - self._hits.tails[:, part].sum(
            axis=1
        )
        return needed


class Returning:
    """Requests that come back whole from backups; each is priced as the arrival of what it had, from where it goes on (ADR 3).

    One that still prefills is priced as if it began anew, in chunks of its former limit at most.
    """

    noun = "backup"

    def __init__(
        self,
        prices: Prices,
        sized: SizedPlan,
        prompts: Sequence[int],
        outputs: Sequence[int],
        written: Sequence[int],
        *,
        chunk_tokens: int,
    ) -> None:
        """Lengths of each, and the tokens that it has; all of its output is promised."""
        self._prices = prices
        self._row_count = sized.max_running_requests
        self._least = sized.least_chunk_tokens
        self._prompts, self._written = prompts, written
        self.outputs = tuple(outputs)
        everything = slice(len(prompts))
        # One by itself was asked about when it arrived.
        fits = len(prompts) <= 1 or self.fits_alone(everything)
        self.longest_chunk = max(chunk_tokens, self._least) if fits else None

    def fits_alone(self, part: slice) -> bool:
        """See `Asked.fits_alone`."""
        return len(self._prompts[part]) <= self._row_count and self._prices.packs(
            self.demands(part, self._least)
        )

    def never(self, part: slice) -> str:
        """See `Asked.never`."""
        if len(self._prompts[part]) > self._row_count:
            return f"they need as many rows, of which there are {self._row_count}"
        return f"{self._prices.does_not_fit(self.demands(part, self._least), self._least)}, not even in an empty arena"

    def demands(self, part: slice, chunk: int) -> tuple[KVDemand, ...]:
        """See `Asked.demands`."""
        return self._prices.restored(self._prompts[part], self.outputs[part], self._written[part], chunk)

    def needed(self, part: slice, chunk: int) -> IntArray:
        """See `Asked.needed`."""
        return self._prices.total(self.demands(part, chunk))
