"""`KVStorage`: everything a hybrid model's requests keep on the device, behind a few verbs over rows (rows K1-K7, K11).

The storage decides nothing itself. A verb looks at what it was handed, asks the part whose matter it is, and tells the others:

    verb ── checked: rows, counts, state of the step ── asked: a plan or a refusal ── carried out, which cannot fail

What is promised, and so who is admitted, waits or is turned away: `kvtide.storage.admission`. What a step takes and what windows
give up: `kvtide.storage.row_units`. What rows share: `kvtide.storage.prefix_sharing`. What is kept of retracted ones:
`kvtide.storage.backups`. How a step comes to the device and back: `kvtide.storage.launches`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import structlog

from kvtide.arena import OFFSET_BITS, TensorDevice
from kvtide.chain import Taken, TakeRefusal
from kvtide.device import IntArray
from kvtide.ledger import CheckLevel
from kvtide.plan import ArenaLayout, KVStoragePlan
from kvtide.sizing import SizedPlan
from kvtide.storage.arrivals import checked_lengths, checked_prompts
from kvtide.storage.backups import RowBackup
from kvtide.storage.chunks import next_chunk_tokens
from kvtide.storage.errors import StorageError
from kvtide.storage.forward_ids import UnresolvedIds
from kvtide.storage.handed_pages import SharingObserver
from kvtide.storage.idle_checks import verify_mirrors, verify_units
from kvtide.storage.overcommit import Overcommit
from kvtide.storage.parts import StorageParts
from kvtide.storage.prefix_cache import PrefixCache
from kvtide.storage.read_ends import SharedReadEnds
from kvtide.storage.refusals import AdmissionRefusal, PromiseRefusal
from kvtide.storage.requests import NO_CHECKPOINT
from kvtide.storage.statistics import StorageStatistics
from kvtide.storage.steps import (
    PreparedStep,
    StepState,
    check_checkpoints,
    check_step,
    check_turn,
)
from kvtide.storage.tree import EvictionPolicy
from kvtide.storage.whole_numbers import whole_number, whole_numbers

log = structlog.get_logger(__name__)


class KVStorage:
    """Rows of requests over one arena, and the verbs of their life. Built by `kvtide.storage.build_kv_storage`.

    | verb | when | refuses | waits for |
    | - | - | - | - |
    | `use_cache` | once, while no request is in service, where the policy shares no prefixes | – | nothing |
    | `watch_sharing` | whenever somebody wants to know which bytes rows share | – | nothing |
    | `max_new_tokens_for_memory` | a request arrives | –; 0 where no output would do | nothing |
    | `arrival_refusal` | a request arrives | what could never be admitted; changes nothing | nothing |
    | `admit` | requests are to begin, with their prompts where prefixes are shared | peaks that do not fit beside what is promised: to wait, or for good | the schedule stream (¹) |
    | `next_chunk_tokens` | a prefill chunk is to be cut | – | nothing |
    | `prepare_step` | before a forward | under `Overcommit`, a further share of output; while units are fixed or under a transfer, its take | the schedule stream (¹) |
    | `launch_forward` | the forward is about to be queued | – | the forward stream, for the upload, and for what is being restored |
    | `record_forward` | it has been queued | – | the schedule stream, for its read end, and for all of it where it ends at a checkpoint (¹) |
    | `abandon` | it will not run after all | – | the schedule stream, for what was queued of it |
    | `forward_processed` | its result has been looked at | – | the schedule stream, for backups that were copied under it |
    | `checkpoints_taken` | states were kept elsewhere for hits, before `advance` | – | nothing |
    | `advance` | its tokens count as written; windows retire; shared pages are handed over | – | the schedule stream (¹), where states are handed over |
    | `release` | a request is over | – | nothing |
    | `retract` | a further share was refused | – | nothing |
    | `retract_to_host` | the same, and what the rows hold is to be kept | – | the copy stream, for both others |
    | `restore` | a retracted request is to go on | as `admit` | the schedule stream (¹); the copy stream, for both others |
    | `flush_opportunistic` | nothing better to do | – | the schedule stream, for copies of others |
    | `verify_idle` | nothing runs | – | from the check level WARN on the host, for the device |

    ¹ For what it takes, and for states that it copies: a unit may have been another's a moment ago, so whatever may still touch it is
    waited for, as `CLEARANCE` says, by the stream that touches it next; and so for units that are moved to make room.

    With overlap forward N + 1 is prepared, launched and recorded before N is processed; then N is processed, advanced over, and what is
    over is released, while N + 1 runs:

        host      prepare, launch, record N + 1 │ processed, advance, release N │ prepare, launch, record N + 2 │ …
        forwards  … N ┤ N + 1 ……………………………………………………………………… ┤ N + 2 …

    No verb but `verify_idle` makes the host wait for the device. `retract_to_host` takes memory that the host pins for it, which takes
    its time where none is left from backups before, and may hold the device up; where there is none it raises `HostMemoryError`.

    Rows, counts and lengths are whole numbers of Python, NumPy or torch, and never rounded. A verb acts on all its rows at once. What it
    refuses is a value; misuse raises `StorageError`, a hook that was skipped `InvariantError`, both before anything has changed.
    """

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
        self.sized = sized
        self.device = device
        parts = StorageParts(
            sized,
            device,
            check_level=check_level,
            kernel_offset_bits=kernel_offset_bits,
            writes_whole_pages=writes_whole_pages,
            overcommit=overcommit,
            eviction_policy=eviction_policy,
        )
        self.routed_cache = parts.routed_cache
        """Layer → views, for the model's kernels."""
        self.chain = parts.chain
        """For statistics and questions; takes and frees go through the verbs."""
        self.requests = parts.requests
        """For questions; rows change through the verbs."""
        self.row_state = parts.row_state
        """What forwards know of each row and the host learns when they are processed; only the forward stream writes it."""
        self._steps, self._checks = parts.chain.steps, parts.checks
        self._row_resets, self._units, self._takes = parts.row_resets, parts.units, parts.takes
        self._admission, self._sharing, self._admitting = parts.admission, parts.sharing, parts.admitting
        self._launches, self._translator = parts.launches, parts.translator
        self._backups, self._copies = parts.backups, parts.copies
        self._forwards_in_flight = 2 if sized.policy.overlap else 1
        self._flushed_units = 0
        self._grid = sized.policy.grid_tokens(sized.plan)

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

    def arrival_refusal(
        self, prompt_tokens: SupportsIndex, output_tokens: SupportsIndex
    ) -> AdmissionRefusal | None:
        """Why a request of these lengths could never be admitted, however long it waited; `None` for one that could.

        The text names the most output that its prompt could have, and the longest prompt that could have its output. Raises
        `StorageError` for a length that is no positive whole number.
        """
        return self._admission.refuse_for_ever(
            whole_number("prompt_tokens", prompt_tokens), whole_number("output_tokens", output_tokens)
        )

    def max_new_tokens_for_memory(self, prompt_tokens: SupportsIndex) -> int:
        """The memory clip of an arriving request: most output tokens for which it could be admitted alone; 0 for none.

        Raises `StorageError` for a length that is no positive whole number.
        """
        return self._admission.most_output_tokens(whole_number("prompt_tokens", prompt_tokens))

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

        Raises `StorageError` for lengths that are no positive whole numbers, and for prompts or keys that do not go with them.
        """
        lengths, outputs = checked_lengths(prompt_tokens, output_tokens)
        self._steps.check_pages_may_change("an admission")
        self._end_copies_of_idle()
        tokens = checked_prompts(lengths, prompts, extra_keys)
        return self._admitting.admit(lengths, outputs, tokens, extra_keys, whole=whole)

    def next_chunk_tokens(self, row: SupportsIndex, most: SupportsIndex) -> int:
        """How many tokens of its prompt a row is to have in its next chunk, at most `most` and its chunk limit; 0 behind the prompt.

        A row that shares prefixes has its chunks cut where a checkpoint serves most: on the grid, and where its prompt parts from what
        is known. Where there is a grid, the chunks of other rows end on it too, but for a prompt's last; 0 where none of at most `most` does.

        Raises `StorageError` for a row that is not in use, and for a `most` that is no whole number of 0 or more.
        """
        row, most = whole_number("row", row), whole_number("most", most)
        self.requests.check_live(np.array([row]), "cut a chunk of")
        return next_chunk_tokens(self.requests, self._sharing, self._grid, row, most)

    def prepare_step(
        self, rows: npt.ArrayLike, counts: npt.ArrayLike
    ) -> PreparedStep | TakeRefusal | PromiseRefusal:
        """Hold pages for `counts[i]` more tokens of row `rows[i]`; the step of one forward over these rows.

        The forward of a row's last step may still run, where the policy overlaps: its tokens count as written. Refused, as errors, are
        rows that are not in use, have more steps open or one that is not recorded, or have lost their state (`abandon`), counts that are
        not positive or longer than a row's chunk limit, a chunk that ends off the grid of checkpoints within a prompt, several tokens at
        once past the prompt, and more tokens than a row was admitted for. Refused, as values, with nothing taken: a further share of
        output (`PromiseRefusal`, under `Overcommit` only); a take that fixed units or transfers are in the way of (`TakeRefusal`; a share
        that was promised for it stays promised).
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
        return self._launches.launch(step)

    def record_forward(self, step: PreparedStep, read_ends: SharedReadEnds | None = None) -> None:
        """Note that the step's forward has been queued: pages freed from now on wait for it.

        The write-after-read barrier stands here: whatever the schedule stream does next comes behind the read end that the forward's
        backends have declared, or behind the whole forward where one has not.
        """
        self._launches.record(step, read_ends)

    def forward_processed(self, step: PreparedStep) -> None:
        """Note that the host has seen the forward's completion; steps are processed in launch order.

        Raises `InvariantError` for a step out of order, and for a forward that has not completed: the host cannot have
        synchronised with it.
        """
        self._launches.processed(step)

    def abandon(self, step: PreparedStep, *, may_have_run: bool = False) -> None:
        """Give up a step that was not recorded: its tokens count as never prepared, and its rows give back what it took.

        So a row holds pages for the tokens of its open steps and no others, whatever is tried and given up: what windows bind behind a
        chunk depends on where it ends. Work that was queued for the step may still run: the schedule stream waits for the forward stream
        as it is now, so nothing moves or is zeroed under that work.

        Entries that such work has written of tokens are written again by the next try; a *state* that it has changed is gone, and so is
        the row state that it has advanced. Say `may_have_run` where either may be: the rows then have no further step, and are to be
        retracted or released; a retracted one starts again from its last checkpoint, or from nothing. One that was restored, and had no
        forward since, still has the backup that it came from, whole: `retract_to_host` gives it. Without `may_have_run` the caller answers
        for it that nothing but entries was written, and the step can be prepared again. Either way no state goes to others before another
        forward is recorded.
        """
        self._launches.abandon(step, may_have_run=may_have_run)

    def checkpoints_taken(self, rows: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Note that the latest checkpoint of row `rows[i]` lies at `lengths[i]` tokens: its windows keep what a hit there reads.

        Admission prices each checkpoint as taken by the time the forward that reaches it is advanced over, so call it before that
        `advance`. Rows whose hits are the tree's need no note, and one of them changes nothing: those that share prefixes, and those that
        did before they were restored. Raises `StorageError` without a policy that keeps checkpoints on a grid, and for a length that is off
        the grid, not reached by a forward, or before the one noted last.
        """
        rows, lengths = whole_numbers("rows", rows), whole_numbers("lengths", lengths)
        self.requests.check_live(rows, "note checkpoints of")
        checkpoints, sharing = self.requests.checkpoint_lengths[rows], self._sharing
        is_noted = checkpoints != NO_CHECKPOINT
        if sharing is not None:
            is_noted &= np.array([not sharing.shares(row) for row in rows.tolist()], np.bool_)
        check_checkpoints(
            self.requests, rows, lengths, self._grid, earliest=np.where(is_noted, checkpoints, 0)
        )
        self.requests.checkpoint_lengths[rows[is_noted]] = lengths[is_noted]

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
        self._row_resets.over(rows)
        self.requests.close(rows)

    def retract(self, rows: npt.ArrayLike) -> None:
        """Take the memory of running requests away, as `release` does, so that others go on; they are queued again.

        A retracted request is admitted anew with its prompt and what it has generated as the prompt, and with `whole`: it recomputes
        its entries, and is not retracted again. That this fits alone is promised under `Overcommit` only; elsewhere chunks of the longer
        prompt may need more than its output did (`arrival_refusal`), and what it was admitted for at first fits: its own prompt and all of
        its output, of which what is known is computed token by token. `retract_to_host` spares it both.
        """
        rows = whole_numbers("rows", rows)
        self.release(rows)
        self._admission.retracted(rows)
        log.info("storage.retracted", rows=rows.tolist())

    def retract_to_host(self, rows: npt.ArrayLike) -> tuple[RowBackup, ...]:
        """The same, and whatever the next tokens of the rows would read is copied to host memory first: a backup of each, to `restore`.

        A backup is of what holds behind the row's last recorded forward, whose result the host may yet have to process: `advance`
        leaves the row alone then, the token that it chose is the request's all the same. The copies run beside forwards and moves,
        behind what has been queued; nobody waits, and what the rows held may be handed out at once.

        Raises `StorageError` for a row with a step that is neither recorded nor abandoned, or whose state is lost (`abandon`) and is not
        that of a backup still to be brought back, and `HostMemoryError` where the host has no memory for it; the rows are then as they
        were, and can be retracted without a backup.
        """
        rows = whole_numbers("rows", rows)
        self.requests.check_live(rows, "back up")
        self._steps.check_pages_may_change("a backup")
        backups = self._backups.back_up(rows)
        self.retract(rows)
        return backups

    def restore(self, backups: Sequence[RowBackup]) -> IntArray | AdmissionRefusal:
        """Rows for retracted requests that go on where they were, all of them or a refusal: nothing is recomputed.

        Row `i` has `backups[i].written_tokens` tokens, in pages of its own, which it shares with nobody; its next forward finds what the
        last one has left, the token that it chose among it (`row_state`), and does not reset the row. All of its output is promised,
        so it is not retracted again. A refusal reads as one of `admit`, and leaves the backups as they are; so does an error. A
        backup may be restored before its copy has finished, and more than once: each row is a request of its own.

        Raises `StorageError` for a backup that another storage has made.
        """
        self._steps.check_pages_may_change("a restoring")
        self._end_copies_of_idle()
        return self._backups.restore(backups)

    def use_cache(self, cache: PrefixCache) -> None:
        """Have admission count what `cache` could evict, and takes evict it.

        Raises `StorageError` for a second cache, and while a request is in service: whether its promise can be kept has been asked
        without what the cache holds.
        """
        rows = self.requests.live_rows()
        if len(rows):
            raise StorageError(
                f"cannot use a prefix cache while rows {rows.tolist()} are in use: what they were promised was laid out without "
                "what it holds; give it before the first request"
            )
        self._takes.use(cache)

    def watch_sharing(self, observer: SharingObserver) -> None:
        """Tell `observer` of copied states and rehomed pages; raises `StorageError` where the policy shares no prefixes."""
        if self._sharing is None:
            raise StorageError("cannot watch prefixes that the policy does not share")
        self._sharing.watch(observer)

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
            launches=self._launches.count,
            aborted_launches=self._launches.aborted_count,
            flushed_units=self._flushed_units,
            admitted_at_peak=self.admitted_at_peak(),
            outstanding=self._by_band(self._admission.outstanding_units.tolist()),
            admission=self._admission.statistics(),
            backups=self._backups.statistics(),
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

    def _end_copies_of_idle(self) -> None:
        """With no request in service and no forward in flight, nothing else would end them, and they are waited for."""
        if not self._steps.in_flight_count and self.requests.free_count == self.sized.max_running_requests:
            self._copies.end_all()

    def _by_band(self, units: Sequence[int]) -> dict[str, int]:
        return {band.name: count for band, count in zip(self.layout.bands, units, strict=True)}
