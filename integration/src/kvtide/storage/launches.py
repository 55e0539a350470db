"""A step's way to the device and back: launched, recorded, processed, or given up (rows K2-K4, L1).

    launch     schedule stream: upload ──> forward stream waits, for host copies that fill pages too │ the caller queues the forward
    record     forward stream: event ──> schedule stream waits for the read end, or for all of it
    processed  the host has seen the event: what pended behind the forward returns
    abandon    schedule stream waits for what was queued; the rows give back what the step took

No step of that way makes the host wait.
"""

from __future__ import annotations

import numpy as np
import structlog

from kvtide.arena import TensorDevice
from kvtide.chain import ChainAllocator
from kvtide.ledger import ForwardSteps, LaunchRecord
from kvtide.storage.forward_ids import IdTranslator, UnresolvedIds
from kvtide.storage.host_copies import HostCopies
from kvtide.storage.prefix_sharing import PrefixSharing
from kvtide.storage.read_ends import SharedReadEnds
from kvtide.storage.requests import RequestTable, spread
from kvtide.storage.row_state import RowResets
from kvtide.storage.row_units import RowUnits
from kvtide.storage.steps import PreparedStep, StepState, check_launch

log = structlog.get_logger(__name__)


class Launches:
    """Moves the steps of one storage along, which alone calls it."""

    def __init__(
        self,
        device: TensorDevice,
        chain: ChainAllocator,
        requests: RequestTable,
        *,
        units: RowUnits,
        sharing: PrefixSharing | None,
        row_resets: RowResets,
        translator: IdTranslator,
        copies: HostCopies,
    ) -> None:
        """Nothing has been launched."""
        self._device = device
        self._chain = chain
        self._steps: ForwardSteps = chain.steps
        self._requests = requests
        self._units = units
        self._sharing = sharing
        self._row_resets = row_resets
        self._translator = translator
        self._copies = copies
        self.count = 0
        """Launches since the start."""
        self.aborted_count = 0
        """Those of them that were abandoned."""

    def launch(self, step: PreparedStep) -> UnresolvedIds:
        """See `KVStorage.launch_forward`."""
        step.check_state("launch", StepState.PREPARED)
        check_launch(self._requests, step)
        step.launch = self._steps.forward_launched()
        step.state = StepState.LAUNCHED
        step.beginnings = self._row_resets.take(step.rows)
        self.count += 1
        device, requests = self._device, self._requests
        device.upload(device.schedule_stream)
        device.wait_event(device.forward_stream, device.record_event(device.schedule_stream))
        self._copies.forward_launched(step.launch.forward)
        write_places, write_positions = spread(np.arange(len(step.rows)), step.starts, step.counts)
        return UnresolvedIds(
            rows=step.rows,
            page_columns=int(requests.page_counts[step.rows].max(initial=0)),
            write_places=write_places,
            write_positions=write_positions,
            state_slots=requests.state_slots[step.rows],
            reset_rows=step.beginnings.resets,
            reset_lengths=requests.cached_tokens[step.beginnings.resets],
            translator=self._translator,
        )

    def record(self, step: PreparedStep, read_ends: SharedReadEnds | None) -> None:
        """See `KVStorage.record_forward`."""
        record = self._launched(step, "record", StepState.LAUNCHED)
        device, before = self._device, self._steps.newest_recorded
        step.done_event = device.record_event(device.forward_stream)
        recorded = self._steps.forward_recorded(record, step.done_event)
        self._chain.forward_recorded(recorded, self._units.writes_of_step(step))
        if step.taken is not None:
            self._chain.written(step.taken)
        self._requests.recorded[step.rows] = step.starts + step.counts
        self._requests.state_in_doubt[step.rows] = False
        # Nothing can be given back any more, and a backup there is memory that the caller may have dropped.
        step.beginnings = None
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

    def processed(self, step: PreparedStep) -> None:
        """See `KVStorage.forward_processed`."""
        record = self._launched(step, "process", StepState.RECORDED)
        if step.done_event is not None and self._device.query_event(step.done_event):
            self._steps.host_synchronised(step.done_event)
        self._steps.forward_processed(record)
        self._chain.forward_processed(record.forward)
        self._copies.forward_processed(record.forward)
        step.state = StepState.PROCESSED

    def abandon(self, step: PreparedStep, *, may_have_run: bool) -> None:
        """See `KVStorage.abandon`."""
        step.check_state("abandon", StepState.PREPARED, StepState.LAUNCHED)
        requests = self._requests
        is_same = requests.is_same_request(step.rows, step.generations)
        rows, starts = step.rows[is_same], step.starts[is_same]
        if step.launch is None:
            self._steps.check_pages_may_change("an abandoned step")
        else:
            device = self._device
            device.wait_event(device.schedule_stream, device.record_event(device.forward_stream))
            self._steps.forward_aborted(step.launch)
            self.aborted_count += 1
            requests.state_in_doubt[rows] = True
            # Without a state band too: what has run may have advanced the row state.
            requests.state_is_lost[rows] |= may_have_run
            log.info("storage.launch_aborted", rows=step.rows.tolist(), may_have_run=may_have_run)
        if step.beginnings is not None:
            self._row_resets.give_back(step.beginnings)
        self._units.give_back(rows, starts)
        if step.taken is not None:
            self._chain.pay_zero_debt(step.taken)
        requests.prepared[rows] = starts
        requests.open_steps[rows] -= 1
        step.state = StepState.ABANDONED

    @staticmethod
    def _launched(step: PreparedStep, action: str, state: StepState) -> LaunchRecord:
        step.check_state(action, state)
        assert step.launch is not None, "a launched step has its record"
        return step.launch
