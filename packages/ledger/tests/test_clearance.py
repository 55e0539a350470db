"""The table as it prints, and what is made of its answers (L5, L6, C8, D5)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtide.device import ImmediateEvent, ImmediateStream, IntArray, ModelledDevice
from kvtide.ledger import (
    CLEARANCE,
    Access,
    Clear,
    Consumer,
    ForwardSteps,
    HostCopy,
    NetworkTransfer,
    PageUsage,
    choose_holes,
    clearance,
    format_clearance,
    queue_stream_waits,
)

STREAM = ImmediateStream("any")

PRINTED = """\
| consumer | `FORWARD` | `COPY_READ`, `COPY_WRITE` | `NETWORK` | `FIXED` |
| - | - | - | - | - |
| `FORWARD`: the next forward | none: forward stream order | stream wait | host wait | excluded |
| `SCHEDULE_COPY`: a move or a state copy | stream wait | stream wait | host wait | excluded |
| `ZERO`: zeroing on hand-out | stream wait | stream wait | host wait | excluded |
| `HOST_LOAD`: a load from host memory | none: its stream has waited for the forward and schedule streams | stream wait | host wait | excluded |
| `NETWORK_RECEIVE`: a peer's write | after retire: ids leave behind a gate, only after the forward | stream wait | host wait | excluded |
"""


def ids(*pages: int) -> IntArray:
    return np.array(pages, np.int64)


@pytest.mark.requirement("L5")
def test_the_table_prints_one_row_a_consumer() -> None:
    """The page of the design that this project builds can be laid beside it."""
    assert format_clearance() == PRINTED
    readme = Path(__file__).resolve().parents[1] / "README.md"
    assert PRINTED in readme.read_text(encoding="utf-8")


@pytest.mark.requirement("L5")
def test_a_cell_that_differs_within_a_shared_column_is_not_hidden() -> None:
    """COPY_READ and COPY_WRITE print as one column because they agree; a table where they do not must say so."""
    row = {
        **CLEARANCE[Consumer.ZERO],
        min(CLEARANCE[Consumer.ZERO], key=lambda h: h.name != "COPY_READ"): Clear.NONE,
    }
    assert "| none, stream wait |" in format_clearance({**CLEARANCE, Consumer.ZERO: row})


def vacated_band() -> tuple[ForwardSteps, PageUsage]:
    """Pages 0 to 9: 1 vacated under forward 0, 2 under forward 1, 3 sent, 4 backed up, 5 fixed, the rest clear."""
    steps = ForwardSteps()
    usage = PageUsage(steps, 10)
    for page in (1, 2):
        recorded = steps.forward_recorded(steps.forward_launched(), ImmediateEvent(STREAM))
        usage.record_forward_writes(recorded, ids(0))
        usage.vacate(ids(page))
    usage.record(NetworkTransfer("send", Access.READ), ids(3))
    usage.record(HostCopy("backup", Access.READ, ImmediateEvent(STREAM)), ids(4))
    usage.fix("reservation", ids(5))
    return steps, usage


@pytest.mark.requirement("C8")
@pytest.mark.parametrize(
    ("consumer", "chosen", "clear", "after_forward"),
    [
        (Consumer.ZERO, [9, 4, 0, 2, 1, 3], 3, 2),
        (Consumer.NETWORK_RECEIVE, [9, 4, 0, 2, 1, 3], 3, 2),
        (Consumer.FORWARD, [9, 4, 2, 1, 0, 3], 5, 0),
        (Consumer.HOST_LOAD, [9, 4, 2, 1, 0, 3], 5, 0),
    ],
)
def test_holes_that_wait_for_no_forward_come_first_and_fixed_ones_not_at_all(
    consumer: Consumer, chosen: list[int], clear: int, after_forward: int
) -> None:
    """Within a group the band's own order stands. A backup plays no part: its end is not the same on every rank."""
    _, usage = vacated_band()
    choice = choose_holes(consumer, usage, ids(9, 5, 4, 3, 2, 1, 0), 7)
    assert choice.pages.tolist() == chosen
    assert (choice.clear_count, choice.after_forward_count) == (clear, after_forward)
    assert choose_holes(consumer, usage, ids(3, 9), 1).pages.tolist() == [9]


@pytest.mark.requirement("C8")
def test_a_choice_among_pages_that_only_host_copies_use_is_the_band_s_own_order() -> None:
    """With a thousand backups open it must not cost more than with none."""
    usage = PageUsage(ForwardSteps(), 10)
    usage.record(HostCopy("backup", Access.READ, ImmediateEvent(STREAM)), ids(3, 4))
    assert not usage.steers_choice
    usage.fence(ids(4))
    assert not usage.steers_choice
    choice = choose_holes(Consumer.ZERO, usage, ids(4, 3, 2), 2)
    assert (choice.pages.tolist(), choice.clear_count) == ([4, 3], 2)
    assert len(clearance(Consumer.ZERO, usage, choice.pages).stream_waits) == 1


@pytest.mark.requirement("C8", "L6")
def test_the_choice_follows_retirement_and_clearance_is_read_after_it() -> None:
    """A page behind a forward that has retired is as good as any; what the chosen pages must clear is theirs alone."""
    steps, usage = vacated_band()
    assert choose_holes(Consumer.ZERO, usage, ids(1, 2, 0), 3).pages.tolist() == [0, 1, 2]
    steps.wait_queued(steps.recorded(0).event)
    assert choose_holes(Consumer.ZERO, usage, ids(1, 2, 0), 3).pages.tolist() == [1, 0, 2]
    assert clearance(Consumer.ZERO, usage, ids(1, 0)).stream_waits == ()
    assert clearance(Consumer.ZERO, usage, ids(2)).stream_waits == (steps.recorded(1).event,)


@pytest.mark.requirement("L5")
def test_of_several_forwards_the_newest_is_waited_for_and_of_one_event_one_wait_is_queued() -> None:
    """Forwards run in order on one stream, so its event covers the rest; two copies may share a finish event."""
    steps, usage = vacated_band()
    event = ImmediateEvent(STREAM)
    usage.record(HostCopy("one", Access.READ, event), ids(1, 2))
    usage.record(HostCopy("two", Access.WRITE, event), ids(2, 6))
    found = clearance(Consumer.ZERO, usage, ids(0, 1, 2, 6))
    assert found.free_to_go.tolist() == [0]
    assert found.stream_waits == (event, steps.recorded(1).event)
    received = clearance(Consumer.NETWORK_RECEIVE, usage, ids(1))
    assert received.stream_waits == (event,)
    assert received.publish_after == 0


@pytest.mark.requirement("L5")
def test_what_only_an_excluded_page_carries_binds_nobody() -> None:
    """It is not written, so its transfer need not be waited for, least of all on the host."""
    _, usage = vacated_band()
    usage.fix("relief", ids(3, 1))
    found = clearance(Consumer.ZERO, usage, ids(0, 1, 3, 4))
    assert found.excluded.tolist() == [1, 3]
    assert found.host_waits == ()
    assert len(found.stream_waits) == 1
    assert found.free_to_go.tolist() == [0]


@pytest.mark.requirement("L4", "L5")
def test_a_transfer_that_a_page_and_a_fence_both_name_is_waited_for_once() -> None:
    """A band that grows back over what it gave away meets the same send twice; the host waits for it, and ends it, once."""
    usage = PageUsage(ForwardSteps(), 10)
    send = NetworkTransfer("send", Access.READ)
    usage.record(send, ids(8, 9))
    usage.fence(ids(9))
    usage.fence(ids(8))
    found = clearance(Consumer.ZERO, usage, ids(7, 8, 9))
    assert found.host_waits == (send,)
    assert found.free_to_go.tolist() == [7]


@pytest.mark.requirement("L6")
def test_a_wait_on_another_stream_retires_no_forward() -> None:
    """What the schedule stream writes is not behind it."""
    device = ModelledDevice(160)
    steps = ForwardSteps()
    usage = PageUsage(steps, 10)
    device.submit(device.forward_stream, "forward 0")
    recorded = steps.forward_recorded(steps.forward_launched(), device.record_event(device.forward_stream))
    usage.record_forward_writes(recorded, ids())
    usage.vacate(ids(1))
    found = clearance(Consumer.ZERO, usage, ids(1))
    assert queue_stream_waits(found, usage, device, device.create_stream("side")) == 1
    assert steps.retired_through == -1
    assert queue_stream_waits(found, usage, device, device.schedule_stream) == 1
    assert steps.retired_through == 0
    assert usage.take_ready_vacated().tolist() == [1]


@pytest.mark.requirement("L6")
def test_a_wait_for_an_event_that_has_been_reached_is_not_queued_and_retires_its_forward_all_the_same() -> (
    None
):
    """It would cost the device a wait for nothing; what is decided must not depend on it (D5)."""
    device = ModelledDevice(160)
    steps = ForwardSteps()
    usage = PageUsage(steps, 10)
    device.submit(device.forward_stream, "forward 0")
    steps.forward_recorded(steps.forward_launched(), device.record_event(device.forward_stream))
    usage.vacate(ids(1))
    copies = device.create_stream("copies")
    device.submit(copies, "backup")
    reached = HostCopy("reached", Access.READ, device.record_event(copies))
    device.run_all()
    device.submit(copies, "backup")
    usage.record(reached, ids(2))
    usage.record(HostCopy("not reached", Access.READ, device.record_event(copies)), ids(3))
    found = clearance(Consumer.ZERO, usage, ids(1, 2, 3))
    assert len(found.stream_waits) == 3
    assert queue_stream_waits(found, usage, device, device.schedule_stream) == 1
    assert steps.retired_through == 0


@pytest.mark.requirement("C8")
@pytest.mark.parametrize("page_count", [1, 40, 199, 300, 1000])
def test_the_band_s_order_stands_within_each_group_however_many_holes_there_are(page_count: int) -> None:
    """Sorting may keep the order of a few by luck, and holes are looked at in parts: neither shows in what is chosen."""
    steps = ForwardSteps()
    usage = PageUsage(steps, 2000)
    order = np.random.default_rng(3).permutation(1200)
    behind, sent, fixed, backed_up = order[:300], order[300:500], order[500:700], order[700:900]
    recorded = steps.forward_recorded(steps.forward_launched(), ImmediateEvent(STREAM))
    usage.record_forward_writes(recorded, ids())
    usage.vacate(behind)
    usage.record(NetworkTransfer("send", Access.READ), sent)
    usage.fix("relief", fixed)
    usage.record(HostCopy("backup", Access.READ, ImmediateEvent(STREAM)), backed_up)
    holes = np.random.default_rng(4).permutation(1200)
    groups = [
        [p for p in holes.tolist() if p in pages] for pages in (set(order[700:]), set(behind), set(sent))
    ]
    choice = choose_holes(Consumer.ZERO, usage, holes, page_count)
    assert choice.pages.tolist() == [page for group in groups for page in group][:page_count]
    assert choice.clear_count == min(page_count, 500)
    assert choice.after_forward_count == min(page_count - choice.clear_count, 300)
