"""`KVStorage`: everything a hybrid model's requests keep on the device, behind a few verbs over rows (rows K1-K3, K11).

| verb | when | refuses | waits for |
| - | - | - | - |
| `admit` | requests arrive | peaks that do not pack beside what is promised | nothing |
| `prepare_step` | before a forward | a take that no layout holds (never after an admission) | nothing on the host |
| `launch_forward` | the forward is about to be queued | – | the schedule stream waits the forward before |
| `record_forward` | it has been queued | – | nothing |
| `abandon` | it will not be queued after all | – | nothing |
| `forward_processed` | its result has been looked at | – | nothing |
| `advance` | its tokens count as written | – | nothing |
| `release` | a request is over | – | nothing |

Rows are int64 arrays; every verb acts on all of them at once, or raises before it changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvtide.arena import CPUDevice, RoutedKVCache
from kvtide.chain import ChainAllocator, TakeRefusal
from kvtide.device import IntArray
from kvtide.ledger import ForwardSteps, InvariantError, LaunchRecord
from kvtide.plan import ArenaLayout, KVStoragePlan, SubPool
from kvtide.sizing import SizedPlan, mirror_lengths
from kvtide.storage.admission import Admission, AdmissionRefusal
from kvtide.storage.errors import StorageError
from kvtide.storage.forward_ids import ForwardIds, IdTranslator
from kvtide.storage.requests import RequestTable, ranges
from kvtide.storage.supported import check_supported


@attrs.define(eq=False)
class PreparedStep:
    """One forward's rows and tokens, from `prepare_step` to `forward_processed`."""

    rows: IntArray
    """Rows of the forward."""

    counts: IntArray
    """New tokens of each row."""

    starts: IntArray
    """Tokens each row had before."""

    launch: LaunchRecord | None = None
    """Set by `launch_forward`."""


class KVStorage:
    """See the module's docstring. Built by `kvtide.storage.build_kv_storage`."""

    def __init__(self, sized: SizedPlan, device: CPUDevice) -> None:
        """Empty, over the arena of `device`; raises `StorageError` for a plan that it cannot run."""
        check_supported(sized.plan)
        self.sized = sized
        self.device = device
        self.routed_cache = RoutedKVCache(device.arena, sized.layout)
        """Layer → views, for the model's kernels."""
        mirrors = device.create_mirrors(
            mirror_lengths(
                sized.layout,
                max_running_requests=sized.max_running_requests,
                pages_per_row=sized.pages_per_row,
            )
        )
        self._steps = ForwardSteps()
        self.chain = ChainAllocator(sized.layout, device, mirrors, self._steps)
        """For statistics and questions; takes and frees go through the verbs."""
        self.requests = RequestTable(sized.max_running_requests, sized.pages_per_row, mirrors["rows"])
        """For questions; rows change through the verbs."""
        self._admission = Admission(sized)
        self._translator = IdTranslator(
            device.tables, {band.name: band.page_tokens for band in sized.layout.bands}, sized.pages_per_row
        )
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

    def admit(
        self, prompt_tokens: Sequence[int], output_tokens: Sequence[int]
    ) -> IntArray | AdmissionRefusal:
        """Rows for requests of these lengths, all of them or a refusal; each gets its state slot, zero-filled.

        Whatever is admitted can run to its end: no later take of it is refused. Raises `StorageError` for a length that is no
        positive integer.
        """
        demands = [
            self._admission.demand(int(prompt), int(output))
            for prompt, output in zip(prompt_tokens, output_tokens, strict=True)
        ]
        prompts = np.asarray(prompt_tokens, np.int64)
        limits = prompts + np.asarray(output_tokens, np.int64) - 1
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
        self._admission.promise(rows, demands)
        return rows

    def prepare_step(self, rows: npt.ArrayLike, counts: npt.ArrayLike) -> PreparedStep | TakeRefusal:
        """Hold pages for `counts[i]` more tokens of row `rows[i]`, zeroed; the step of one forward over these rows.

        Raises `StorageError` for rows that are not in use or whose last step was not advanced over, counts that are not
        positive or longer than a chunk, several tokens at once past the prompt, and more tokens than a row was admitted for.
        """
        rows, counts = _int_array(rows), _int_array(counts)
        self._check_step(rows, counts)
        starts = self.requests.lengths[rows]
        ends = starts + counts
        new_pages = np.maximum(0, -(-ends // self.plan.page_tokens) - self.requests.page_counts[rows])
        if self.plan.owner is not None and new_pages.any():
            taken = self.chain.take(pages=int(new_pages.sum()))
            if isinstance(taken, TakeRefusal):
                return taken
            self.requests.append(rows, new_pages, taken.pages)
        self.requests.prepared[rows] = ends
        return PreparedStep(rows, counts, starts)

    def launch_forward(self, step: PreparedStep) -> ForwardIds:
        """Bring the mirrors up to date and translate the step's ids; queue the forward next, then `record_forward`.

        The upload waits for the newest forward in flight, which may still read the mirrors; the forward stream waits for the
        upload. No page is freed, taken or moved until the forward is recorded.
        """
        if step.launch is not None:
            raise StorageError(f"the step is launched already, as forward {step.launch.forward}")
        device = self.device
        newest = self._steps.newest_recorded
        if newest is not None:
            device.wait_event(device.schedule_stream, newest.event)
        step.launch = self._steps.forward_launched()
        device.upload(device.schedule_stream)
        device.wait_event(device.forward_stream, device.record_event(device.schedule_stream))
        write_rows = np.repeat(step.rows, step.counts)
        write_positions = np.repeat(step.starts, step.counts) + ranges(step.counts)
        return self._translator.translate(
            torch.from_numpy(step.rows),
            torch.from_numpy(self.requests.page_counts[step.rows]),
            torch.from_numpy(write_rows),
            torch.from_numpy(write_positions),
            torch.from_numpy(self.requests.state_slots[step.rows]),
        )

    def record_forward(self, step: PreparedStep) -> None:
        """Note that the step's forward has been queued: pages freed from now on wait for it."""
        self._steps.forward_recorded(_launched(step), self.device.record_event(self.device.forward_stream))

    def forward_processed(self, step: PreparedStep) -> None:
        """Note that the host has seen the forward's completion; steps are processed in launch order."""
        record = _launched(step)
        self._steps.forward_processed(record)
        self.chain.forward_processed(record.forward)

    def abandon(self, step: PreparedStep) -> None:
        """Give up a step that was not recorded: its tokens count as never prepared. Pages stay with their rows until used."""
        if step.launch is not None:
            self._steps.forward_aborted(step.launch)
        self.requests.prepared[step.rows] = step.starts

    def advance(self, rows: npt.ArrayLike, counts: npt.ArrayLike) -> None:
        """Count `counts[i]` prepared tokens of row `rows[i]` as written, and retire window pages that fell behind.

        Call it when the forward that wrote them is processed. The next token at position n reads a window of W from n - W + 1
        on, an attention chunk from its own start; pages wholly before that are freed. Raises `StorageError` for more tokens than were prepared.
        """
        rows, counts = _int_array(rows), _int_array(counts)
        self.requests.check_live(rows, "advance")
        if rows.shape != counts.shape:
            raise StorageError(f"cannot advance {len(rows)} rows by {len(counts)} counts")
        lengths = self.requests.lengths[rows] + counts
        wrong = rows[(counts < 0) | (lengths > self.requests.prepared[rows])]
        if len(wrong):
            raise StorageError(f"cannot advance rows {wrong.tolist()}: past the tokens that steps prepared")
        self.requests.lengths[rows] = lengths
        for pool in self._release_order():
            if pool.window_tokens is not None:
                first_read = np.maximum(0, lengths - pool.window_tokens + 1)
                self._free_before(pool.name, rows, first_read // self.plan.page_tokens)
            elif pool.chunk_tokens is not None:
                self._free_before(
                    pool.name, rows, (lengths - lengths % pool.chunk_tokens) // self.plan.page_tokens
                )

    def release(self, rows: npt.ArrayLike) -> None:
        """Return everything the rows hold, and the rows; pages that a forward in flight may touch pend until it is over."""
        rows = _int_array(rows)
        self.requests.check_live(rows, "release")
        for pool in self._release_order():
            self._free_before(pool.name, rows, self.requests.page_counts[rows])
            self._first_held[pool.name][rows] = 0
        if self.plan.state_sub_pool is not None:
            self.chain.free_state_slots(self.requests.state_slots[rows])
        self._admission.release(rows)
        self.requests.close(rows)

    # ── questions ──

    def verify_idle(self) -> None:
        """Raise `InvariantError` if anything is held though no row is in use (K11); checks byte accounting always."""
        self.chain.verify_byte_accounting()
        held = {band.name: band.live_units for band in self.chain.statistics().bands if band.live_units}
        if held and not len(self.requests.live_rows()):
            raise InvariantError(
                "storage.leak", f"no row is in use and {held} units are held", "a release was skipped"
            )

    # ── helpers ──

    def _check_step(self, rows: IntArray, counts: IntArray) -> None:
        self.requests.check_live(rows, "prepare a step of")
        if rows.shape != counts.shape or not len(rows):
            raise StorageError(
                f"a step needs one count a row and a row at least, found {len(rows)} and {len(counts)}"
            )
        waiting = rows[self.requests.prepared[rows] > self.requests.lengths[rows]]
        if len(waiting):
            raise StorageError(
                f"cannot prepare a step of rows {waiting.tolist()}: their last step was neither advanced over nor abandoned"
            )
        wrong = rows[(counts <= 0) | (counts > self.sized.chunk_tokens)]
        if len(wrong):
            raise StorageError(
                f"cannot prepare a step of rows {wrong.tolist()}: counts must lie between 1 and the chunk of "
                f"{self.sized.chunk_tokens} tokens"
            )
        ends = self.requests.lengths[rows] + counts
        several = rows[(counts > 1) & (ends > self.requests.prompts[rows])]
        if len(several):
            raise StorageError(
                f"cannot prepare a step of rows {several.tolist()}: several tokens at once past the prompt; admission priced "
                "one a step there"
            )
        over = rows[ends > self.requests.limits[rows]]
        if len(over):
            raise StorageError(
                f"cannot prepare a step of rows {over.tolist()}: more tokens than they were admitted for "
                f"({self.requests.limits[over].tolist()})"
            )

    def _release_order(self) -> list[SubPool]:
        """Attention sub-pools, the owner last: a virtual page returns with it."""
        return sorted(self.plan.token_sub_pools, key=lambda pool: pool is self.plan.owner)

    def _free_before(self, band_name: str, rows: IntArray, page_ends: IntArray) -> None:
        """Free the rows' pages that one band still holds before `page_ends`."""
        first = self._first_held[band_name][rows]
        ends = np.maximum(first, page_ends)
        virtual = self.requests.held(rows, first, ends)
        if len(virtual):
            self.chain.free_pages(band_name, virtual)
            self._first_held[band_name][rows] = ends
            if band_name == self.layout.owner:
                self.requests.forget(rows, first, ends)


def _launched(step: PreparedStep) -> LaunchRecord:
    if step.launch is None:
        raise StorageError("the step was not launched: call launch_forward first")
    return step.launch


def _int_array(values: npt.ArrayLike) -> IntArray:
    return np.atleast_1d(np.asarray(values, np.int64))


def _broken_promise(refusal: TakeRefusal) -> InvariantError:
    return InvariantError(
        "storage.admission_guarantee",
        f"an admitted request was refused: {refusal}",
        "a demand was priced too low",
    )
