"""Who is admitted, who waits, who is turned away (rows K5, K6): promises that the chain can keep.

Each row is *promised* its peak in every band on the day it is admitted: every full-attention page of input and output, the most
of each window that any chunking up to its chunk limit holds, its state slots. What it was promised and does not hold is
*outstanding*. The invariant, at every moment:

    units in use, less what a cache could evict, all that is outstanding, and window units that rows share, once
    for each row but one, can be laid out in the arena

It is asked of the chain as it is (`ChainAllocator.admits`), so pages that are fixed, sent or quarantined count where they lie. A take
of an admitted row uses what is outstanding; retiring a window returns it; a release ends both. None changes the sum, and fewer
units can always be laid out where more can, so *no take of an admitted row is refused*. Whoever adds to the sum asks first:
an admission, and under an overcommitting policy a further share of output. Virtual ids are as many as the smallest unit needs.

The verdict on a request, in this order:

1. no empty arena would hold it, or it is longer than rows are: turned away, whatever else is going on;
2. a row is free and its whole demand fits beside what is outstanding: admitted, with the longest chunks that an empty arena allows;
3. it does not fit, and requests in service, a forward or a host copy in flight will free something: it waits;
4. nothing will: admitted with the longest chunks under which it fits now, or, if it fits with none, turned away.

So requests do not shrink their chunks because others are there for a moment, and nothing waits while nothing will free. Requests that
are asked for together are judged together, and turned away only by name: see `AdmissionRefusal`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import structlog

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.ledger import ForwardSteps, InvariantError
from kvtide.plan import pack
from kvtide.sizing import DemandPurpose, KVDemand, SizedPlan, SizingError
from kvtide.storage.errors import StorageError
from kvtide.storage.evicting_takes import EvictingTakes
from kvtide.storage.overcommit import Overcommit
from kvtide.storage.refusals import AdmissionRefusal, PromiseRefusal, WillFree
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_units import RowUnits
from kvtide.storage.statistics import AdmissionStatistics

log = structlog.get_logger(__name__)


@attrs.frozen(kw_only=True, eq=False)
class Hits:
    """What requests would begin with, as far as admission counts it. A prefix cache has locked it."""

    tokens: tuple[int, ...]
    """That each is given."""

    tails: IntArray
    """Window units of each hit, which its request needs until it has moved on, `[bands, requests]`."""

    has_checkpoints: bool
    """Whether state slots are kept for any of them, which are nobody's need once they are copied."""

    @property
    def may_be_in_the_way(self) -> bool:
        """Whether requests might fit without them that do not fit with them.

        A request with a hit is promised no more than without, and what a hit keeps of full attention and windows is part of that. But its checkpoint
        is needed beside the slots of its request until it is copied, and what is kept for one request others do without.
        """
        return any(self.tokens) and (self.has_checkpoints or len(self.tokens) > 1)

    @staticmethod
    def none(band_count: int, request_count: int) -> Hits:
        """Everything is computed."""
        tails: IntArray = np.zeros((band_count, request_count), np.int64)
        return Hits(tokens=(0,) * request_count, tails=tails, has_checkpoints=False)


@attrs.frozen(kw_only=True)
class Promise:
    """What admission offers to requests. Nothing has been promised yet."""

    chunk_limit: int
    """Most prompt tokens that each may prefill in one forward."""

    output_tokens: tuple[int, ...]
    """Output that the promise covers, by request; the limit unless the policy overcommits."""

    demands: tuple[KVDemand, ...]
    """Peak of each, window tails of its hit among it."""


class ChainPrefillBudget:
    """Promises to the rows of one storage, which alone changes them."""

    def __init__(
        self,
        sized: SizedPlan,
        chain: ChainAllocator,
        takes: EvictingTakes,
        requests: RequestTable,
        *,
        units: RowUnits,
        overcommit: Overcommit | None,
    ) -> None:
        """Nothing promised; without `overcommit`, whatever is admitted can run to its end."""
        self._sized = sized
        self._chain = chain
        self._takes = takes
        self._steps: ForwardSteps = chain.steps
        self._requests = requests
        self._units = units
        self._overcommit = overcommit
        self._promised: IntArray = np.zeros_like(units.counts)
        self._tokens: IntArray = np.zeros(sized.max_running_requests, np.int64)
        self._serials: IntArray = np.zeros(sized.max_running_requests, np.int64)
        self._admitted = self._turned_away = self._extended = self._retracted = 0
        self._waits: Counter[WillFree] = Counter()
        self._is_window = np.array(
            [pool.window_tokens is not None or pool.chunk_tokens is not None for pool in sized.plan.sub_pools]
        )
        self._has_windows = bool(self._is_window.any())
        self._asked_last: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._alone_last: int | None = None

    # ── questions ──

    @property
    def promised_units(self) -> IntArray:
        """Units promised in all, in chain order: what is admitted at peak."""
        total: IntArray = self._promised.sum(axis=1)
        return total

    @property
    def outstanding_units(self) -> IntArray:
        """Units promised and not held, in chain order."""
        total: IntArray = np.maximum(self._promised - self._units.counts, 0).sum(axis=1)
        return total

    def statistics(self) -> AdmissionStatistics:
        """What has been decided."""
        return AdmissionStatistics(
            admitted_requests=self._admitted,
            turned_away_requests=self._turned_away,
            retracted_requests=self._retracted,
            further_shares=self._extended,
            waits={reason.value: self._waits[reason] for reason in WillFree},
        )

    def most_output_tokens(self, prompt_tokens: int) -> int:
        """Most output with which one request could be admitted alone; raises `StorageError` for a prompt of no length."""
        try:
            most = self._sized.max_new_tokens_for_memory(prompt_tokens)
        except SizingError as error:
            raise StorageError(f"cannot clip a request: {error}") from error
        return self._longest(lambda output: self._fits_recomputed([prompt_tokens + output - 1]), 1, most) or 0

    def refuse_for_ever(self, prompt_tokens: int, output_tokens: int) -> AdmissionRefusal | None:
        """Why one request can never be admitted, with the lengths that could be, or `None`; raises what `offer` raises."""
        fits = self._fits_alone([prompt_tokens], [output_tokens], self._sized.least_chunk_tokens)
        if fits and not self._is_too_long(prompt_tokens + output_tokens):
            return None
        reason = self._never([prompt_tokens], [output_tokens])
        return AdmissionRefusal(
            rule=f"{reason}; {self._largest(prompt_tokens, output_tokens)}", waits_for=(), turned_away=(0,)
        )

    # ── verdicts ──

    def offer(
        self,
        prompts: Sequence[int],
        outputs: Sequence[int],
        *,
        whole: bool,
    ) -> Promise | AdmissionRefusal:
        """What requests of these lengths are promised, all together and without hits, or why they are not admitted now.

        `whole`: all their output, whatever the policy. Raises `StorageError` for a length that is no positive integer.
        """
        verdict = self.verdict(prompts, outputs, Hits.none(len(self._promised), len(prompts)), whole=whole)
        if isinstance(verdict, AdmissionRefusal):
            self.refused(prompts, outputs, verdict)
        return verdict

    def refused(self, prompts: Sequence[int], outputs: Sequence[int], refusal: AdmissionRefusal) -> None:
        """Count a refusal that requests of these lengths are told."""
        self._waits.update(refusal.waits_for)
        self._turned_away += len(refusal.turned_away)
        if refusal.is_final:
            log.info(
                "admission.turned_away",
                prompt_tokens=[prompts[place] for place in refusal.turned_away],
                output_tokens=[outputs[place] for place in refusal.turned_away],
                reason=str(refusal),
            )

    def verdict(
        self, prompts: Sequence[int], outputs: Sequence[int], hits: Hits, *, whole: bool
    ) -> Promise | AdmissionRefusal:
        """As `offer`, for requests that would begin with `hits`; nothing is counted."""
        promised = outputs = list(outputs)
        if self._overcommit is not None and not whole:
            promised = [self._overcommit.promised_output(output, 1) for output in outputs]
        sized, count = self._sized, len(prompts)
        least = sized.least_chunk_tokens
        lengths = [sum(pair) for pair in zip(prompts, outputs, strict=True)]

        def fits_alone(part: slice, chunk: int) -> bool:
            return (
                len(prompts[part]) <= sized.max_running_requests
                and not self._is_too_long(max(lengths[part], default=0))
                and self._fits_alone(prompts[part], outputs[part], chunk)
            )

        def demands(part: slice, chunk: int) -> tuple[KVDemand, ...]:
            return self._demands(prompts[part], promised[part], chunk, hits.tokens[part])

        def fits_now(part: slice, chunk: int) -> bool:
            return self._has_room(self._sum(demands(part, chunk)) - hits.tails[:, part].sum(axis=1))

        everything = slice(count)
        # What waits is asked for in every iteration, with the same lengths.
        asked = (tuple(prompts), tuple(outputs))
        if asked != self._asked_last:
            self._alone_last = self._longest(
                lambda chunk: fits_alone(everything, chunk), least, sized.chunk_tokens
            )
            self._asked_last = asked
        alone = self._alone_last
        if alone is None:
            return self._refuse_some(
                count,
                lambda part: fits_alone(part, least),
                lambda part: self._never(prompts[part], outputs[part]),
            )
        waits_for = self._waits_for()
        if count > self._requests.free_count:
            return AdmissionRefusal(
                rule=f"{count} requests need as many rows; {self._requests.free_count} of {sized.max_running_requests} are free",
                waits_for=waits_for,
            )
        # While something will free, chunks are as long as an empty arena allows: they do not shrink for a moment's sake.
        shortest = alone if waits_for else least
        limit = self._longest(lambda chunk: fits_now(everything, chunk), shortest, alone)
        if limit is not None:
            return Promise(
                chunk_limit=limit, output_tokens=tuple(promised), demands=demands(everything, limit)
            )

        def beside(part: slice) -> str:
            return f"{self._does_not_fit(demands(part, shortest), shortest)} {self._beside()}"

        if waits_for:
            reasons = ", ".join(reason.value for reason in waits_for)
            return AdmissionRefusal(rule=f"{beside(everything)}; waits for {reasons}", waits_for=waits_for)
        return self._refuse_some(
            count,
            lambda part: fits_now(part, least),
            lambda part: f"{beside(part)}; nothing is going to free any",
        )

    def _refuse_some(
        self, count: int, fits: Callable[[slice], bool], reason: Callable[[slice], str]
    ) -> AdmissionRefusal:
        """Of requests that do not fit together, those that do not fit by themselves either are turned away; else there are too many."""
        each = [slice(place, place + 1) for place in range(count)]
        never = tuple(place for place in range(count) if not fits(each[place]))
        if count == 1:
            return AdmissionRefusal(rule=reason(each[0]), waits_for=(), turned_away=(0,))
        if never:
            text = f"of {count} requests, {list(never)} can never be admitted: {reason(each[never[0]])}"
            return AdmissionRefusal(rule=text, waits_for=(), turned_away=never)
        first = self._longest(lambda first: fits(slice(first)), 1, count - 1)
        text = f"{count} requests are too many at once, though the first {first} would do: {reason(slice(count))}"
        return AdmissionRefusal(rule=text, waits_for=(), turned_away=(), first_that_fit=first)

    # ── what was promised ──

    def promise(self, rows: IntArray, promise: Promise) -> None:
        """Charge admitted rows with what they were offered."""
        for row, demand, output in zip(rows.tolist(), promise.demands, promise.output_tokens, strict=True):
            self._promised[:, row] = demand.units
            self._tokens[row] = self._requests.prompts[row] + output - 1
            self._serials[row] = self._admitted
            self._admitted += 1
        log.debug("admission.admitted", rows=rows.tolist(), chunk_limit=promise.chunk_limit)

    def extend(self, rows: IntArray, ends: IntArray) -> PromiseRefusal | None:
        """Promise rows of a step further shares of output, as far as they reach `ends[i]` tokens; all of them or a refusal."""
        if self._overcommit is None or not (is_over := ends > self._tokens[rows]).any():
            return None
        over = rows[is_over]
        promised, tokens = self._promised[:, over].copy(), self._tokens[over].copy()
        for place, (row, end) in enumerate(zip(over.tolist(), ends[is_over].tolist(), strict=True)):
            prompt = int(self._requests.prompts[row])
            output = self._overcommit.promised_output(
                int(self._requests.limits[row]) + 1 - prompt, end + 1 - prompt
            )
            limit = int(self._requests.chunk_limits[row])
            (demand,) = self._demands([prompt], [output], limit, [int(self._requests.cached_tokens[row])])
            promised[:, place], tokens[place] = demand.units, prompt + output - 1
        asked = (promised - self._promised[:, over]).sum(axis=1)
        if not self._has_room(asked):
            return self._refuse_share(over, asked)
        self._promised[:, over], self._tokens[over] = promised, tokens
        self._extended += len(over)
        return None

    def retracted(self, rows: IntArray) -> None:
        """Count rows that are about to be released without having come to their end."""
        self._retracted += len(rows)

    def release(self, rows: IntArray) -> None:
        """End what rows were promised."""
        self._promised[:, rows] = 0

    def verify(self, rows: IntArray) -> None:
        """Raise `InvariantError` unless promises are those of `rows`, those in use, none holds more, and all can be kept.

        While units are fixed or under a transfer the last may fail for a time.
        """
        of_rows = self._promised[:, rows].sum(axis=1)
        if (of_rows != self.promised_units).any():
            raise InvariantError(
                "storage.promise_leak",
                f"{self.promised_units.tolist()} units are promised, the rows in use hold promises of {of_rows.tolist()}",
                "a row was closed without its promise",
            )
        over = rows[(self._units.counts[:, rows] > self._promised[:, rows]).any(axis=0)]
        if len(over):
            raise InvariantError(
                "storage.held_within_promise",
                f"rows {over.tolist()} hold {self._units.counts[:, over].tolist()} units, by band, of "
                f"{self._promised[:, over].tolist()} that they were promised",
                "a demand was priced too low, or a window was not retired",
            )
        if not self._chain.uses.bind_layout and not self._has_room(self._sum(())):
            raise InvariantError(
                "storage.promise_kept",
                f"{self.outstanding_units.tolist()} units are outstanding, more than can be laid out beside what is in use",
                "units were taken that nobody was promised, or a cache locked what it had offered",
            )

    # ── helpers ──

    def _demands(
        self, prompts: Sequence[int], outputs: Sequence[int], chunk: int, cached: Sequence[int] | None = None
    ) -> tuple[KVDemand, ...]:
        """Beside `cached` tokens of each prompt; in an empty arena without."""
        try:
            return tuple(
                self._demand(prompt, output, chunk, tokens)
                for prompt, output, tokens in zip(prompts, outputs, cached or [0] * len(prompts), strict=True)
            )
        except SizingError as error:
            raise StorageError(f"cannot admit a request: {error}") from error

    def _demand(self, prompt: int, output: int, chunk: int, cached: int) -> KVDemand:
        """Full attention of a hit costs nothing, for the tree holds it to the end; its window tails are the request's as if it had
        computed them.
        """

        def priced(purpose: DemandPurpose) -> KVDemand:
            return self._sized.demand(
                prompt_tokens=prompt,
                output_tokens=output,
                chunk_tokens=chunk,
                purpose=purpose,
                cached_tokens=cached,
            )

        beside = priced(DemandPurpose.ADMIT)
        if not cached or not self._has_windows:
            return beside
        windows = np.where(self._is_window, priced(DemandPurpose.LOAD_BACK).units, beside.units)
        return KVDemand(tuple(windows.tolist()))

    @staticmethod
    def _longest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
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

    def _has_room(self, asked: IntArray) -> bool:
        """Whether so many units, in chain order, fit beside what is outstanding, all that is evictable being evicted."""
        with self._chain.capacity_decision("an admission"):
            units = (self.outstanding_units + asked).tolist()
            names = [band.name for band in self._sized.layout.bands]
            return self._takes.has_room(
                {
                    name: count + self._takes.counted_on_again(name)
                    for name, count in zip(names, units, strict=True)
                }
            )

    def _fits_alone(self, prompts: Sequence[int], outputs: Sequence[int], chunk: int) -> bool:
        """Whether an arena that holds nothing else serves them together, in chunks of `chunk` tokens, to their ends."""
        return self._packs(self._demands(prompts, outputs, chunk)) and self._fits_recomputed(
            [prompt + output - 1 for prompt, output in zip(prompts, outputs, strict=True)]
        )

    def _fits_recomputed(self, written_tokens: Sequence[int]) -> bool:
        """Whether requests that write so many tokens fit alone wherever they are retracted: what they had generated is prompt then."""
        least = self._sized.least_chunk_tokens
        return self._overcommit is None or self._packs(
            [self._sized.context_demand(tokens, chunk_tokens=least) for tokens in written_tokens]
        )

    def _packs(self, demands: Sequence[KVDemand]) -> bool:
        return pack(self._sized.layout, self._sum(demands).tolist()) is not None

    def _sum(self, demands: Sequence[KVDemand]) -> IntArray:
        units: IntArray = np.zeros(len(self._promised), np.int64)
        for demand in demands:
            units += demand.units
        return units

    def _waits_for(self) -> tuple[WillFree, ...]:
        """What is going to free memory or a row."""
        going = {
            WillFree.REQUESTS: self._requests.free_count < self._sized.max_running_requests,
            WillFree.FORWARD: self._steps.in_flight_count > 0,
            WillFree.HOST_COPY: self._chain.uses.has_host_copies,
        }
        return tuple(reason for reason, goes in going.items() if goes)

    def _is_too_long(self, tokens: int) -> bool:
        return tokens > self._sized.max_context_tokens

    # ── text ──

    def _refuse_share(self, over: IntArray, asked: IntArray) -> PromiseRefusal:
        rows = self._requests.live_rows()
        partial = rows[self._tokens[rows] < self._requests.limits[rows]]
        newest_first = partial[np.argsort(-self._serials[partial])]
        refusal = PromiseRefusal(
            rule=f"rows {over.tolist()} have reached the output that they were promised, and {self._by_band(asked)} more do not "
            f"fit {self._beside()}; {len(rows) - len(over)} other requests are in service",
            rows=tuple(over.tolist()),
            overcommitted=tuple(newest_first.tolist()),
        )
        log.info("admission.share_refused", rows=list(refusal.rows), reason=str(refusal))
        return refusal

    def _never(self, prompts: Sequence[int], outputs: Sequence[int]) -> str:
        """Why requests that an empty storage would not admit are not."""
        sized, chunk = self._sized, self._sized.least_chunk_tokens
        longest = max(sum(pair) for pair in zip(prompts, outputs, strict=True))
        if self._is_too_long(longest):
            return f"a request of {longest} tokens, output included, is longer than the {sized.max_context_tokens} that rows are sized for"
        if len(prompts) > sized.max_running_requests:
            return f"they need as many rows, of which there are {sized.max_running_requests}"
        alone = "alone" if len(prompts) == 1 else "in an empty arena"
        return f"{self._does_not_fit(self._demands(prompts, outputs, chunk), chunk)}, not even {alone}"

    def _does_not_fit(self, demands: Sequence[KVDemand], chunk: int) -> str:
        layout = self._sized.layout
        units = ", ".join(
            f"{count} × {band.unit_bytes} bytes of {band.name!r}"
            for band, count in zip(layout.bands, self._sum(demands).tolist(), strict=True)
        )
        chunks = f", in chunks of {chunk} tokens," if chunk > 1 else ", token by token,"
        if chunk == self._sized.chunk_tokens:
            chunks = ""
        return f"{units} at peak{chunks} do not fit in {layout.arena_bytes - layout.prefix_bytes} bytes"

    def _beside(self) -> str:
        """What is in the way, each unit of it named once: promises, and what nobody in service holds."""
        text = (
            f"beside what is promised: admitted at peak are {self._by_band(self.promised_units)}, of which resident now "
            f"{self._by_band(self._units.counts.sum(axis=1))}"
        )
        cached, evictable = self._takes.held_units(), self._takes.evictable_units()
        if any(cached.values()):
            names = [band.name for band in self._sized.layout.bands]
            text += (
                f"; a cache holds {self._by_band([cached.get(name, 0) for name in names])}, of which it could evict "
                f"{self._by_band([evictable.get(name, 0) for name in names])}"
            )
        withheld = [band.withheld_units for band in self._chain.statistics().bands]
        if any(withheld):
            text += f"; fixed, quarantined or under a transfer, and nobody's, are {self._by_band(withheld)}"
        return text

    def _by_band(self, units: IntArray | Sequence[int]) -> str:
        bands = self._sized.layout.bands
        return ", ".join(f"{band.name!r} {count}" for band, count in zip(bands, units, strict=True))

    def _largest(self, prompt_tokens: int, output_tokens: int) -> str:
        output = self.most_output_tokens(prompt_tokens)
        prompt = self._longest(
            lambda prompt: self._fits_recomputed([prompt + output_tokens - 1]),
            1,
            self._sized.max_prompt_tokens_for_memory(output_tokens),
        )
        with_prompt = f"at most {output} output tokens" if output else "no output"
        with_output = f"at most {prompt} prompt tokens" if prompt else "no prompt"
        return f"with {prompt_tokens} prompt tokens {with_prompt} could be served, with {output_tokens} output tokens {with_output}"
