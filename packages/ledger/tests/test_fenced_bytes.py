"""Bytes outside every span: whoever ends them, in whichever band, and whoever grows over them (L4, T6)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtide.device import ImmediateEvent, ImmediateStream, IntArray, UnitGrid
from kvtide.ledger import (
    Access,
    Consumer,
    Fence,
    FencedBytes,
    ForwardSteps,
    Hazard,
    HostCopy,
    LaunchRecord,
    NetworkTransfer,
    PageUsage,
    choose_holes,
    clearance,
)

STREAM = ImmediateStream("any")
SEND = NetworkTransfer("request 41 → decode 2", Access.READ)
FAILED = NetworkTransfer("prefill 1 → request 42", Access.WRITE)
BACKUP = HostCopy("backup of node 7", Access.READ, ImmediateEvent(STREAM))


def ids(*pages: int) -> IntArray:
    return np.array(pages, np.int64)


def two_bands() -> tuple[ForwardSteps, PageUsage, PageUsage]:
    """Pages of 32 bytes, and a neighbour's of 64 over the same bytes."""
    steps = ForwardSteps()
    fences = FencedBytes(steps)
    full = PageUsage(steps, 16, name="full", grid=UnitGrid(0, 32), fences=fences)
    return steps, full, PageUsage(steps, 8, name="window", grid=UnitGrid(0, 64), fences=fences)


@pytest.mark.requirement("T6", "L4")
@pytest.mark.parametrize("fenced", [[], [7], [6, 7]])
def test_quarantine_takes_the_pages_of_a_failed_transfer_and_what_it_left_behind_alike(
    fenced: list[int],
) -> None:
    """Its engine may write at any time: nobody waits for it, and nobody gets a byte of it, in whichever band."""
    _, full, window = two_bands()
    full.record(FAILED, ids(6, 7))
    full.fence(ids(*fenced))
    kept = [page for page in (6, 7) if page not in fenced]
    assert full.quarantine(FAILED).tolist() == kept
    assert full.fixed_pages().tolist() == kept
    assert full.transfer_pages().tolist() == []
    assert FAILED not in full
    for consumer in Consumer:
        found = clearance(consumer, full, ids(5, 6, 7))
        assert (found.excluded.tolist(), found.host_waits) == ([6, 7], ())
        found = clearance(consumer, window, ids(2, 3))
        assert (found.excluded.tolist(), found.host_waits) == ([3] if fenced else [], ())
    assert choose_holes(Consumer.ZERO, window, ids(3, 2), 2).pages.tolist() == ([2] if fenced else [3, 2])
    assert full.unfix(FAILED).tolist() == kept
    assert full.is_clear
    assert window.is_clear


@pytest.mark.requirement("L4", "T1", "T6")
@pytest.mark.parametrize(
    ("how", "signal"),
    [
        ("ended", BACKUP),
        ("ended", SEND),
        ("put in quarantine", SEND),
        ("proved over after a quarantine", SEND),
    ],
)
def test_a_band_ends_its_own_fences_and_no_other_band_s(signal: NetworkTransfer | HostCopy, how: str) -> None:
    """A transfer reads pages of several bands, and is over in each in its own turn; between the two its bytes are still read."""
    _, full, window = two_bands()
    full.record(signal, ids(0, 1))
    window.record(signal, ids(6, 7))
    window.fence(ids(7))
    full.fence(ids(1))
    before = clearance(Consumer.ZERO, full, ids(14, 15))
    assert before.stream_waits + before.host_waits
    if how == "ended":
        full.end(signal)
    else:
        full.quarantine(signal)
        if how == "proved over after a quarantine":
            full.unfix(signal)
    assert signal in window
    after = clearance(Consumer.ZERO, full, ids(14, 15))
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [True] * 5
    assert window.end(signal).tolist() == [6]
    assert clearance(Consumer.ZERO, full, ids(14, 15)).free_to_go.tolist() == [14, 15]


@pytest.mark.requirement("L4")
def test_what_left_the_band_is_no_page_of_it_and_its_extents_are_offered_instead() -> None:
    """A plan lays out around both: pages that may not be passed within the span, bytes that nothing should grow over."""
    steps, full, window = two_bands()
    full.record(SEND, ids(3, 4, 8))
    full.record(FAILED, ids(11))
    full.record(BACKUP, ids(3, 9))
    full.fence(ids(8, 9, 10, 11))
    full.quarantine(FAILED)
    assert full.transfer_pages().tolist() == [3, 4]
    extents = [array.tolist() for array in full.fences.extents(Hazard.NETWORK)]
    assert extents == [[8 * 32], [9 * 32]]
    extents = [array.tolist() for array in window.fences.extents(Hazard.NETWORK, Hazard.FIXED)]
    assert extents == [[8 * 32, 11 * 32], [9 * 32, 12 * 32]]
    window.record(NetworkTransfer("another", Access.READ), ids(4))
    again = NetworkTransfer("again", Access.READ)
    full.record(again, ids(8))
    assert full.transfer_pages().tolist() == [3, 4, 8], (
        "a page that the band has grown over again is one of it again"
    )
    assert full.end(SEND).tolist() == [3, 4]
    assert clearance(Consumer.ZERO, full, ids(3, 8, 9)).host_waits == (again,)
    assert steps.retired_through == -1


@pytest.mark.requirement("C8")
@pytest.mark.parametrize("reader", ["forward", "send", "quarantine", "backup"])
def test_a_choice_passes_by_fenced_bytes_that_a_forward_a_send_or_a_quarantine_binds(reader: str) -> None:
    """With nothing else open in the band that chooses, its neighbour's fence alone must be seen, and a backup's must not."""
    steps, full, window = two_bands()
    if reader == "forward":
        recorded = steps.forward_recorded(steps.forward_launched(), ImmediateEvent(STREAM))
        full.record_forward_writes(recorded, ids())
        full.vacate(ids(7))
    else:
        full.record({"send": SEND, "quarantine": FAILED, "backup": BACKUP}[reader], ids(7))
    full.fence(ids(7))
    if reader == "quarantine":
        full.quarantine(FAILED)
    choice = choose_holes(Consumer.ZERO, window, ids(3, 2), 2)
    expected = {"forward": [2, 3], "send": [2, 3], "quarantine": [2], "backup": [3, 2]}[reader]
    assert choice.pages.tolist() == expected
    assert window.steers_choice == (reader != "backup")
    if reader == "forward":
        steps.wait_queued(steps.recorded(0).event)
        assert not window.steers_choice
        assert choose_holes(Consumer.ZERO, window, ids(3, 2), 2).pages.tolist() == [3, 2]


@pytest.mark.requirement("L4")
@pytest.mark.parametrize("seed", range(8))
def test_hundreds_of_fences_that_come_and_go_answer_as_a_list_would(seed: int) -> None:
    """Past the first size of every array, and through the turns in which what is over is swept out."""
    draw = random.Random(seed)
    steps = ForwardSteps()
    fences = FencedBytes(steps)
    grid = UnitGrid(48, 80)
    model: list[Fence] = []
    launched: list[int] = []
    for turn in range(600):
        if turn % 10 == 0:
            launched.append(steps.forward_recorded(steps.forward_launched(), ImmediateEvent(STREAM)).forward)
        if len(launched) > 3:
            oldest = launched.pop(0)
            steps.host_synchronised(steps.recorded(oldest).event)
            steps.forward_processed(LaunchRecord(oldest))
            model = [fence for fence in model if fence.signal or fence.forward > oldest]
        firsts = np.sort(np.array(draw.sample(range(100), draw.randint(1, 4)), np.int64)) * 64
        signal = draw.choice(
            [None, HostCopy("c", Access.READ, BACKUP.finish), NetworkTransfer("t", Access.READ)]
        )
        fence = Fence(
            signal.hazard if signal else Hazard.FORWARD,
            signal,
            -1 if signal else draw.choice(launched),
            draw.randrange(2),
            firsts,
            firsts + draw.choice([32, 64]),
        )
        fences.add(fence)
        model.append(fence)
        ended = draw.choice(model)
        if ended.signal is not None and (turn < 250 or turn > 400):
            fences.end(1 - ended.band, ended.signal)
            fences.end(ended.band, ended.signal)
            model.remove(ended)
        assert fences.fences() == tuple(model)
        assert len(fences) == len(model)
        pages = np.array(draw.sample(range(-1, 90), 7), np.int64)
        met = fences.meet(grid, pages)
        expected = sorted(
            (place, fence.hazard)
            for place, page in enumerate(pages.tolist())
            for fence in model
            for first, end in zip(fence.first_bytes.tolist(), fence.end_bytes.tolist(), strict=True)
            if first < 48 + (page + 1) * 80 and end > 48 + page * 80
        )
        assert sorted(zip(met.places.tolist(), met.kinds.tolist(), strict=True)) == expected
    assert len(fences._kinds) < 2048, "what is over is swept out"
