"""Who is admitted, who waits, who is turned away (rows K5, K6).

Requests are admitted with promises that the chain can keep (`kvtide.storage.promises`), at prices that an empty arena is asked about too
(`kvtide.storage.prices`). The verdict on a request, in this order:

1. no empty arena would hold it, or it is longer than rows are: turned away, whatever else is going on;
2. a row is free and its whole demand fits beside what is outstanding: admitted, with the longest chunks that an empty arena allows;
3. it does not fit, and requests in service, a forward or a host copy in flight will free something: it waits;
4. nothing will: admitted with the longest chunks under which it fits now, or, if it fits with none, turned away.

So requests do not shrink their chunks because others are there for a moment, and nothing waits while nothing will free. Requests that
are asked for together are judged together, and turned away only by name: see `AdmissionRefusal`. Those that begin and those that come
back from backups are judged alike (`kvtide.storage.asked`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import structlog

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.ledger import ForwardSteps
from kvtide.sizing import KVDemand, SizedPlan
from kvtide.storage.asked import Arriving, Asked, Returning
from kvtide.storage.evicting_takes import EvictingTakes
from kvtide.storage.overcommit import Overcommit
from kvtide.storage.prices import Hits, Prices, longest
from kvtide.storage.promises import Promises
from kvtide.storage.refusals import AdmissionRefusal, PromiseRefusal, WillFree
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_units import RowUnits
from kvtide.storage.statistics import AdmissionStatistics

log = structlog.get_logger(__name__)


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
        self._steps: ForwardSteps = chain.steps
        self._requests = requests
        self._overcommit = overcommit
        self._prices = Prices(sized, recomputes=overcommit is not None)
        self._promises = Promises(sized.layout, chain, takes, units)
        self._tokens: IntArray = np.zeros(sized.max_running_requests, np.int64)
        self._serials: IntArray = np.zeros(sized.max_running_requests, np.int64)
        self._admitted = self._turned_away = self._extended = self._retracted = 0
        self._waits: Counter[WillFree] = Counter()
        self._asked_last: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._alone_last: int | None = None

    # ── questions ──

    @property
    def promised_units(self) -> IntArray:
        """See `Promises.promised_units`."""
        return self._promises.promised_units

    @property
    def outstanding_units(self) -> IntArray:
        """See `Promises.outstanding_units`."""
        return self._promises.outstanding_units

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
        """See `Prices.most_output_tokens`."""
        return self._prices.most_output_tokens(prompt_tokens)

    def refuse_for_ever(self, prompt_tokens: int, output_tokens: int) -> AdmissionRefusal | None:
        """Why one request can never be admitted, with the lengths that could be, or `None`; raises what `offer` raises."""
        if self._prices.fits_alone([prompt_tokens], [output_tokens], self._sized.least_chunk_tokens):
            return None
        reason = self._prices.never([prompt_tokens], [output_tokens])
        return AdmissionRefusal(
            rule=f"{reason}; {self._prices.largest(prompt_tokens, output_tokens)}",
            waits_for=(),
            turned_away=(0,),
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
        verdict = self.verdict(
            prompts, outputs, Hits.none(len(self._sized.layout.bands), len(prompts)), whole=whole
        )
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
        return self._judge(
            Arriving(
                self._prices,
                self._sized,
                prompts,
                list(outputs),
                promised=self._outputs(outputs, whole=whole),
                hits=hits,
                longest_chunk=self._alone(prompts, outputs),
            )
        )

    def offer_restored(
        self, prompts: Sequence[int], outputs: Sequence[int], written: Sequence[int], *, chunk_tokens: int
    ) -> Promise | AdmissionRefusal:
        """As `offer`, for requests that come back whole, with `written[i]` tokens each; all their output is promised.

        One that still prefills goes on in chunks of `chunk_tokens`, or in shorter ones where nothing will free.
        """
        verdict = self._judge(
            Returning(self._prices, self._sized, prompts, outputs, written, chunk_tokens=chunk_tokens)
        )
        if isinstance(verdict, AdmissionRefusal):
            self.refused(prompts, outputs, verdict)
        return verdict

    def _judge(self, asked: Asked) -> Promise | AdmissionRefusal:
        """The verdict on requests that are asked for together: the ladder of the module's docstring, rung by rung."""
        count = len(asked.outputs)
        everything = slice(count)
        least = self._sized.least_chunk_tokens
        if asked.longest_chunk is None:
            return self._refuse_some(asked, asked.fits_alone, asked.never)
        waits_for = self._waits_for()
        waiting = f"; waits for {', '.join(reason.value for reason in waits_for)}"
        free_count = self._requests.free_count
        if count > free_count:
            needs = f"{count} {asked.noun}s need as many rows" if count > 1 else f"a {asked.noun} needs a row"
            free = f"free: {free_count} of {self._sized.max_running_requests}"
            return AdmissionRefusal(rule=f"{needs} ({free}){waiting}", waits_for=waits_for)
        # While something will free, chunks are as long as an empty arena allows: they do not shrink for a moment's sake.
        shortest = asked.longest_chunk if waits_for else least

        def fits(part: slice, chunk: int) -> bool:
            return self._promises.has_room(asked.needed(part, chunk))

        def beside(part: slice) -> str:
            return f"{self._prices.does_not_fit(asked.demands(part, shortest), shortest)} {self._promises.beside()}"

        chunk = longest(lambda chunk: fits(everything, chunk), shortest, asked.longest_chunk)
        if chunk is not None:
            return Promise(
                chunk_limit=chunk, output_tokens=asked.outputs, demands=asked.demands(everything, chunk)
            )
        if waits_for:
            return AdmissionRefusal(rule=f"{beside(everything)}{waiting}", waits_for=waits_for)
        return self._refuse_some(
            asked,
            lambda part: fits(part, least),
            lambda part: f"{beside(part)}; nothing is going to free any",
        )

    def may_fit_without(
        self, prompts: Sequence[int], outputs: Sequence[int], hits: Hits, *, whole: bool
    ) -> bool:
        """Whether requests that were refused with these hits might be admitted without.

        A request is promised no more with a hit than without, and what a hit keeps of full attention and windows is part of that. But its
        checkpoint is needed beside the slots of its request until it is copied. What is kept for one request others do without, so of several
        the answer is yes.
        """
        if not any(hits.tokens) or len(prompts) > 1:
            return any(hits.tokens)
        alone = self._alone(prompts, outputs)
        if alone is None or not self._requests.free_count or not hits.checkpoints.any():
            return False
        chunk = alone if self._waits_for() else self._sized.least_chunk_tokens
        demands = self._prices.demands(prompts, self._outputs(outputs, whole=whole), chunk, hits.tokens)
        units = self._prices.total(demands) - hits.tails.sum(axis=1) - hits.checkpoints
        return self._promises.has_room(units)

    def _outputs(self, outputs: Sequence[int], *, whole: bool) -> list[int]:
        """Output that each is promised."""
        if self._overcommit is None or whole:
            return list(outputs)
        return [self._overcommit.promised_output(output, 1) for output in outputs]

    def _alone(self, prompts: Sequence[int], outputs: Sequence[int]) -> int | None:
        """The longest chunks that an empty arena allows; what waits is asked for in every iteration, with the same lengths."""
        asked = (tuple(prompts), tuple(outputs))
        if asked != self._asked_last:
            self._alone_last = longest(
                lambda chunk: self._prices.fits_alone(prompts, outputs, chunk),
                self._sized.least_chunk_tokens,
                self._sized.chunk_tokens,
            )
            self._asked_last = asked
        return self._alone_last

    def _refuse_some(
        self, asked: Asked, fits: Callable[[slice], bool], reason: Callable[[slice], str]
    ) -> AdmissionRefusal:
        """Of requests that do not fit together, those that do not fit by themselves either are turned away; else there are too many."""
        count, noun = len(asked.outputs), f"{asked.noun}s"
        each = [slice(place, place + 1) for place in range(count)]
        never = tuple(place for place in range(count) if not fits(each[place]))
        if count == 1:
            return AdmissionRefusal(rule=reason(each[0]), waits_for=(), turned_away=(0,))
        if never:
            text = f"of {count} {noun}, {list(never)} can never be admitted: {reason(each[never[0]])}"
            return AdmissionRefusal(rule=text, waits_for=(), turned_away=never)
        first = longest(lambda first: fits(slice(first)), 1, count - 1)
        text = (
            f"{count} {noun} are too many at once, though the first {first} would do: {reason(slice(count))}"
        )
        return AdmissionRefusal(rule=text, waits_for=(), turned_away=(), first_that_fit=first)

    # ── what was promised ──

    def promise(self, rows: IntArray, promise: Promise) -> None:
        """Charge admitted rows with what they were offered."""
        units = np.array([demand.units for demand in promise.demands], np.int64)
        self._promises.charge(rows, units.T)
        for row, output in zip(rows.tolist(), promise.output_tokens, strict=True):
            self._tokens[row] = self._requests.prompts[row] + output - 1
            self._serials[row] = self._admitted
            self._admitted += 1
        log.debug("admission.admitted", rows=rows.tolist(), chunk_limit=promise.chunk_limit)

    def extend(self, rows: IntArray, ends: IntArray) -> PromiseRefusal | None:
        """Promise rows of a step further shares of output, as far as they reach `ends[i]` tokens; all of them or a refusal."""
        if self._overcommit is None or not (is_over := ends > self._tokens[rows]).any():
            return None
        over = rows[is_over]
        promised, tokens = self._promises.of(over), self._tokens[over]
        for place, (row, end) in enumerate(zip(over.tolist(), ends[is_over].tolist(), strict=True)):
            prompt = int(self._requests.prompts[row])
            output = self._overcommit.promised_output(
                int(self._requests.limits[row]) + 1 - prompt, end + 1 - prompt
            )
            limit = int(self._requests.chunk_limits[row])
            (demand,) = self._prices.demands(
                [prompt], [output], limit, [int(self._requests.cached_tokens[row])]
            )
            promised[:, place], tokens[place] = demand.units, prompt + output - 1
        asked = (promised - self._promises.of(over)).sum(axis=1)
        if not self._promises.has_room(asked):
            return self._refuse_share(over, asked)
        self._promises.charge(over, promised)
        self._tokens[over] = tokens
        self._extended += len(over)
        return None

    def retracted(self, rows: IntArray) -> None:
        """Count rows that are about to be released without having come to their end."""
        self._retracted += len(rows)

    def release(self, rows: IntArray) -> None:
        """End what rows were promised."""
        self._promises.end(rows)

    def verify(self, rows: IntArray) -> None:
        """See `Promises.verify`."""
        self._promises.verify(rows)

    # ── helpers ──

    def _waits_for(self) -> tuple[WillFree, ...]:
        """What is going to free memory or a row."""
        going = {
            WillFree.REQUESTS: self._requests.free_count < self._sized.max_running_requests,
            WillFree.FORWARD: self._steps.in_flight_count > 0,
            WillFree.HOST_COPY: self._chain.uses.has_host_copies,
        }
        return tuple(reason for reason, goes in going.items() if goes)

    def _refuse_share(self, over: IntArray, asked: IntArray) -> PromiseRefusal:
        rows = self._requests.live_rows()
        partial = rows[self._tokens[rows] < self._requests.limits[rows]]
        newest_first = partial[np.argsort(-self._serials[partial])]
        refusal = PromiseRefusal(
            rule=f"rows {over.tolist()} have reached the output that they were promised, and {self._promises.by_band(asked)} more do not "
            f"fit {self._promises.beside()}; {len(rows) - len(over)} other requests are in service",
            rows=tuple(over.tolist()),
            overcommitted=tuple(newest_first.tolist()),
        )
        log.info("admission.share_refused", rows=list(refusal.rows), reason=str(refusal))
        return refusal
