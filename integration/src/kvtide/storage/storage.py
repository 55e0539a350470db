"""`KVStorage`: everything a hybrid model's requests keep on the device, behind a few verbs over rows (rows K1-K4, K6, K11).

| verb | when | refuses | waits for |
| - | - | - | - |
| `arrival_refusal` | a request arrives | what could never be admitted; changes nothing | nothing |
| `admit` | requests are to begin | peaks that do not pack beside what is promised | nothing |
| `prepare_step` | before a forward | a take that no layout holds (never after an admission) | the schedule stream, for pages it settles |
| `launch_forward` | the forward is about to be queued | – | the forward stream, for the upload |
| `record_forward` | it has been queued | – | the schedule stream, for its read end |
| `abandon` | it will not run after all | – | the schedule stream, for what was queued of it |
| `forward_processed` | its result has been looked at | – | nothing |
| `advance` | its tokens count as written | – | nothing |
| `release` | a request is over | – | nothing |
| `flush_opportunistic` | nothing better to do | – | the schedule stream, for copies of others |

With overlap forward N + 1 is prepared, launched and recorded before N is processed; then N is processed, advanced over, and what is
over is released, while N + 1 runs:

    host      prepare, launch, record N + 1 │ processed, advance, release N │ prepare, launch, record N + 2 │ …
    forwards  … N ┤ N + 1 ……………………………………………………………………… ┤ N + 2 …

No verb makes the host wait. Rows and counts are int64 arrays, or what NumPy makes of them without rounding; a verb acts on all
of them at once, or raises `StorageError` (or `InvariantError`, for a hook that was skipped) before it changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import structlog

from kvtide.arena import OFFSET_BITS, RoutedKVCache, TensorDevice
from kvtide.chain import ChainAllocator, Taken, TakeRefusal
from kvtide.device import IntArray, UnitGrid
from kvtide.ledger import CheckLevel, ForwardSteps, InvariantChecks, InvariantError, LaunchRecord
from kvtide.plan import ArenaLayout, KVStoragePlan
from kvtide.sizing import SizedPlan, mirror_lengths
from kvtide.storage.admission import Admission, AdmissionRefusal
from kvtide.storage.errors import StorageError
from kvtide.storage.forward_ids import IdTranslator, UnresolvedIds
from kvtide.storage.idle_checks import verify_mirrors, verify_units
from kvtide.storage.read_ends import SharedReadEnds
from kvtide.storage.requests import RequestTable, spread
from kvtide.storage.row_state import RowResets, RowState
from kvtide.storage.statistics import StorageStatistics
from kvtide.storage.step_pages import takes_of_step, writes_of_step
from kvtide.storage.steps import PreparedStep, StepState, check_step, check_turn
from kvtide.storage.supported import check_device, check_policy, check_supported
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
        self._admission = Admission(sized, lambda: list(self.resident_now().values()))
        self._writes_whole_pages = writes_whole_pages
        self._translator = IdTranslator(
            device,
            {band.name: band.page_tokens for band in sized.layout.bands},
            sized.pages_per_row,
            self.row_state,
            self._checks,
        )
        # The owner last: a virtual page returns with it.
        self._release_order = sorted(sized.plan.token_sub_pools, key=lambda pool: pool is sized.plan.owner)
        self._first_held = {
            pool.name: np.zeros(sized.max_running_requests, np.int64) for pool in sized.plan.token_sub_pools
        }

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
        self, prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike
    ) -> IntArray | AdmissionRefusal:
        """Rows for requests of these lengths, all of them or a refusal; each gets its state slot, zero-filled.

        Whatever is admitted can run to its end: no later take of it is refused.
        """
        prompts, outputs = (
            whole_numbers("prompt_tokens", prompt_tokens),
            whole_numbers("output_tokens", output_tokens),
        )
        if prompts.shape != outputs.shape:
            raise StorageError(f"cannot admit {len(prompts)} prompts with {len(outputs)} outputs")
        demands = [
            self._admission.demand(prompt, output)
            for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True)
        ]
        limits = prompts + outputs - 1
        refusal = self._admission.refuse(demands, int(limits.max(initial=0)) + 1, self.requests.free_count)
        if refusal is not None:
            return refusal
        slots = np.full(len(demands), -1, np.int64)
        if self.plan.state_sub_pool is not None:
            taken = self.chain.take(state_slots=len(demands))
            if isinstance(taken, TakeRefusal):
                raise _broken_promise(taken)
            slots = taken.state_slots
        rows = self.requests.open(prompts, limits, slots)
        self._row_resets.mark(rows)
        self._admission.promise(rows, demands)
        return rows

    def prepare_step(self, rows: npt.ArrayLike, counts: npt.ArrayLike) -> PreparedStep | TakeRefusal:
        """Hold pages for `counts[i]` more tokens of row `rows[i]`; the step of one forward over these rows.

        The forward of a row's last step may still run, where the policy overlaps: its tokens count as written. Refused, as errors, are
        rows that are not in use or have more steps open, counts that are not positive or longer than a chunk, several tokens at once
        past the prompt, and more tokens than a row was admitted for.
        """
        rows, counts = whole_numbers("rows", rows), whole_numbers("counts", counts)
        self._steps.check_pages_may_change("a step")
        check_step(
            self.requests,
            rows,
            counts,
            chunk_tokens=self.sized.chunk_tokens,
            forwards_in_flight=self._forwards_in_flight,
        )
        starts = self.requests.prepared[rows]
        ends = starts + counts
        taken: Taken | None = None
        new_pages = np.maximum(0, -(-ends // self.plan.page_tokens) - self.requests.page_counts[rows])
        if self.plan.owner is not None and new_pages.any():
            answer = self.chain.take(
                pages=int(new_pages.sum()),
                bands=takes_of_step(self.plan, new_pages, ends) if self._writes_whole_pages else None,
            )
            if isinstance(answer, TakeRefusal):
                return answer
            taken = answer
            self.requests.append(rows, new_pages, taken.pages)
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
        gone = step.rows[~self.requests.is_same_request(step.rows, step.generations)]
        if len(gone):
            raise StorageError(
                f"cannot launch a step of rows {step.rows.tolist()}: rows {gone.tolist()} were released since it was prepared; "
                "abandon it and prepare the others anew"
            )
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
        self.chain.forward_recorded(recorded, writes_of_step(self.plan, self.requests, step))
        if step.taken is not None:
            self.chain.written(step.taken)
        step.state = StepState.RECORDED
        read_end = None if read_ends is None else read_ends.end
        device.wait_event(device.schedule_stream, step.done_event if read_end is None else read_end)
        if read_end is None:
            self._steps.wait_queued(step.done_event)
        elif before is not None:
            # The read end lies on the forward stream behind all of the forward before.
            self._steps.wait_queued(before.event)

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

    def abandon(self, step: PreparedStep) -> None:
        """Give up a step that was not recorded: its tokens count as never prepared, its pages stay with their rows.

        Work that was queued for it may still run: the schedule stream waits for the forward stream as it is now, so nothing
        moves or is zeroed under that work.
        """
        step.check_state("abandon", StepState.PREPARED, StepState.LAUNCHED)
        if step.launch is not None:
            device = self.device
            device.wait_event(device.schedule_stream, device.record_event(device.forward_stream))
            self._steps.forward_aborted(step.launch)
            self._aborted_launches += 1
            log.info("storage.launch_aborted", rows=step.rows.tolist())
        if step.reset_rows is not None:
            self._row_resets.mark(step.reset_rows)
        if step.taken is not None:
            self.chain.pay_zero_debt(step.taken)
        is_same = self.requests.is_same_request(step.rows, step.generations)
        self.requests.prepared[step.rows[is_same]] = step.starts[is_same]
        self.requests.open_steps[step.rows[is_same]] -= 1
        step.state = StepState.ABANDONED

    def advance(self, step: PreparedStep) -> None:
        """Count the tokens of a processed step as written, and retire window pages that fell behind.

        The next token, at position n, reads a window of W from n - W + 1 on, an attention chunk from its own start; pages wholly
        before that are freed; a forward in flight may still load them, so they pend until it is over. Rows that were released
        meanwhile are left alone.
        """
        step.check_state("advance over", StepState.PROCESSED)
        self._steps.check_pages_may_change("an advance")
        is_same = self.requests.is_same_request(step.rows, step.generations)
        rows, starts = step.rows[is_same], step.starts[is_same]
        check_turn(self.requests, rows, starts)
        lengths = starts + step.counts[is_same]
        self.requests.lengths[rows] = lengths
        self.requests.open_steps[rows] -= 1
        for pool in self._release_order:
            if pool.window_tokens is not None:
                first_read = np.maximum(0, lengths - pool.window_tokens + 1)
                self._free_before(pool.name, rows, first_read // self.plan.page_tokens)
            elif pool.chunk_tokens is not None:
                chunk_start = lengths - lengths % pool.chunk_tokens
                self._free_before(pool.name, rows, chunk_start // self.plan.page_tokens)
        step.state = StepState.DONE

    def release(self, rows: npt.ArrayLike) -> None:
        """Return everything the rows hold, and the rows; pages that a forward in flight may touch pend until it is over."""
        rows = whole_numbers("rows", rows)
        self.requests.check_live(rows, "release")
        self._steps.check_pages_may_change("a release")
        for pool in self._release_order:
            self._free_before(pool.name, rows, self.requests.page_counts[rows])
            self._first_held[pool.name][rows] = 0
        if self.plan.state_sub_pool is not None:
            self.chain.free_state_slots(self.requests.state_slots[rows])
        self._admission.release(rows)
        self.requests.close(rows)

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
            chain=self.chain.statistics(),
        )

    def admitted_at_peak(self) -> dict[str, int]:
        """Units promised to the rows in use, by band: what they hold at most, all together. Admission keeps to these."""
        return self._by_band(self._admission.total_units.tolist())

    def resident_now(self) -> dict[str, int]:
        """Units that the rows in use hold at this moment, by band; never more than `admitted_at_peak`."""
        return {band.name: band.live_units for band in self.chain.statistics().bands}

    def verify_idle(self) -> None:
        """Raise `InvariantError` unless bytes are conserved, and units, promises and rows are those of the requests (K11).

        From the check level WARN on, the host waits for the device: the mirrors are uploaded and compared with the host's tables, and
        every id that forwards translated must have lain in its table (L8).
        """
        self.chain.verify_byte_accounting()
        verify_units(self.plan, self.requests, self._first_held, self.resident_now())
        self.requests.verify_idle()
        self._admission.verify(self.requests.live_rows())
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

    def _free_before(self, band_name: str, rows: IntArray, page_ends: IntArray) -> None:
        """Free the rows' pages that one band still holds before `page_ends`."""
        first = self._first_held[band_name][rows]
        ends = np.maximum(first, page_ends)
        if (ends == first).all():
            return
        self.chain.free_pages(band_name, self.requests.held(rows, first, ends))
        self._first_held[band_name][rows] = ends
        if band_name == self.layout.owner:
            self.requests.forget(rows, first, ends)


def _broken_promise(refusal: TakeRefusal) -> InvariantError:
    return InvariantError(
        "storage.admission_guarantee",
        f"an admitted request was refused: {refusal}",
        "a demand was priced too low",
    )
