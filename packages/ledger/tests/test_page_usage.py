"""Uses of pages one by one: what opens and ends each, what a move leaves behind, and what is refused (L4, L7, T1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvtide.device import ImmediateEvent, ImmediateStream, IntArray, UnitGrid
from kvtide.ledger import (
    Access,
    Consumer,
    FencedBytes,
    ForwardSteps,
    Hazard,
    HostCopy,
    InvariantError,
    LaunchRecord,
    NetworkTransfer,
    PageUsage,
    ReceiveHold,
    Reservation,
    choose_holes,
    clearance,
)

STREAM = ImmediateStream("any")
BACKUP = HostCopy("backup of node 7", Access.READ, ImmediateEvent(STREAM))
LOAD = HostCopy("load of node 8", Access.WRITE, ImmediateEvent(STREAM))
SEND = NetworkTransfer("request 41 → decode 2", Access.READ)
RECEIVE = NetworkTransfer("prefill 1 → request 42", Access.WRITE)


def ids(*pages: int) -> IntArray:
    return np.array(pages, np.int64)


def band() -> tuple[ForwardSteps, PageUsage]:
    steps = ForwardSteps()
    return steps, PageUsage(steps, 16, name="window-128")


def launch(steps: ForwardSteps, usage: PageUsage, writes: IntArray | None) -> int:
    recorded = steps.forward_recorded(steps.forward_launched(), ImmediateEvent(STREAM))
    usage.record_forward_writes(recorded, writes)
    return recorded.forward


def process(steps: ForwardSteps) -> None:
    newest = steps.newest_recorded
    assert newest is not None
    steps.host_synchronised(newest.event)
    steps.forward_processed(LaunchRecord(newest.forward))


@pytest.mark.requirement("L4", "T1")
def test_each_use_is_open_until_its_own_signal_ends() -> None:
    """Uses of one page nest in any order; the page is free to go once the last is over."""
    _, usage = band()
    for signal in (BACKUP, SEND, LOAD):
        usage.record(signal, ids(3, 4))
    assert usage.signals() == (BACKUP, SEND, LOAD)
    assert usage.transfer_pages().tolist() == [3, 4]
    assert usage.end(SEND).tolist() == [3, 4]
    found = clearance(Consumer.ZERO, usage, ids(4, 5))
    assert (found.stream_waits, found.host_waits) == ((BACKUP.finish, LOAD.finish), ())
    assert SEND not in usage
    assert BACKUP in usage
    usage.end(BACKUP)
    usage.end(LOAD)
    assert clearance(Consumer.ZERO, usage, ids(4, 5)).free_to_go.tolist() == [4, 5]
    assert usage.is_clear


@pytest.mark.requirement("L4", "L5")
def test_a_move_does_not_wait_for_a_backup_and_its_source_is_reused_only_behind_it() -> None:
    """The backup reads on, whatever moves; the fenced hole's next writer waits on its stream."""
    _, usage = band()
    usage.record(BACKUP, ids(3))
    writers = usage.writers(ids(3))
    assert (writers.forward, writers.copies, writers.transfers) == (None, (), ())
    assert not usage.stopping(ids(3)).any()
    assert usage.vacate(ids(3)).tolist() == [3], "a hole at once"
    assert clearance(Consumer.ZERO, usage, ids(3)).stream_waits == (BACKUP.finish,)
    assert clearance(Consumer.FORWARD, usage, ids(3)).stream_waits == (BACKUP.finish,)
    usage.end(BACKUP)
    assert usage.is_clear


@pytest.mark.requirement("L4", "L5")
def test_a_load_s_pages_are_bound_from_the_take_to_the_end_of_the_copy_without_a_gap() -> None:
    """First nobody may have them, then whoever writes them waits; the record opens before the reservation ends."""
    _, usage = band()
    reservation = Reservation("load of node 8")
    usage.fix(reservation, ids(3))
    assert clearance(Consumer.ZERO, usage, ids(3)).excluded.tolist() == [3]
    usage.record(LOAD, ids(3))
    assert clearance(Consumer.ZERO, usage, ids(3)).excluded.tolist() == [3]
    assert usage.unfix(reservation).tolist() == [3]
    assert clearance(Consumer.ZERO, usage, ids(3)).stream_waits == (LOAD.finish,)


@pytest.mark.requirement("L4")
def test_a_page_stays_fixed_until_its_last_owner_lets_go() -> None:
    """A relief plans around a page that a load has reserved; ending one promise must not end the other."""
    _, usage = band()
    reservation = Reservation("load")
    usage.fix(reservation, ids(3, 4))
    usage.fix("relief", ids(4, 5))
    usage.fix("relief", ids(4, 6))
    assert usage.fixed_pages().tolist() == [3, 4, 5, 6]
    assert sorted(usage.unfix("relief").tolist()) == [4, 4, 5, 6]
    assert usage.fixed_pages().tolist() == [3, 4]
    usage.unfix(reservation)
    assert usage.fixed_pages().tolist() == []
    assert usage.is_clear


@pytest.mark.requirement("L4")
def test_a_hold_stops_moves_made_for_gain_and_binds_nobody_else() -> None:
    """The next writer is the peer itself, who waits for nothing of its own."""
    _, usage = band()
    hold = ReceiveHold("request 42")
    usage.hold(hold, ids(3, 4))
    assert usage.has_holds
    assert usage.stopping(ids(2, 3)).tolist() == [False, True]
    assert usage.is_clear
    assert usage.release_hold(hold).tolist() == [3, 4]
    assert not usage.has_holds


@pytest.mark.requirement("L4", "T4")
def test_a_hold_follows_a_move_that_is_made_all_the_same() -> None:
    """Relief may move a held page for want of another layout: what the peer will write must be held where it is now."""
    _, usage = band()
    first, second = ReceiveHold("request 42"), ReceiveHold("request 43")
    usage.hold(first, ids(3, 4))
    usage.hold(first, ids(9))
    usage.hold(second, ids(4, 7))
    invariant, text = broken(lambda: usage.vacate(ids(2, 3)))
    assert invariant == "usage.hold_follows_move"
    assert "pages [3] of band 'window-128' move, held by" in text
    assert "2 sources to no targets" in text
    assert broken(lambda: usage.vacate(ids(2, 3), ids(1)))[0] == "usage.hold_follows_move"
    assert broken(lambda: usage.vacate(ids(2, 3), ids(1, 16)))[0] == "usage.page_in_band"
    assert broken(lambda: usage.vacate(ids(2, 3), ids(1, 1)))[0] == "usage.page_named_once"
    assert usage.held_pages().tolist() == [3, 4, 7, 9]
    # A block that shifts by one: page 3 goes where 4 was, in the same move.
    assert usage.vacate(ids(4, 2, 3), ids(5, 3, 4)).tolist() == [4, 2, 3]
    assert usage.held_pages().tolist() == [4, 5, 7, 9]
    assert usage.stopping(ids(3, 4, 5)).tolist() == [False, True, True]
    assert usage.release_hold(first).tolist() == [4, 5, 9]
    assert usage.stopping(ids(4, 5, 7, 9)).tolist() == [False, True, True, False]
    assert usage.release_hold(second).tolist() == [5, 7]


@pytest.mark.requirement("L4", "L8")
def test_pages_that_a_load_has_reserved_are_told_from_others_that_are_fixed() -> None:
    """An owner may free a page that a relief plans around, and never one that a load will fill."""
    _, usage = band()
    reservation = Reservation("load of node 8")
    usage.record(RECEIVE, ids(5, 6))
    usage.fix("relief", ids(3, 4))
    usage.fix(reservation, ids(4, 7))
    usage.quarantine(RECEIVE)
    assert usage.reserved(ids(3, 4, 5, 6, 7)).tolist() == [False, True, False, False, True]
    usage.unfix("relief")
    assert usage.reserved(ids(3, 4, 7)).tolist() == [False, True, True]
    usage.unfix(reservation)
    assert usage.reserved(ids(3, 4, 7)).tolist() == [False, False, False]
    assert broken(lambda: usage.reserved(ids(-1)))[0] == "usage.page_in_band"


@pytest.mark.requirement("L4", "L6")
def test_vacated_pages_come_back_when_their_forward_retires_and_their_sends_are_over() -> None:
    """Either may be last. Pages of a later move wait for the later forward."""
    steps, usage = band()
    usage.record(SEND, ids(2))
    first = launch(steps, usage, ids(9))
    assert usage.vacate(ids(1, 2)).tolist() == []
    launch(steps, usage, ids(9))
    assert usage.vacate(ids(3)).tolist() == []
    steps.wait_queued(steps.recorded(first).event)
    assert usage.take_ready_vacated().tolist() == [1]
    assert usage.vacated_pages().tolist() == [3, 2]
    usage.end(SEND)
    assert usage.take_ready_vacated().tolist() == [2]
    steps.wait_queued(steps.recorded(first + 1).event)
    assert usage.take_ready_vacated().tolist() == [3]
    assert usage.take_ready_vacated().tolist() == []


@pytest.mark.requirement("L7")
def test_unknown_writes_stop_every_move_for_gain_until_the_forward_retires() -> None:
    """A speculative forward's slots are chosen on the device; an urgent move waits for it whatever it moves."""
    steps, usage = band()
    launch(steps, usage, ids(3))
    assert usage.stopping(ids(2, 3)).tolist() == [False, True]
    speculative = launch(steps, usage, None)
    assert usage.stopping(ids(2, 3)).tolist() == [True, True]
    writers = usage.writers(ids(2))
    assert writers.forward == steps.recorded(speculative)
    steps.wait_queued(writers.forward.event)
    assert usage.writers(ids(2, 3)).forward is None
    assert usage.stopping(ids(2, 3)).tolist() == [False, False]


@pytest.mark.requirement("L4", "L6")
def test_what_is_moved_once_the_forward_in_flight_has_retired_is_a_hole_at_once() -> None:
    """It is unprocessed and may still run, and whatever the schedule stream writes from now on comes behind it."""
    steps, usage = band()
    forward = launch(steps, usage, ids(9))
    steps.wait_queued(steps.recorded(forward).event)
    assert steps.newest_recorded is not None
    assert usage.vacate(ids(1, 2)).tolist() == [1, 2]
    assert usage.vacated_pages().tolist() == []
    assert usage.is_clear


@pytest.mark.requirement("L7")
def test_without_overlap_nothing_is_recorded_and_a_moved_page_is_a_hole_at_once() -> None:
    """The forward is processed before the next allocation, so nobody can still read what is moved or freed."""
    steps, usage = band()
    assert steps.newest_recorded is None
    assert usage.vacate(ids(1, 2)).tolist() == [1, 2]
    assert usage.is_clear
    usage.check_idle()


@pytest.mark.requirement("L4")
def test_fenced_bytes_outlive_the_page_until_their_reader_is_over() -> None:
    """The band has given the bytes back; the forward, the backup and the send have not."""
    steps = ForwardSteps()
    fences = FencedBytes(steps)
    usage = PageUsage(steps, 16, grid=UnitGrid(0, 32), fences=fences)
    usage.record(BACKUP, ids(5, 6, 9))
    usage.record(SEND, ids(6))
    launch(steps, usage, ids(0))
    usage.vacate(ids(7, 8))
    usage.fence(ids(5, 6, 7, 8, 9, 10))
    found = {(f.hazard, tuple(f.first_bytes.tolist()), tuple(f.end_bytes.tolist())) for f in fences.fences()}
    assert found == {
        (Hazard.FORWARD, (224,), (288,)),
        (Hazard.COPY_READ, (160, 288), (224, 320)),
        (Hazard.NETWORK, (192,), (224,)),
    }
    assert usage.vacated_pages().tolist() == []
    process(steps)
    assert {fence.hazard for fence in fences.fences()} == {Hazard.COPY_READ, Hazard.NETWORK}
    usage.end(SEND)
    usage.end(BACKUP)
    assert len(fences) == 0


def broken(action: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(InvariantError) as caught:
        action()
    return caught.value.invariant, str(caught.value)


@pytest.mark.requirement("L4", "L8")
@pytest.mark.parametrize(
    ("invariant", "slip", "says"),
    [
        ("usage.page_in_band", lambda u: u.record(LOAD, ids(3, 16)), "pages from 3 to 16, band 'window-128' holds [0, 16)"),
        ("usage.page_in_band", lambda u: u.fix("relief", ids(-1)), "pages from -1 to -1"),
        ("usage.page_named_once", lambda u: u.record(LOAD, ids(3, 5, 3)), "'load of node 8' names pages [3]"),
        ("usage.page_named_once", lambda u: u.vacate(ids(3, 5, 3)), "'a move' names pages [3]"),
        ("usage.page_named_once", lambda u: u.fence(ids(14, 2, 14)), "'a retreat' names pages [14]"),
        ("usage.page_in_band", lambda u: u.fence(ids(-2)), "'a retreat' names pages from -2 to -2"),
        ("usage.page_in_band", lambda u: u.fence(ids(16)), "'a retreat' names pages from 16 to 16"),
        ("usage.page_in_band", lambda u: u.vacate(ids(-1)), "'a move' names pages from -1 to -1"),
        ("usage.page_in_band", lambda u: u.writers(ids(16)), "'a move' names pages from 16 to 16"),
        ("usage.page_in_band", lambda u: u.stopping(ids(-1, 3)), "'a move' names pages from -1 to 3"),
        ("usage.page_in_band", lambda u: u.hold(ReceiveHold("r"), ids(-1)), "'r' names pages from -1 to -1"),
        ("usage.page_in_band", lambda u: u.hazards_on(ids(-1)), "'a question' names pages from -1 to -1"),
        ("usage.page_in_band", lambda u: clearance(Consumer.ZERO, u, ids(-1)), "'a question' names pages from -1"),
        ("usage.page_in_band", lambda u: choose_holes(Consumer.ZERO, u, ids(3, 16), 1), "'a question' names"),
        ("usage.one_record_a_use", lambda u: u.record(BACKUP, ids(3)), "'backup of node 7' has a use of band"),
        ("usage.ended_once", lambda u: u.end(LOAD), "'load of node 8' has no use of band 'window-128' to end"),
        ("usage.claim_released_once", lambda u: u.unfix("nobody"), "'nobody' fixes no page"),
        ("usage.claim_released_once", lambda u: u.release_hold(ReceiveHold("r")), "holds no page"),
        ("usage.fixed_page_stays", lambda u: u.vacate(ids(3, 11)), "pages [11] of band 'window-128' move, fixed by"),
        ("usage.fixed_page_stays", lambda u: u.fence(ids(11)), "pages [11] of band 'window-128' leave the band"),
        ("usage.quarantined_whole", lambda u: u.fix(RECEIVE, ids(12)), "'prefill 1 → request 42' fixes pages of band"),
        ("usage.ended_once", lambda u: u.quarantine(SEND), "'request 41 → decode 2' has no use of band"),
        ("usage.move_follows_writers", lambda u: u.vacate(ids(13)), "forward 0 or transfers [] may still write"),
        ("usage.move_follows_writers", lambda u: u.vacate(ids(12)), "transfers ['prefill 1 → request 42']"),
        ("usage.vacated_once", lambda u: u.vacate(ids(1, 14)), "pages [14] of band 'window-128' are vacated already"),
        ("usage.idle_has_no_use", lambda u: u.check_idle(), "'backup of node 7' uses pages of band 'window-128'"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_its_figures_and_changes_nothing(
    invariant: str, slip: Callable[[PageUsage], object], says: str
) -> None:
    """Each is our bug or the engine's; going on would hand out bytes that somebody still uses."""
    steps, usage = band()
    launch(steps, usage, ids(13))
    usage.vacate(ids(14))
    usage.record(BACKUP, ids(10))
    usage.record(RECEIVE, ids(12))
    usage.fix("relief", ids(11))
    everything = np.arange(16)
    before = (
        usage.open_uses(),
        usage.signals(),
        usage.vacated_pages().tolist(),
        usage.fixed_pages().tolist(),
    )
    carried = [clearance(consumer, usage, everything) for consumer in Consumer]
    found, text = broken(lambda: slip(usage))
    assert found == invariant
    assert says in text
    assert "(likely cause: " in text
    after = (usage.open_uses(), usage.signals(), usage.vacated_pages().tolist(), usage.fixed_pages().tolist())
    assert after == before
    for consumer, old in zip(Consumer, carried, strict=True):
        new = clearance(consumer, usage, everything)
        assert [np.array_equal(a, b) for a, b in zip(old, new, strict=True)] == [True] * 5


@pytest.mark.requirement("L4", "L8")
@pytest.mark.parametrize("page", [-1, 16])
def test_a_question_about_a_page_of_no_band_is_refused_where_nothing_is_open_too(page: int) -> None:
    """−1 would answer for the last page, whatever that one carries."""
    _, usage = band()
    for slip in (
        lambda: clearance(Consumer.ZERO, usage, ids(3, page)),
        lambda: choose_holes(Consumer.ZERO, usage, ids(page), 1),
    ):
        invariant, text = broken(slip)
        assert invariant == "usage.page_in_band"
        assert "'a question' names pages from " in text


@pytest.mark.requirement("L4", "L8")
@pytest.mark.parametrize("padded", [ids(3, -1), ids(3, 16)])
@pytest.mark.parametrize("ask", ["writers", "stopping", "vacate"])
def test_a_write_set_that_names_no_page_of_the_band_is_named_by_the_first_move_that_asks(
    padded: IntArray, ask: str
) -> None:
    """A padded state row's −1 would stop moves of the last page, and a page of another band raise where nobody expects it."""
    steps, usage = band()
    launch(steps, usage, ids(2))
    launch(steps, usage, padded)
    launch(steps, usage, ids(4))
    invariant, text = broken(lambda: getattr(usage, ask)(ids(4, 15)))
    assert invariant == "usage.page_in_band"
    assert "'what forward 1 writes' names pages from" in text
    steps.wait_queued(steps.recorded(1).event)
    assert usage.stopping(ids(2, 4, 15)).tolist() == [False, True, False]
    assert usage.writers(ids(15)).forward is None


@pytest.mark.requirement("L1")
def test_no_page_moves_between_a_launch_and_its_recording() -> None:
    """The forward reads its tables by then, and has no event that the source could wait for."""
    steps, usage = band()
    steps.forward_launched()
    assert broken(lambda: usage.vacate(ids(1)))[0] == "forward.record_before_pages"


@pytest.mark.requirement("L4")
def test_a_vacated_page_that_left_the_span_and_was_vacated_again_comes_back_once() -> None:
    """Its first record must not linger: it would return the page while the second reader still reads."""
    steps, usage = band()
    first = launch(steps, usage, ids(9))
    usage.vacate(ids(1, 2))
    usage.fence(ids(1))
    launch(steps, usage, ids(9))
    usage.vacate(ids(1))
    steps.wait_queued(steps.recorded(first).event)
    assert usage.take_ready_vacated().tolist() == [2]
    assert usage.vacated_pages().tolist() == [1]


@pytest.mark.requirement("L4")
def test_the_index_grows_and_reuses_its_entries() -> None:
    """Past its first size, in several steps, and back: nothing is lost and nothing is answered for another's page."""
    usage = PageUsage(ForwardSteps(), 40_000)
    copies = [HostCopy(f"{n}", Access.READ, ImmediateEvent(STREAM)) for n in range(200)]
    for turn in range(3):
        for place, copy in enumerate(copies):
            usage.record(copy, np.arange(place * 150, place * 150 + 300 + turn))
        found = clearance(Consumer.ZERO, usage, np.arange(40_000))
        assert found.free_to_go.tolist() == list(range(199 * 150 + 300 + turn, 40_000))
        at = clearance(Consumer.ZERO, usage, ids(1000))
        expected = [copy.finish for place, copy in enumerate(copies) if 0 <= 1000 - place * 150 < 300 + turn]
        assert set(at.stream_waits) == set(expected)
        for copy in copies[::2] + copies[1::2]:
            usage.end(copy)
        assert usage.is_clear
    assert len(usage._uses._free_uses) == len(copies), "a number that was given back is used again"
