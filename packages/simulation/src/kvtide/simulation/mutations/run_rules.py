"""Rules of the simulation's own scheduler, of whoever copies and sends there, of its device, and of ranks that must act alike.

They are stand-ins: those that `kvtide.storage` ships (uploads, the barrier, read ends, orders of copies) are broken where they are shipped,
by `integration/tests/storage/test_storage_races.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvtide.chain import ChainAllocator, ChainError
from kvtide.device import IntArray, ModelledDevice, Stream
from kvtide.ledger import HostCopy, NetworkTransfer, RecordedForward
from kvtide.simulation import scheduler
from kvtide.simulation.mutations.mutation import (
    Mutation,
    Plant,
    Replacement,
    around,
    instead,
    nothing_during,
    without,
)
from kvtide.simulation.rank import Rank

_SCHEDULER = "kvtide.simulation.scheduler"
_RULES = "kvtide.simulation.use_rules"
_RANK = "kvtide.simulation.rank:Rank"
_ALLOCATOR = "kvtide.chain:ChainAllocator"
_DEVICE = "kvtide.device:ModelledDevice"


# ── launches ──


def _upload_without_waiting(rank: Rank) -> None:
    rank.device.upload(rank.device.schedule_stream)


def _upload_too_late(rank: Rank) -> None:
    """The forward stream waits for the schedule stream as it was before the upload."""
    device = rank.device
    before = device.record_event(device.schedule_stream)
    device.upload(device.schedule_stream)
    device.wait_event(device.forward_stream, before)


def _hold_back(*, behind_read_ends: bool) -> Replacement:
    """The barrier, of forwards that declare a read end or of the others alone."""
    barrier = scheduler.hold_back_uploads

    def hold_back(rank: Rank, recorded: RecordedForward, read_end: Any) -> None:
        if (read_end is not None) == behind_read_ends:
            barrier(rank, recorded, read_end)

    return hold_back


def _process_unseen(rank: Rank) -> None:
    """The ledger is told that the host has waited."""
    forward = rank.flying.pop(0)
    rank.steps.host_synchronised(forward.end)
    rank.steps.forward_processed(forward.record)
    rank.chain.forward_processed(forward.record.forward)


def _staging_returns_at_once(original: Replacement) -> Replacement:
    def upload(device: ModelledDevice, stream: Stream) -> Any:
        count = original(device, stream)
        device.return_staging()
        return count

    return upload


# ── uses ──


def _stand_behind(stream_name: str) -> Replacement:
    """A copy stream stands behind one of the two streams."""

    def stand_behind(rank: Rank, stream: Stream) -> None:
        device = rank.device
        other = getattr(device, f"{stream_name}_stream")
        device.wait_event(stream, device.record_event(other))

    return stand_behind


def _hand_over_with_a_gap(rank: Rank, use: Any, copy: HostCopy) -> None:
    rank.chain.uses.unfix(use.owners[rank.place])
    rank.chain.flush_opportunistic()
    rank.chain.uses.begin(copy, use.units)


def _waiter_returns_at_once(rank: Rank, transfers: Sequence[NetworkTransfer]) -> None:
    for transfer in transfers:
        del rank.transfers[transfer]
        rank.chain.uses.end(transfer)
        rank.waited.append(transfer)


def _rank_1_forgets_one(original: Replacement) -> Replacement:
    def wait(rank: Rank, transfers: Sequence[NetworkTransfer]) -> None:
        original(rank, transfers)
        if rank.place == 1:
            rank.waited.pop()

    return wait


# ── ranks and books ──


def _on_rank_1(name: str, replacement: Callable[..., Any]) -> Plant:
    """Another method of the allocator, on the second rank alone."""

    def make(create: Replacement) -> Replacement:
        def create_and_replace(rank: Rank, *args: Any) -> None:
            create(rank, *args)
            if rank.place == 1:
                setattr(rank.chain, name, replacement)

        return create_and_replace

    return around(f"{_RANK}.__init__", make)


def _counts_one_too_many(original: Replacement) -> Replacement:
    def free(chain: ChainAllocator, name: str, virtual: IntArray) -> None:
        original(chain, name, virtual)
        if len(virtual) > 1:
            chain._bands[name].live_count -= 1

    return free


def _errors_are_swallowed(original: Replacement) -> Replacement:
    def free(chain: ChainAllocator, name: str, virtual: IntArray) -> None:
        try:
            original(chain, name, virtual)
        except ChainError:
            return

    return free


def run_rules() -> Iterator[Mutation]:
    """See the module's docstring."""
    yield from _launches()
    yield from _uses()
    yield from _ranks()


def _launches() -> Iterator[Mutation]:
    yield Mutation(
        id="upload.made",
        rule="each launch follows an upload of every change",
        rows=("K4",),
        plant=without(f"{_DEVICE}.upload", answer=0),
    )
    yield Mutation(
        id="upload.waited",
        rule="the forward stream waits for the upload",
        rows=("K4",),
        plant=instead(f"{_SCHEDULER}:bring_up_to_date", _upload_without_waiting),
    )
    yield Mutation(
        id="upload.first",
        rule="what the forward stream waits for is recorded behind the upload",
        rows=("K4",),
        plant=instead(f"{_SCHEDULER}:bring_up_to_date", _upload_too_late),
    )
    yield Mutation(
        id="upload.rows",
        rule="rows are staged when they change",
        rows=("K1",),
        plant=without(f"{_SCHEDULER}:stage_row"),
    )
    yield Mutation(
        id="upload.staging",
        rule="a staging buffer is filled again only once its upload is over",
        rows=("K4",),
        plant=around(f"{_DEVICE}.upload", _staging_returns_at_once),
    )
    yield Mutation(
        id="barrier.read_end",
        rule="the schedule stream waits for a forward's declared read end",
        rows=("K4",),
        plant=instead(f"{_SCHEDULER}:hold_back_uploads", _hold_back(behind_read_ends=False)),
    )
    yield Mutation(
        id="barrier.whole",
        rule="where none is declared it waits for the whole forward",
        rows=("K4",),
        plant=instead(f"{_SCHEDULER}:hold_back_uploads", _hold_back(behind_read_ends=True)),
    )
    yield Mutation(
        id="launch.loads",
        rule="a forward waits for the loads that fill what it touches",
        rows=("H2",),
        plant=without(f"{_SCHEDULER}:wait_for_loads"),
    )
    yield Mutation(
        id="launch.abandoned",
        rule="the schedule stream waits for what was queued of a launch that is given up",
        rows=("K4",),
        plant=without(f"{_SCHEDULER}:wait_for_abandoned"),
    )
    yield Mutation(
        id="process.waited",
        rule="the host waits for a forward before it processes it",
        rows=("L1",),
        plant=instead(f"{_SCHEDULER}:process_oldest", _process_unseen),
    )
    yield Mutation(
        id="process.result",
        rule="a forward's result is copied behind the forward",
        rows=("L1",),
        plant=nothing_during(f"{_SCHEDULER}:copy_result", f"{_DEVICE}.wait_event"),
    )


def _uses() -> Iterator[Mutation]:
    yield Mutation(
        id="copy.behind_forwards",
        rule="a copy stream stands behind the forward stream",
        rows=("H1", "H2"),
        plant=instead(f"{_RULES}:stand_behind", _stand_behind("schedule")),
    )
    yield Mutation(
        id="copy.behind_schedule",
        rule="a copy stream stands behind the schedule stream",
        rows=("H1", "H2"),
        plant=instead(f"{_RULES}:stand_behind", _stand_behind("forward")),
    )
    yield Mutation(
        id="copy.loads",
        rule="a backup waits for loads that fill what it reads",
        rows=("H1",),
        plant=without(f"{_RULES}:follow_loads"),
    )
    yield Mutation(
        id="copy.over",
        rule="a use ends once it is over on every rank",
        rows=("H1", "T1"),
        plant=without(f"{_RULES}:is_over", answer=True),
    )
    yield Mutation(
        id="reservation.handed_over",
        rule="a reservation ends once the load's copy is recorded, with no moment in between",
        rows=("H2",),
        plant=instead(f"{_RULES}:hand_over", _hand_over_with_a_gap),
    )
    yield Mutation(
        id="gate.seen",
        rule="a transfer begins once every rank's host has seen its gate",
        rows=("T4",),
        plant=without(f"{_RULES}:passed_gates", answer=True),
    )
    yield Mutation(
        id="gate.place",
        rule="a gate stands on the schedule stream, behind the take's waits, zeroing and moves",
        rows=("T4",),
        plant=instead(f"{_RULES}:record_gate", lambda rank: rank.device.record_event(rank.results)),
    )
    yield Mutation(
        id="gate.epoch",
        rule="units that have moved since take a new gate",
        rows=("T4",),
        plant=without(f"{_RULES}:has_moved", answer=False),
    )
    yield Mutation(
        id="quarantine.over",
        rule="a quarantine ends once every host has seen that the engine is done",
        rows=("T6",),
        plant=without(f"{_RULES}:see_the_end"),
    )
    yield Mutation(
        id="relief.waited",
        rule="who is asked to wait for transfers returns once they are over",
        rows=("C10", "T1"),
        plant=instead(f"{_RANK}._wait_for_transfers", _waiter_returns_at_once),
    )


def _ranks() -> Iterator[Mutation]:
    yield Mutation(
        id="ranks.waited",
        rule="ranks wait for the same transfers in one round",
        rows=("C10",),
        plant=around(f"{_RANK}._wait_for_transfers", _rank_1_forgets_one),
    )
    yield Mutation(
        id="ranks.frees",
        rule="ranks make the same calls",
        rows=("C10",),
        plant=_on_rank_1("free_pages", lambda *_: None),
    )
    yield Mutation(
        id="books.frees",
        rule="a free unbinds",
        rows=("L2", "C1"),
        plant=without(f"{_ALLOCATOR}.free_pages"),
    )
    yield Mutation(
        id="books.counts",
        rule="every unit is counted once",
        rows=("C11",),
        plant=around(f"{_ALLOCATOR}.free_pages", _counts_one_too_many),
    )
    yield Mutation(
        id="books.errors",
        rule="what is not held is freed by nobody",
        rows=("C1",),
        plant=around(f"{_ALLOCATOR}.free_pages", _errors_are_swallowed),
    )
