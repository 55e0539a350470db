"""Schedules of what stands beside the table: gates, bytes grown over again, a move's sources, fenced bytes, pending pages (L2-L7, T4, T6).

Each runs twice on the modelled device, with the rule and without it: clean, and reported.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtide.device import UnitGrid
from kvtide.ledger import (
    Access,
    Consumer,
    FencedBytes,
    PageUsage,
    PendingPages,
    clearance,
    queue_stream_waits,
)

from .scene import (
    GRID,
    PAGE,
    SPARE,
    TARGET,
    Scene,
    backup_reads,
    forward_reads_what_a_move_left,
    ids,
    load_writes,
    receive_writes,
    send_reads,
    zeroing_writes,
)


@pytest.mark.requirement("L5", "L6")
@pytest.mark.parametrize("gate_is_taken", ["before the retirement", "after it"])
def test_ids_of_a_page_behind_a_forward_leave_behind_a_gate_taken_once_it_has_retired(
    gate_is_taken: str,
) -> None:
    """A forward retires as soon as the schedule stream is told to wait for it: a gate from before stands in front of that wait."""
    scene = Scene()
    forward_reads_what_a_move_left(scene)
    found = clearance(Consumer.NETWORK_RECEIVE, scene.usage, ids(PAGE))
    assert found.publish_after == 0
    device, stream = scene.device, scene.device.schedule_stream
    early = device.record_event(stream)
    event = scene.steps.recorded(0).event
    device.wait_event(stream, event)
    scene.steps.wait_queued(event)
    assert scene.steps.retired_through >= found.publish_after
    device.wait_on_host(early if gate_is_taken == "before the retirement" else device.record_event(stream))
    device.start_transfer("receive", writes=scene.spans(PAGE))
    assert (device.races == ()) == (gate_is_taken == "after it")


@pytest.mark.requirement("L4", "L5", "A5")
@pytest.mark.parametrize("taker", [Consumer.FORWARD, Consumer.HOST_LOAD, Consumer.NETWORK_RECEIVE])
@pytest.mark.parametrize("reader_is_kept", [True, False])
def test_zeroing_a_page_that_was_grown_over_without_a_wait_is_clean_only_while_its_reader_is_known(
    taker: Consumer, reader_is_kept: bool
) -> None:
    """The taker's own work never came: an aborted launch, a load given up, a request cancelled. The zero debt did."""
    scene = Scene()
    forward_reads_what_a_move_left(scene)
    scene.usage.fence(ids(PAGE))
    queue_stream_waits(
        clearance(taker, scene.usage, ids(PAGE)), scene.usage, scene.device, scene.device.schedule_stream
    )
    usage = scene.usage if reader_is_kept else PageUsage(scene.steps, 8)
    zeroing_writes(scene, PAGE, clearance(Consumer.ZERO, usage, ids(PAGE)))
    scene.device.run_all()
    assert (scene.device.races == ()) == reader_is_kept


# ── what a move waits for before it reads its sources ──


def forward_writes(scene: Scene) -> None:
    scene.forward(writes=(PAGE,))


def forward_writes_the_unknown(scene: Scene) -> None:
    scene.forward(writes=(PAGE,))
    scene.usage.record_forward_writes(scene.steps.newest_recorded, None)


@pytest.mark.requirement("L4", "L7")
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
@pytest.mark.parametrize(
    "schedule", [forward_writes, forward_writes_the_unknown, load_writes, receive_writes]
)
def test_a_move_out_of_pages_that_somebody_writes_is_clean_only_behind_its_writers(
    schedule: Callable[[Scene], None], waits: bool
) -> None:
    """A move reads its sources, which CLEARANCE, a table of writers, does not speak of."""
    scene = Scene()
    schedule(scene)
    schedule_stream = scene.device.schedule_stream
    writers = scene.usage.writers(ids(PAGE))
    assert (writers.forward is not None) + len(writers.copies) + len(writers.transfers) == 1
    if waits:
        scene.wait_for_transfers(writers.transfers)
        for event in [copy.finish for copy in writers.copies]:
            scene.device.wait_event(schedule_stream, event)
        if writers.forward is not None:
            scene.device.wait_event(schedule_stream, writers.forward.event)
            scene.steps.wait_queued(writers.forward.event)
    scene.device.copy_units(schedule_stream, GRID, ids(PAGE), ids(TARGET))
    scene.device.run_all()
    assert (scene.device.races == ()) == waits


@pytest.mark.requirement("L4")
@pytest.mark.parametrize("schedule", [forward_reads_what_a_move_left, backup_reads, send_reads])
@pytest.mark.parametrize("shared", [True, False], ids=["fences shared", "fences apart"])
def test_bytes_that_left_a_band_bind_whichever_band_writes_them_next(
    schedule: Callable[[Scene], None], shared: bool
) -> None:
    """A neighbour's page of another size, and another origin, overlaps what a forward, a backup or a send still reads."""
    scene = Scene()
    schedule(scene)
    scene.usage.fence(ids(PAGE))
    grid = UnitGrid(16, 80)
    fences = scene.usage.fences if shared else FencedBytes(scene.steps)
    neighbour = PageUsage(scene.steps, 6, name="window", grid=grid, fences=fences)
    pages = ids(1, 2)  # bytes [96, 256): the first ends where PAGE is not yet, the second overlaps it
    found = clearance(Consumer.ZERO, neighbour, pages)
    scene.wait_for_transfers(found.host_waits)
    queue_stream_waits(found, neighbour, scene.device, scene.device.schedule_stream)
    scene.device.zero_units(scene.device.schedule_stream, grid, pages)
    scene.device.run_all()
    assert (scene.device.races == ()) == shared
    assert found.free_to_go.tolist() == ([1] if shared else [1, 2])


@pytest.mark.requirement("T6", "L4", "L5")
@pytest.mark.parametrize("consumer", Consumer)
@pytest.mark.parametrize("whole", [True, False], ids=["pages and fences", "pages alone"])
def test_bytes_of_a_failed_transfer_that_left_its_band_are_in_quarantine_too(
    consumer: Consumer, whole: bool
) -> None:
    """The peer may still write them, and no wait ends that: a band that grew over them would be written under its owner."""
    scene = Scene()
    failed = scene.transfer(Access.WRITE, PAGE)
    scene.usage.record(failed, ids(PAGE))
    other = PageUsage(scene.steps, 8, name="window", grid=GRID, fences=scene.usage.fences)
    scene.usage.fence(ids(PAGE))
    if whole:
        scene.usage.quarantine(failed)
    else:
        scene.usage.fix("what is left of it", scene.usage.end(failed))
    scene.usage = other
    assert (scene.consume(consumer) == ()) == whole
    assert scene.written == [SPARE if whole else PAGE]


@pytest.mark.requirement("L2", "L3")
@pytest.mark.parametrize("how", ["settled", "processed", "neither"])
def test_a_page_freed_under_a_forward_is_clean_behind_its_settling_or_processing(how: str) -> None:
    """A freed page's batch carries what a vacated page's record does."""
    scene = Scene()
    scene.forward(reads=(PAGE,), writes=(SPARE,))
    pending = PendingPages()
    assert scene.steps.newest_recorded is not None
    pending.add(ids(PAGE, SPARE), scene.steps.newest_recorded)
    pages = ids(PAGE, SPARE)
    if how == "settled":
        pages, event = pending.settle(1)
        assert event is not None
        scene.device.wait_event(scene.device.schedule_stream, event)
    elif how == "processed":
        scene.process()
        pages = pending.release_through(0)
    scene.device.zero_units(scene.device.schedule_stream, GRID, pages)
    scene.device.run_all()
    assert (scene.device.races == ()) == (how != "neither")
