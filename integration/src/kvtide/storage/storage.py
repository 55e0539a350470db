"""`KVStorage`: everything a hybrid model's requests keep on the device, behind a few verbs over rows (rows K1-K7, K11).

| verb | when | refuses | waits for |
| - | - | - | - |
| `use_cache` | once, before requests begin, where the policy shares no prefixes | – | nothing |
| `max_new_tokens_for_memory` | a request arrives | –; 0 where no output would do | nothing |
| `arrival_refusal` | a request arrives | what could never be admitted; changes nothing | nothing |
| `admit` | requests are to begin, with their prompts where prefixes are shared | peaks that do not fit beside what is promised: to wait, or for good | the schedule stream, as below |
| `chunk_tokens` | a prefill chunk is to be cut | – | nothing |
| `prepare_step` | before a forward | under `Overcommit`, a further share of output; while units are fixed or under a transfer, its take | the schedule stream, for pages it settles |
| `launch_forward` | the forward is about to be queued | – | the forward stream, for the upload |
| `record_forward` | it has been queued | – | the schedule stream, for its read end, and for all of it where it ends at a checkpoint |
| `abandon` | it will not run after all | – | the schedule stream, for what was queued of it |
| `forward_processed` | its result has been looked at | – | nothing |
| `checkpoints_taken` | states were kept elsewhere for hits, before `advance` | – | nothing |
| `advance` | its tokens count as written; windows retire; shared pages are handed over | – | the schedule stream, as below |
| `release` | a request is over | – | nothing |
| `retract` | a further share was refused | – | nothing |
| `flush_opportunistic` | nothing better to do | – | the schedule stream, for copies of others |

With overlap forward N + 1 is prepared, launched and recorded before N is processed; then N is processed, advanced over, and what is
over is released, while N + 1 runs:

    host      prepare, launch, record N + 1 │ processed, advance, release N │ prepare, launch, record N + 2 │ …
    forwards  … N ┤ N + 1 ……………………………………………………………………… ┤ N + 2 …

What is promised, and so who is admitted, waits or is turned away: `kvtide.storage.admission`. What a step takes and what windows
give up: `kvtide.storage.row_units`. What rows share: `kvtide.storage.prefix_sharing`. No verb makes the host wait. Rows and counts are int64 arrays, or what NumPy makes of them without
rounding; a verb acts on all of them at once, or raises `StorageError` (or `InvariantError`, for a hook that was skipped) before it
changes anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
import structlog

from kvtide.arena import OFFSET_BITS, RoutedKVCache, TensorDevice
from kvtide.chain import ChainAllocator, Taken, TakeRefusal
from kvtide.device import IntArray, UnitGrid
from kvtide.ledger import CheckLevel, ForwardSteps, InvariantChecks, LaunchRecord
from kvtide.plan import ArenaLayout, KVStoragePlan
from kvtide.sizing import CheckpointStrategy, SizedPlan, mirror_lengths
from kvtide.storage.admission import ChainPrefillBudget, Promise
from kvtide.storage.arrivals import checked_lengths, checked_prompts
from kvtide.storage.errors import StorageError
from kvtide.storage.evicting_takes import EvictingTakes
from kvtide.storage.forward_ids import IdTranslator, UnresolvedIds
from kvtide.storage.idle_checks import verify_mirrors, verify_units
from kvtide.storage.offering_hits import offer_with_hits
from kvtide.storage.overcommit import Overcommit
from kvtide.storage.prefix_cache import PrefixCache
from kvtide.storage.prefix_sharing import PrefixSharing, SharingObserver
from kvtide.storage.read_ends import SharedReadEnds
from kvtide.storage.refusals import AdmissionRefusal, PromiseRefusal
from kvtide.storage.requests import RequestTable, spread
from kvtide.storage.row_state import RowResets, RowState
from kvtide.storage.row_units import RowUnits
from kvtide.storage.statistics import StorageStatistics
from kvtide.storage.steps import (
    PreparedStep,
    StepState,
    check_checkpoints,
    check_launch,
    check_step,
    check_turn,
)
from kvtide.storage.supported import check_device, check_policy, check_supported
from kvtide.storage.tree import EvictionPolicy
from kvtide.storage.whole_numbers import whole_numbers

log = structlog.get_logger(__name__)


class KVStorage:
    """See the module's docstring. Built by `kvtide.storage.build_kv_storage`."""

    def __init__(
        self,
        sized: SizedPlan,
        device: TensorDevice,
        *,
        check_level: CheckLevel = CheckLevel.OFF,
        kernel_offset_bits: int = OFFSET_BITS,
        writes_whole_pages: bool = False,
        overcommit: Overcommit | None = None,
        eviction_policy: EvictionPolicy | None = None,
    ) -> None:
        """Empty, over the arena of `device`; arguments and errors as `build_kv_storage`."""
        check_supported(sized.plan)
        check_policy(sized.policy)
        check_device(device)
        self.sized = sized
        self.device = device
        self.routed_cache = RoutedKVCache(
            device.arena, sized.layout, sized.plan.shared_layers, offset_bits=kernel_offset_bits
        )
        """Layer → views, for the model's kernels."""
        mirrors = device.create_mirrors(
            mirror_lengths(
                sized.layout,
                max_running_requests=sized.max_running_requests,
                pages_per_row=sized.pages_per_row,
            )
        )
        device.prewarm([UnitGrid(band.origin_bytes, band.unit_bytes) for band in sized.layout.bands])
        self._steps = ForwardSteps()
        self._checks = InvariantChecks(check_level)
        self.chain = ChainAllocator(sized.layout, device, mirrors, self._steps, checks=self._checks)
        """For statistics and questions; takes and frees go through the verbs."""
        self.requests = RequestTable(sized.max_running_requests, sized.pages_per_row, mirrors["rows"])
        """For questions; rows change through the verbs."""
        with device.on_stream(device.forward_stream):
            self.row_state = RowState(sized.max_running_requests, device.arena.bytes.device)
        """What forwards know of each row and the host learns when they are processed; only the forward stream writes it."""
        self._row_resets = RowResets(sized.max_running_requests)
        self._forwards_in_flight = 2 if sized.policy.overlap else 1
        self._launches = self._aborted_launches = self._flushed_units = 0
        self._grid = sized.policy.grid_tokens(sized.plan)
        self._units = RowUnits(sized, self.requests, self.chain, writes_whole_pages=writes_whole_pages)
        self._takes = EvictingTakes(self.chain)
        self._admission = ChainPrefillBudget(
            sized, self.chain, self._takes, self.requests, units=self._units, overcommit=overcommit
        )
        self._sharing: PrefixSharing | None = None
        if sized.policy.strategy is not CheckpointStrategy.NONE:
            self._sharing = PrefixSharing(
                sized,
                self.chain,
                self.requests,
                units=self._units,
                takes=self._takes,
                policy=eviction_policy,
            )
            self._takes.use(self._sharing)
        self._translator = IdTranslator(
            device,
            {band.name: band.page_tokens for band in sized.layout.bands},
            sized.pages_per_row,
            self.row_state,
            self._checks,
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows that are admitted with their prompts share prefixes."""
        return self._sharing is not None

    @property
    def plan(self) -> KVStoragePlan:
        """Sub-pools in chain order."""
        return self.sized.plan

    @property
    def layout(self) -> ArenaLayout:
        """Their grids over the arena."""
        return self.sized.layout

    # ── the verbs ──

    def arrival_refusal(self, prompt_tokens: int, output_tokens: int) -> AdmissionRefusal | None:
        """Why a request of these lengths could never be admitted, however long it waited; `None` for one that could.

        The text names the most output that its prompt could have, and the longest prompt that could have its output.
        """
        return self._admission.refuse_for_ever(prompt_tokens, output_tokens)

    def max_new_tokens_for_memory(self, prompt_tokens: int) -> int:
        """The memory clip of an arriving request: most output tokens for which it could be admitted alone; 0 for none.

        Raises `StorageError` for a length that is no positive integer.
        """
        return self._admission.most_output_tokens(prompt_tokens)

    def admit(
        self,
        prompt_tokens: npt.ArrayLike,
        output_tokens: npt.ArrayLike,
        *,
        whole: bool = False,
        prompts: Sequence[npt.ArrayLike] | None = None,
        extra_keys: Sequence[Hashable] | None = None,
    ) -> IntArray | AdmissionRefusal:
        """Rows for requests of these lengths, all of them or a refusal; each gets its state slots, the running one zero-filled.

        With `prompts`, the tokens themselves, rows share prefixes, if the policy does: a row begins with what the tree can restore of its
        prompt, `requests.cached_tokens[row]` tokens that need no prefill, and hands over what it computes. `extra_keys`: adapters or
        salts; requests of different ones share nothing.

        Whatever is admitted can run to its end, in chunks of at most `requests.chunk_limits[row]` tokens: no later take of it is
        refused. Under `Overcommit` that holds for a share of the output; `whole` promises all of it, as a request that was retracted
        must be. A refusal says what is waited for, or which requests could never be served, or how many of them could go at once.
        """
        lengths, outputs = checked_lengths(prompt_tokens, output_tokens)
        self._steps.check_pages_may_change("an admission")
        tokens = checked_prompts(lengths, prompts, extra_keys)
        if self._sharing is None or tokens is None:
            promise = self._admission.offer(lengths.tolist(), outputs.tolist(), whole=whole)
            if isinstance(promise, AdmissionRefusal):
                return promise
            slots = self._take_slots(len(lengths), slots_each=1)
            return self._open(lengths, outputs, promise, np.zeros_like(lengths), slots)
        return self._admit_sharing(self._sharing, lengths, outputs, tokens, extra_keys, whole=whole)

    def _admit_sharing(
        self,
        sharing: PrefixSharing,
        lengths: IntArray,
        outputs: IntArray,
        tokens: Sequence[IntArray],
        extra_keys: Sequence[Hashable] | None,
        *,
        whole: bool,
    ) -> IntArray | AdmissionRefusal:
        """Rows that begin with hits; without any where those are in the way of what asks for them."""
        keys = [None] * len(tokens) if extra_keys is None else extra_keys
        offer = offer_with_hits(self._admission, sharing, tokens, outputs.tolist(), keys, whole=whole)
        if isinstance(offer, AdmissionRefusal):
            return offer
        try:
            slots = self._take_slots(len(tokens), slots_each=self.sized.policy.rule.slots)
            try:
                sharing.copy_checkpoints(offer.locks, slots[:, 0])
            except BaseException:
                self.chain.free_state_slots(slots.reshape(-1))
                raise
        except BaseException:
            # Nobody would ever end these locks.
            sharing.unlock(offer.locks)
            raise
        rows = self._open(lengths, outputs, offer.promise, np.array(offer.cached_tokens, np.int64), slots)
        sharing.begin(rows, offer.locks, tokens, slots)
        return rows

    def _take_slots(self, row_count: int, slots_each: int) -> IntArray:
        """State slots of new rows, the running one first, `[rows, …]`; −1 without a state band."""
        if self.plan.state_sub_pool is None:
            return np.full((row_count, 1), -1, np.int64)
        return self._takes.take_slots(row_count * slots_each).reshape(row_count, slots_each)

    def _open(
        self, prompts: IntArray, outputs: IntArray, promise: Promise, cached: IntArray, slots: IntArray
    ) -> IntArray:
        """Rows for requests that were offered `promise`, with the state slots of each, `slots [rows, …]`. It cannot fail."""
        rows = self.requests.open(
            prompts,
            prompts + outputs - 1,
            slots[:, 0],
            chunk_limit=promise.chunk_limit,
            cached_tokens=cached,
            has_checkpoints=self._grid is not None,
        )
        self._row_resets.mark(rows)
        self._admission.promise(rows, promise)
        self._units.begin(rows, slots.shape[1])
        return rows

    def chunk_tokens(self, row: int, most: int) -> int:
        """How many tokens of its prompt a row is to have in its next chunk, at most `most` and its chunk limit; 0 behind the prompt.

        A row that shares prefixes has its chunks cut where a checkpoint serves most: on the grid, and where its prompt parts from what
        is known.
        """
        start, prompt = int(self.requests.prepared[row]), int(self.requests.prompts[row])
        end = min(prompt, start + min(most, int(self.requests.chunk_limits[row])))
        if self._sharing is None or start >= end or not self._sharing.shares(row):
            return max(0, end - start)
        return self._sharing.chunk_end(row, start, end) - start

    def prepare_step(
        self, rows: npt.ArrayLike, counts: npt.ArrayLike
    ) -> PreparedStep | TakeRefusal | PromiseRefusal:
        """Hold pages for `counts[i]` more tokens of row `rows[i]`; the step of one forward over these rows.

        The forward of a row's last step may still run, where the policy overlaps: its tokens count as written. Refused, as errors, are
        rows that are not in use, have more steps open or one that is not recorded, or have lost their state (`abandon`), counts that are not positive or longer than a row's
        chunk limit, a chunk that ends off the grid of checkpoints within a prompt, several tokens at once past the prompt, and more
        tokens than a row was admitted for. Refused, as values, with nothing taken: a further share of output (`PromiseRefusal`, under
        `Overcommit` only);
        a take that fixed units or transfers are in the way of (`TakeRefusal`; a share that was promised for it stays promised).
        """
        rows, counts = whole_numbers("rows", rows), whole_numbers("counts", counts)
        self._steps.check_pages_may_change("a step")
        check_step(
            self.requests,
            rows,
            counts,
            grid_tokens=self._grid,
            forwards_in_flight=self._forwards_in_flight,
        )
        starts = self.requests.prepared[rows]
        ends = starts + counts
        refusal = self._admission.extend(rows, ends)
        if refusal is not None:
            return refusal
        taken: Taken | None = None
        take = self._units.take_of_step(rows, ends)
        if take is not None:
            answer = self._takes.take_pages(take.page_count, take.bands)
            if isinstance(answer, TakeRefusal):
                return answer
            taken = answer
            self._units.taken(rows, take, taken.pages)
        self.requests.prepared[rows] = ends
        self.requests.open_steps[rows] += 1
        return PreparedStep(rows, counts, starts, self.requests.generations[rows], taken)

    def launch_forward(self, step: PreparedStep) -> UnresolvedIds:
        """Bring the mirrors up to date for the step; queue its forward next, then call `record_forward`.

        The schedule stream uploads, behind the read ends of the forwards before, and the forward stream waits for it. The forward's
        first work on its stream is to `resolve` the ids. Until it is recorded, no page may be freed, taken or moved. Raises
        `StorageError` if a row of the step was released meanwhile.
        """
        step.check_state("launch", StepState.PREPARED)
        check_launch(self.requests, step)
        step.launch = self._steps.forward_launched()
        step.state = StepState.LAUNCHED
        step.reset_rows = self._row_resets.take()
        self._launches += 1
        device = self.device
        device.upload(device.schedule_stream)
        device.wait_event(device.forward_stream, device.record_event(device.schedule_stream))
        write_rows, write_positions = spread(step.rows, step.starts, step.counts)
        return UnresolvedIds(
            rows=step.rows,
            page_columns=int(self.requests.page_counts[step.rows].max(initial=0)),
            write_rows=write_rows,
            write_positions=write_positions,
            state_slots=self.requests.state_slots[step.rows],
            reset_rows=step.reset_rows,
            reset_lengths=self.requests.cached_tokens[step.reset_rows],
            translator=self._translator,
        )

    def record_forward(self, step: PreparedStep, read_ends: SharedReadEnds | None = None) -> None:
        """Note that the step's forward has been queued: pages freed from now on wait for it.

        The write-after-read barrier stands here: whatever the schedule stream does next comes behind the read end that the forward's
        backends have declared, or behind the whole forward where one has not.
        """
        record = self._launched(step, "record", StepState.LAUNCHED)
        device, before = self.device, self._steps.newest_recorded
        step.done_event = device.record_event(device.forward_stream)
        recorded = self._steps.forward_recorded(record, step.done_event)
        self.chain.forward_recorded(recorded, self._units.writes_of_step(step))
        if step.taken is not None:
            self.chain.written(step.taken)
        self.requests.recorded[step.rows] = step.starts + step.counts
        self.requests.state_in_doubt[step.rows] = False
        step.state = StepState.RECORDED
        read_end = None if read_ends is None else read_ends.end
        device.wait_event(device.schedule_stream, step.done_event if read_end is None else read_end)
        if read_end is None:
            self._steps.wait_queued(step.done_event)
        elif before is not None:
            # The read end lies on the forward stream behind all of the forward before.
            self._steps.wait_queued(before.event)
        if self._sharing is not None:
            self._sharing.recorded(step.rows, step.starts + step.counts)

    def forward_processed(self, step: PreparedStep) -> None:
        """Note that the host has seen the forward's completion; steps are processed in launch order.

        Raises `InvariantError` for a step out of order, and for a forward that has not completed: the host cannot have
        synchronised with it.
        """
        record = self._launched(step, "process", StepState.RECORDED)
        if step.done_event is not None and self.device.query_event(step.done_event):
            self._steps.host_synchronised(step.done_event)
        self._steps.forward_processed(record)
        self.chain.forward_processed(record.forward)
        step.state = StepState.PROCESSED

    def abandon(self, step: PreparedStep, *, may_have_run: bool = False) -> None:
        """Give up a step that was not recorded: its tokens count as never prepared, and its rows give back what it took.

        So a row holds pages for the tokens of its open steps and no others, whatever is tried and given up: what windows bind behind a
        chunk depends on where it ends. Work that was queued for the step may still run: the schedule stream waits for the forward stream
        as it is now, so nothing moves or is zeroed under that work.

        Entries that such work has written of tokens are written again by the next try; a *state* that it has changed is gone. Say
        `may_have_run` where a layer of the model may have been queued: rows with state then have no further step, and are to be retracted
        or released; a retracted one starts again from its last checkpoint, or from nothing. Without it the caller answers for it that
        no state was changed, and the step can be prepared again. Either way no state goes to others before another forward is recorded.
        """
        step.check_state("abandon", StepState.PREPARED, StepState.LAUNCHED)
        is_same = self.requests.is_same_request(step.rows, step.generations)
        rows, starts = step.rows[is_same], step.starts[is_same]
        if step.launch is None:
            self._steps.check_pages_may_change("an abandoned step")
        if step.launch is not None:
            device = self.device
            device.wait_event(device.schedule_stream, device.record_event(device.forward_stream))
            self._steps.forward_aborted(step.launch)
            self._aborted_launches += 1
            self.requests.state_in_doubt[rows] = True
            if may_have_run and self.plan.state_sub_pool is not None:
                self.requests.state_is_lost[rows] = True
            log.info("storage.launch_aborted", rows=step.rows.tolist(), may_have_run=may_have_run)
        if step.reset_rows is not None:
            self._row_resets.mark(step.reset_rows)
        self._units.give_back(rows, starts)
        if step.taken is not None:
            self.chain.pay_zero_debt(step.taken)
        self.requests.prepared[rows] = starts
        self.requests.open_steps[rows] -= 1
        step.state = StepState.ABANDONED

    def checkpoints_taken(self, rows: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Note that the latest checkpoint of row `rows[i]` lies at `lengths[i]` tokens: its windows keep what a hit there reads.

        Admission prices each checkpoint as taken by the time the forward that reaches it is advanced over, so call it before that
        `advance`. Raises `StorageError` without a policy that keeps checkpoints on a grid, and for a length that is off the grid,
        not reached by a forward, or before the one noted last.
        """
        rows, lengths = whole_numbers("rows", rows), whole_numbers("lengths", lengths)
        self.requests.check_live(rows, "note checkpoints of")
        check_checkpoints(self.requests, rows, lengths, self._grid)
        self.requests.checkpoint_lengths[rows] = lengths

    def advance(self, step: PreparedStep, chosen: npt.ArrayLike | None = None) -> None:
        """Count the tokens of a processed step as written, and retire window pages that fell behind.

        The next token, at position n, reads a window of W from n - W + 1 on, an attention chunk from its own start, and a hit on the
        latest checkpoint (`checkpoints_taken`) the same from there; pages wholly before both are freed. A forward in flight may still
        load them, so they pend until it is over. Rows that were released meanwhile are left alone.

        Rows that share prefixes hand over what others may hit. `chosen[i]`: the token that row `step.rows[i]` chose, −1 for none; what is
        not told is not handed over.
        """
        step.check_state("advance over", StepState.PROCESSED)
        self._steps.check_pages_may_change("an advance")
        tokens = None if chosen is None else whole_numbers("chosen", chosen)
        if tokens is not None and tokens.shape != step.rows.shape:
            raise StorageError(f"cannot advance {len(step.rows)} rows with {len(tokens)} chosen tokens")
        is_same = self.requests.is_same_request(step.rows, step.generations)
        rows, starts = step.rows[is_same], step.starts[is_same]
        check_turn(self.requests, rows, starts)
        lengths, checkpoints = starts + step.counts[is_same], self.requests.checkpoint_lengths[rows]
        if self._sharing is not None:
            checkpoints = self._sharing.latest_checkpoints(rows, lengths, checkpoints)
        retired = self._units.retired(rows, lengths, checkpoints)
        self.requests.lengths[rows] = lengths
        self.requests.checkpoint_lengths[rows] = checkpoints
        self.requests.open_steps[rows] -= 1
        self._units.retire(retired)
        if self._sharing is not None:
            self._sharing.advance(rows, None if tokens is None else tokens[is_same])
        step.state = StepState.DONE

    def release(self, rows: npt.ArrayLike) -> None:
        """Return everything the rows hold, and the rows; pages that a forward in flight may touch pend until it is over."""
        rows = whole_numbers("rows", rows)
        self.requests.check_live(rows, "release")
        self._steps.check_pages_may_change("a release")
        if self._sharing is not None:
            self._sharing.release(rows)
        self._units.release(rows)
        self._admission.release(rows)
        self.requests.close(rows)

    def retract(self, rows: npt.ArrayLike) -> None:
        """Take the memory of running requests away, as `release` does, so that others go on; they are queued again.

        A retracted request is admitted anew with its prompt and what it has generated as the prompt, and with `whole`: it recomputes
        its entries, and is not retracted again.
        """
        rows = whole_numbers("rows", rows)
        self.release(rows)
        self._admission.retracted(rows)
        log.info("storage.retracted", rows=rows.tolist())

    def use_cache(self, cache: PrefixCache) -> None:
        """Have admission count what `cache` could evict, and takes evict it; raises `StorageError` for a second one."""
        self._takes.use(cache)

    def watch_sharing(self, observer: SharingObserver) -> None:
        """Tell `observer` of copied states and rehomed pages; raises `StorageError` where the policy shares no prefixes."""
        if self._sharing is None:
            raise StorageError("cannot watch prefixes that the policy does not share")
        self._sharing.observer = observer

    def flush_opportunistic(self) -> int:
        """Close holes while there is nothing better to do; how many units moved.

        For a moment without a forward to launch: behind a result that was processed early, and at idle. It never waits for a running
        forward, and moves nothing that one may write.
        """
        moved = self.chain.flush_opportunistic()
        if moved:
            self._flushed_units += moved
            log.info("storage.flushed", units=moved)
        return moved

    # ── questions ──

    def statistics(self) -> StorageStatistics:
        """Exact figures."""
        free_rows = self.requests.free_count
        return StorageStatistics(
            rows_in_use=self.sized.max_running_requests - free_rows,
            free_rows=free_rows,
            forwards_in_flight=self._steps.in_flight_count,
            launches=self._launches,
            aborted_launches=self._aborted_launches,
            flushed_units=self._flushed_units,
            admitted_at_peak=self.admitted_at_peak(),
            outstanding=self._by_band(self._admission.outstanding_units.tolist()),
            admission=self._admission.statistics(),
            sharing=None if self._sharing is None else self._sharing.statistics(),
            chain=self.chain.statistics(),
        )

    def admitted_at_peak(self) -> dict[str, int]:
        """Units promised to the rows in use, by band: what they hold at most, all together. Admission keeps to these."""
        return self._by_band(self._admission.promised_units.tolist())

    def resident_now(self) -> dict[str, int]:
        """Units that the rows in use hold at this moment, by band; never more than `admitted_at_peak`."""
        return self._by_band(self._units.counts.sum(axis=1).tolist())

    def verify_idle(self) -> None:
        """Raise `InvariantError` unless bytes are conserved, and units, promises and rows are those of the requests (K11).

        From the check level WARN on, the host waits for the device: the mirrors are uploaded and compared with the host's tables, and
        every id that forwards translated must have lain in its table (L8).
        """
        self.chain.verify_byte_accounting()
        held = {band.name: band.live_units for band in self.chain.statistics().bands}
        verify_units(held, self.resident_now(), self._takes.held_units())
        self.requests.verify_idle()
        self._admission.verify(self.requests.live_rows())
        if self._sharing is not None:
            self._sharing.verify(self.requests.live_rows())
        self._translator.verify()
        if self._checks.checks("mirror.equals_host"):
            verify_mirrors(self.device, self.requests, self.chain, self._checks)

    # ── helpers ──

    def _by_band(self, units: Sequence[int]) -> dict[str, int]:
        return {band.name: count for band, count in zip(self.layout.bands, units, strict=True)}

    @staticmethod
    def _launched(step: PreparedStep, action: str, state: StepState) -> LaunchRecord:
        step.check_state(action, state)
        assert step.launch is not None, "a launched step has its record"
        return step.launch
