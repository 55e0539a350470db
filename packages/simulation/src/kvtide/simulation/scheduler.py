"""The rules of a scheduler that overlaps forwards, as stand-ins for those that `kvtide.storage` ships (row K4).

The simulation stands below that package and draws without it; its own rules are broken on purpose in its tests
(`integration/tests/storage/test_storage_races.py`). These stand here and nowhere else, so that each can be broken, too:

| rule | broken, it shows as |
| - | - |
| `bring_up_to_date` before each launch: upload, and the forward stream waits for it | stale_mirror, unordered_overlap |
| `hold_back_uploads` after each launch: the barrier | unordered_overlap |
| `wait_for_loads` before a launch that touches what a load writes | unordered_overlap |
| `copy_result` behind the forward whose completion it is | unordered_overlap |
| `wait_for_abandoned` after a launch that is given up with work queued | unordered_overlap |
| `stage_row` whenever a row's pages change | stale_mirror |
| `process_oldest` after a host wait, and never before | InvariantError of the ledger |

Each acts on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvtide.device import IntArray, ModelledEvent
from kvtide.ledger import LaunchRecord, RecordedForward
from kvtide.simulation.forward import ForwardWork, submit_body, submit_metadata
from kvtide.simulation.rank import FlyingForward, Rank


def launch(
    rank: Rank,
    record: LaunchRecord,
    work: ForwardWork,
    writes: Mapping[str, IntArray | None],
    *,
    declares_read_end: bool,
    has_completion: bool,
) -> None:
    """Queue a launched forward, record it, and hold back what must not overtake it.

    `writes` is what the ledger is told, None for unknown. The host waits for nothing.
    """
    device, name = rank.device, f"forward {record.forward}"
    bring_up_to_date(rank)
    physical = submit_metadata(rank, work, name)
    read_end = device.record_event(device.forward_stream) if declares_read_end else None
    end = submit_body(rank, work, physical, name)
    recorded = rank.steps.forward_recorded(record, end)
    rank.chain.forward_recorded(recorded, writes)
    if has_completion:
        end = copy_result(rank, end, name)
        rank.steps.completion_recorded(record, end)
    hold_back_uploads(rank, recorded, read_end)
    rank.flying.append(FlyingForward(record, end))


def abort(rank: Rank, record: LaunchRecord, queued: ForwardWork | None) -> None:
    """Give a launched forward up, of which the metadata phase was queued if `queued` says so."""
    bring_up_to_date(rank)
    if queued is not None:
        submit_metadata(rank, queued, f"aborted forward {record.forward}")
        wait_for_abandoned(rank)
    rank.steps.forward_aborted(record)


def bring_up_to_date(rank: Rank) -> None:
    """Upload every change since the last launch; the forward stream waits for it."""
    device = rank.device
    device.upload(device.schedule_stream)
    device.wait_event(device.forward_stream, device.record_event(device.schedule_stream))


def wait_for_loads(rank: Rank, ends: Sequence[ModelledEvent]) -> None:
    """The forward stream waits for the copies that fill what the next forward touches."""
    for end in ends:
        rank.device.wait_event(rank.device.forward_stream, end)


def copy_result(rank: Rank, end: ModelledEvent, name: str) -> ModelledEvent:
    """Copy a forward's result on a stream of its own, behind the forward; the event behind the copy."""
    rank.device.wait_event(rank.results, end)
    rank.device.submit(rank.results, f"result of {name}")
    return rank.device.record_event(rank.results)


def hold_back_uploads(rank: Rank, recorded: RecordedForward, read_end: ModelledEvent | None) -> None:
    """The write-after-read barrier: the schedule stream waits for the forward's read end, or for all of it."""
    if read_end is not None:
        rank.device.wait_event(rank.device.schedule_stream, read_end)
    else:
        rank.device.wait_event(rank.device.schedule_stream, recorded.event)
        rank.steps.wait_queued(recorded.event)


def wait_for_abandoned(rank: Rank) -> None:
    """A launch is given up after work was queued for it: nothing may be zeroed, moved or uploaded under that work."""
    device = rank.device
    device.wait_event(device.schedule_stream, device.record_event(device.forward_stream))


def process_oldest(rank: Rank) -> None:
    """The host waits for the oldest forward in flight and looks at its result; pages that waited for it return."""
    forward = rank.flying.pop(0)
    rank.device.wait_on_host(forward.end)
    rank.steps.host_synchronised(forward.end)
    rank.steps.forward_processed(forward.record)
    with rank.device.no_host_waits("forward_processed"):
        rank.chain.forward_processed(forward.record.forward)


def stage_row(rank: Rank, row: int, first_column: int, pages: IntArray) -> None:
    """Row `row` holds `pages` from `first_column` on, from the next upload."""
    first = row * rank.column_count + first_column
    rank.rows.stage(np.arange(first, first + len(pages)), pages)
