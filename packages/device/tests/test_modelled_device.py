"""What the modelled device promises whoever tests a scheduler on it (V1, V2), one behaviour a test."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from kvtide.device import (
    Device,
    HostMayNotWaitError,
    ImmediateEvent,
    ImmediateStream,
    IntArray,
    ModelledDevice,
    RunningWork,
    UndeclaredAccessError,
    UnitGrid,
    UnorderedAccessError,
)

WINDOW = UnitGrid(origin_bytes=16, unit_bytes=64)
FULL = UnitGrid(origin_bytes=32, unit_bytes=48)
NAMES = {WINDOW: "window-128", FULL: "full"}


def ids(*values: int) -> IntArray:
    return np.array(values, np.int64)


def name_units(grid: UnitGrid, first: int, end: int) -> str:
    return f"band {NAMES[grid]!r} pages [{first}, {end})"


def device_of(**options: object) -> ModelledDevice:
    return ModelledDevice(1024, name_units=name_units, **options)  # type: ignore[arg-type]


@pytest.mark.requirement("V1", "V2")
def test_the_modelled_device_implements_the_whole_seam() -> None:
    """The allocator that ships runs on it unchanged."""
    device: Device = ModelledDevice(16)
    for name, member in vars(Device).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            assert not callable(getattr(device, name))
        else:
            wanted = [parameter for parameter in inspect.signature(member).parameters if parameter != "self"]
            assert list(inspect.signature(getattr(device, name)).parameters) == wanted, name
    first, second = (device.record_event(device.schedule_stream) for _ in range(2))
    assert first != second
    assert first.stream.name == "schedule"


# --- reports ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("V2")
def test_a_report_names_both_sides_and_the_bytes_in_each_sides_own_terms() -> None:
    """Pages change hands between bands: who found the race and who suffers it call the same bytes by different names."""
    device = device_of()
    forward = device.unit_spans(FULL, ids(5, 6, 7, 8))
    device.submit(device.forward_stream, "forward 12", reads=forward, writes=forward[:0])
    with pytest.raises(UnorderedAccessError) as caught:
        device.copy_units(device.schedule_stream, WINDOW, ids(10, 11, 12), ids(4, 5, 6))
    assert str(caught.value) == (
        "move of band 'window-128' pages [4, 7) writes bytes [272, 464) of the arena unordered with forward 12 "
        "reading band 'full' pages [5, 9)"
    )
    assert caught.value.races == device.races


@pytest.mark.requirement("V2")
def test_reports_of_plain_bytes_mirrors_and_staging_say_what_they_are() -> None:
    """Mirrors bring hazards of their own (D1): an upload against a running metadata phase, a staging buffer reused early."""
    device = ModelledDevice(64, raise_races=False)
    mirror = device.create_mirrors({"rows": 4, "ids:full": 8})["ids:full"]
    device.submit(device.forward_stream, "metadata 1", reads=[device.mirror_span("ids:full")])
    mirror.stage(ids(2, 3, 6), ids(7, 8, 9))
    device.upload(device.schedule_stream)
    pool = device.create_buffer("host pool", 32)
    copy = device.create_stream("copy")
    device.copy_spans(copy, "backup", [device.arena_buffer.span(0, 32)], [pool.span()])
    device.write_on_host(pool.span(8, 16), 0)
    device.zero_units(device.schedule_stream, UnitGrid(0, 16), ids(1))
    assert [str(race) for race in device.races] == [
        "upload 0 of mirror 'ids:full' entries [2, 4) writes bytes [24, 32) of the mirrors unordered with metadata 1 reading mirror 'ids:full' entries [2, 4)",
        "upload 0 of mirror 'ids:full' entries [6, 7) writes bytes [40, 44) of the mirrors unordered with metadata 1 reading mirror 'ids:full' entries [6, 7)",
        "the host writes bytes [8, 16) of host pool unordered with backup writing them",
        "zeroing of units [1, 2) of 16 bytes writes bytes [16, 32) of the arena unordered with backup reading them",
    ]


@pytest.mark.requirement("V2")
def test_one_race_is_one_report_however_the_bytes_were_cut_before() -> None:
    """Other accesses cut the bytes into segments; a report says what the two sides share, once."""
    device = device_of(raise_races=False)
    device.submit(device.forward_stream, "forward 1", reads=[device.arena_buffer.span(16, 48)])
    device.submit(device.forward_stream, "forward 2", reads=[device.arena_buffer.span(0, 64)])
    device.submit(device.schedule_stream, "move", writes=[device.arena_buffer.span(0, 80)])
    assert sorted((race.first.actor, race.start_byte, race.end_byte) for race in device.races) == [
        ("forward 1", 16, 48),
        ("forward 2", 0, 64),
    ]


@pytest.mark.requirement("V2")
def test_a_race_is_raised_by_the_call_that_makes_it_and_the_work_is_queued_all_the_same() -> None:
    """The traceback shows the line that lacks a wait; a test that catches it can go on."""
    device = device_of()
    device.zero_units(device.schedule_stream, WINDOW, ids(1))
    with pytest.raises(UnorderedAccessError, match=r"zeroing of band 'window-128' pages \[1, 2\) writes"):
        device.zero_units(device.forward_stream, WINDOW, ids(1))
    device.zero_units(device.forward_stream, WINDOW, ids(2))
    assert device.run_next(device.forward_stream)
    assert not device.units(WINDOW)[1].any()
    assert device.units(WINDOW)[2].all()
    assert len(device.races) == 1


@pytest.mark.requirement("V2")
def test_nothing_is_reported_of_a_sink() -> None:
    """Padded rows of every forward write page 0 and no result depends on it."""
    device = device_of()
    device.allow_unordered(device.arena_buffer.span(16, 80))
    for stream in (device.schedule_stream, device.forward_stream):
        device.submit(stream, stream.name, writes=device.unit_spans(WINDOW, ids(0)))
    pages = device.unit_spans(WINDOW, ids(0, 1))
    device.submit(device.schedule_stream, "move", writes=pages)
    with pytest.raises(UnorderedAccessError, match=r"bytes \[80, 144\) of the arena"):
        device.submit(device.forward_stream, "forward", writes=pages)


# --- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("V2")
def test_work_runs_when_told_and_a_missing_wait_computes_wrong_bytes() -> None:
    """A race that is only reported could be argued away; the wrong bytes cannot."""
    device = device_of(raise_races=False)
    page = device.unit_spans(WINDOW, ids(1))[0]
    device.submit(device.forward_stream, "forward 0", writes=[page], run=lambda work: work.write(page, 7))
    device.copy_units(device.schedule_stream, WINDOW, ids(1), ids(3))
    assert device.units(WINDOW)[1].all()
    assert device.run_next(device.schedule_stream)
    assert device.run_next(device.forward_stream)
    assert device.units(WINDOW)[[1, 3], 0].tolist() == [7, 255]
    assert len(device.races) == 1


@pytest.mark.requirement("V2")
def test_a_stream_that_waits_runs_nothing_before_the_event() -> None:
    """Waits hold the work behind them, and only that."""
    device = device_of()
    device.zero_units(device.forward_stream, WINDOW, ids(1))
    event = device.record_event(device.forward_stream)
    device.zero_units(device.schedule_stream, WINDOW, ids(2))
    device.wait_event(device.schedule_stream, event)
    device.zero_units(device.schedule_stream, WINDOW, ids(1))
    assert device.run_next(device.schedule_stream)
    assert not device.run_next(device.schedule_stream)
    assert device.ready_streams() == [device.forward_stream]
    assert not device.query_event(event)
    device.run_until(event)
    assert device.run_next(device.schedule_stream)
    assert device.query_event(event)


@pytest.mark.requirement("V2")
def test_streams_that_wait_for_one_another_lose_no_work() -> None:
    """Waits of two streams that lead back and forth: passing one may pass the other, and must pass neither twice."""
    device = device_of()
    first, second = device.schedule_stream, device.forward_stream
    ran: list[str] = []
    device.submit(first, "one", run=lambda _: ran.append("one"))
    device.wait_event(second, device.record_event(first))
    device.wait_event(first, device.record_event(second))
    device.submit(first, "two", run=lambda _: ran.append("two"))
    end = device.record_event(first)
    device.wait_event(second, end)
    device.submit(second, "three", run=lambda _: ran.append("three"))
    device.run_next(first)
    assert not device.query_event(end)
    device.run_all()
    assert ran == ["one", "two", "three"]


@pytest.mark.requirement("V2")
def test_a_host_wait_runs_what_the_event_needs_and_nothing_else() -> None:
    """Work is as late as it may be, which is when a missing wait shows."""
    device = device_of()
    copy = device.create_stream("copy")
    device.zero_units(device.forward_stream, WINDOW, ids(1))
    device.wait_event(copy, device.record_event(device.forward_stream))
    device.zero_units(copy, WINDOW, ids(2))
    device.zero_units(device.schedule_stream, WINDOW, ids(3))
    event = device.record_event(copy)
    assert not device.host_has_seen(event)
    device.wait_on_host(event)
    assert device.host_has_seen(event)
    assert device.units(WINDOW)[1:4, 0].tolist() == [0, 0, 255]
    device.synchronize()
    assert device.units(WINDOW)[3, 0] == 0


@pytest.mark.requirement("V2")
def test_a_transfer_is_ordered_by_the_host_alone() -> None:
    """A transfer engine knows no stream: what is queued before the host knew of the end of it is unordered with it."""
    device = device_of()
    page = device.unit_spans(WINDOW, ids(1))
    end = device.start_transfer("receive 3", writes=page, run=lambda work: work.write(page[0], 9))
    assert end.stream.name == "network"
    with pytest.raises(UnorderedAccessError, match="unordered with receive 3 writing"):
        device.submit(device.forward_stream, "forward 1", reads=page)
    device.wait_on_host(end)
    device.submit(device.forward_stream, "forward 2", reads=page)
    assert device.units(WINDOW)[1, 0] == 9


@pytest.mark.requirement("V2")
@pytest.mark.parametrize("forgotten", ["schedule", "forward"])
def test_a_copy_stream_needs_the_schedule_streams_position_and_the_forward_streams(forgotten: str) -> None:
    """A backup's ids are the host's, which has moved the page already: the move itself may still wait for its turn (hazard 4)."""
    device = device_of()
    copy, pool = device.create_stream("copy"), device.create_buffer("host pool", 64)
    device.submit(device.forward_stream, "forward 1", writes=device.unit_spans(WINDOW, ids(4)))
    device.copy_units(device.schedule_stream, WINDOW, ids(3), ids(5))
    pages = device.unit_spans(WINDOW, ids(4, 5))
    for stream in (device.schedule_stream, device.forward_stream):
        if stream.name != forgotten:
            device.wait_event(copy, device.record_event(stream))
    culprit = {"schedule": "move writing", "forward": "forward 1 writing"}[forgotten]
    with pytest.raises(UnorderedAccessError, match=f"backup of .* unordered with {culprit}"):
        device.submit(copy, "backup", reads=pages, writes=[pool.span()])


@pytest.mark.requirement("V2")
def test_a_seed_decides_the_interleaving_and_nothing_else_does() -> None:
    """A failure that cannot be replayed is a rumour; many seeds must show many interleavings."""

    def order(seed: int) -> tuple[str, ...]:
        device, ran = ModelledDevice(16, seed=seed), list[str]()
        streams = [device.schedule_stream, device.forward_stream, device.create_stream("copy")]
        for place in range(12):
            name = f"{place}"
            device.submit(streams[place % 3], name, run=lambda _, name=name: ran.append(name))
        device.run_all()
        assert sorted(ran, key=int) == [str(place) for place in range(12)]
        return tuple(ran)

    orders = [order(seed) for seed in range(40)]
    assert orders == [order(seed) for seed in range(40)]
    assert len(set(orders)) > 20


@pytest.mark.requirement("V2")
def test_random_queries_give_both_answers_and_a_yes_is_true() -> None:
    """A fired event may save a wait and never change a choice (D5): allocators are run with either answer."""
    answers = set()
    for seed in range(20):
        device = device_of(seed=seed, random_queries=True)
        device.zero_units(device.forward_stream, WINDOW, ids(1))
        event = device.record_event(device.forward_stream)
        answer = device.query_event(event)
        answers.add(answer)
        if answer:
            device.zero_units(device.schedule_stream, WINDOW, ids(1))  # Ordered: the host has seen the end.
            assert device.query_event(event)
            assert not device.units(WINDOW)[1].any()
        else:
            with pytest.raises(UnorderedAccessError):
                device.zero_units(device.schedule_stream, WINDOW, ids(1))
    assert answers == {False, True}
    with pytest.raises(ValueError, match="needs a seed"):
        device_of(random_queries=True)


# --- what work may touch ------------------------------------------------------------------------------------------


@pytest.mark.requirement("V2")
def test_work_that_touches_what_it_did_not_declare_is_a_mistake_of_the_test() -> None:
    """An undeclared write would be unwatched: a race that the test hides."""
    device = device_of()
    span = device.arena_buffer.span(0, 16)
    device.submit(device.forward_stream, "forward 1", reads=[span], run=lambda work: work.write(span, 0))
    with pytest.raises(
        UndeclaredAccessError, match=r"forward 1 writes bytes \[0, 16\) of the arena, which it did"
    ):
        device.run_all()


@pytest.mark.requirement("V2")
def test_work_that_discovers_its_pages_is_checked_when_it_runs() -> None:
    """A forward reads page ids from a mirror; the page a stale id names may be somebody else's by then."""
    device = device_of()
    mirror = device.create_mirrors({"ids:full": 4})["ids:full"]
    mirror.stage(ids(2), ids(5))
    device.upload(device.schedule_stream)
    device.wait_event(device.forward_stream, device.record_event(device.schedule_stream))
    table = device.mirror_span("ids:full", 2, 3)

    def forward(work: RunningWork) -> None:
        page = work.read(table).view(np.int32)
        for span in device.unit_spans(FULL, page.astype(np.int64)):
            work.write(span, 1)

    device.submit(device.forward_stream, "forward 4", reads=[table], run=forward, discovers=True)
    device.zero_units(device.schedule_stream, WINDOW, ids(4))
    with pytest.raises(
        UnorderedAccessError, match=r"forward 4 of band 'full' pages .* unordered with zeroing writing band"
    ):
        device.run_all()


@pytest.mark.requirement("V2")
def test_a_staging_buffer_that_is_reused_early_is_reported_and_uploads_the_wrong_values() -> None:
    """The ring grows instead; only whoever says that an upload is over while it is not gets its buffer (K4)."""
    device = ModelledDevice(64, raise_races=False)
    mirror = device.create_mirrors({"ids:full": 4})["ids:full"]
    mirror.stage(ids(1), ids(11))
    device.upload(device.schedule_stream)
    mirror.stage(ids(2), ids(12))
    device.upload(device.schedule_stream)
    assert device.staging_buffer_count == 2
    device.synchronize()
    assert device.tables["ids:full"].tolist() == [0, 11, 12, 0]
    assert not device.races
    for value in (21, 22):
        mirror.stage(ids(value - 20), ids(value))
        device.upload(device.schedule_stream)
        device.return_staging()
    assert device.staging_buffer_count == 2
    device.run_all()
    assert device.tables["ids:full"].tolist() == [0, 11, 22, 0]
    assert [str(race) for race in device.races] == [
        "staging for upload 3 writes bytes [0, 8) of staging buffer 0 unordered with upload 2 reading them"
    ]


@pytest.mark.requirement("V1", "V2")
@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ((1, 2), (2, 3), "cannot copy unit 2 as pair 1: pair 0 has written it"),
        ((1, 2), (3, 3), "cannot copy to unit 3 twice, as pairs 0 and 1"),
        ((1,), (3, 4), "cannot copy 1 sources to 2 targets"),
    ],
)
def test_copies_in_an_order_that_a_device_may_not_keep_are_refused(
    sources: tuple[int, ...], targets: tuple[int, ...], message: str
) -> None:
    """A device copies in any batches; pairs whose result depends on them are the caller's mistake."""
    device = device_of()
    with pytest.raises(ValueError, match=message):
        device.copy_units(device.schedule_stream, WINDOW, ids(*sources), ids(*targets))


@pytest.mark.requirement("V2")
def test_what_does_not_fit_is_refused_in_words() -> None:
    """Mistakes of a test should say so, and change nothing."""
    device = device_of()
    device.create_mirrors({"rows": 4})
    with pytest.raises(IndexError, match=r"bytes \[8, 2000\) do not lie in the arena, which has 1024"):
        device.arena_buffer.span(8, 2000)
    with pytest.raises(IndexError, match="units run from -1 to 3"):
        device.zero_units(device.schedule_stream, WINDOW, ids(3, -1))
    with pytest.raises(IndexError, match=r"entries \[2, 5\) do not lie in mirror 'rows', which has 4"):
        device.mirror_span("rows", 2, 5)
    with pytest.raises(ValueError, match="cannot write 3 bytes to a span of 16"):
        device.write_on_host(device.arena_buffer.span(0, 16), np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="as many bytes as its source"):
        device.copy_spans(device.forward_stream, "copy", [device.arena_buffer.span(0, 16)], [])
    with pytest.raises(TypeError, match="is not one of this device"):
        device.record_event(ImmediateStream("forward"))
    with pytest.raises(TypeError, match="another kind of device"):
        device.wait_on_host(ImmediateEvent(ImmediateStream("forward")))
    with pytest.raises(ValueError, match="cannot use memory of 8"):
        device_of(memory=np.zeros(8, np.uint8))


# --- V3 -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("V3")
def test_an_operation_that_may_not_wait_is_refused_every_device_read_and_host_wait() -> None:
    """A scheduler that waits inside an allocation waits for a whole forward; one that reads back decides by timing."""
    device = device_of()
    device.create_mirrors({"rows": 4})
    device.zero_units(device.forward_stream, WINDOW, ids(1))
    event = device.record_event(device.forward_stream)
    with device.no_host_waits("take"):
        for action in (
            lambda: device.wait_on_host(event),
            device.synchronize,
            lambda: device.read_on_host(device.arena_buffer.span()),
            lambda: device.arena,
            lambda: device.units(WINDOW),
            lambda: device.tables,
        ):
            with pytest.raises(HostMayNotWaitError, match=r"take may not (wait for|read)"):
                action()
        device.query_event(event)
        device.wait_event(device.schedule_stream, event)
        device.zero_units(device.schedule_stream, WINDOW, ids(1))
    device.wait_on_host(event)


@pytest.mark.requirement("V3")
def test_one_named_stream_may_be_waited_for() -> None:
    """C10 allows a relief one host wait: for a network transfer, when no layout avoids it."""
    device = device_of()
    end = device.start_transfer("send 1")
    with device.no_host_waits("relief", except_on="network"):
        device.wait_on_host(end)
        with pytest.raises(
            HostMayNotWaitError, match=r"relief may not wait for stream 'forward'.*but 'network'"
        ):
            device.wait_on_host(device.record_event(device.forward_stream))
        with pytest.raises(HostMayNotWaitError), device.no_host_waits("flush"):
            device.wait_on_host(device.start_transfer("send 2"))
    with (
        device.no_host_waits("take"),
        device.no_host_waits("relief", except_on="network"),
        pytest.raises(HostMayNotWaitError, match="take may not"),
    ):
        device.wait_on_host(device.start_transfer("send 3"))
    with pytest.raises(ZeroDivisionError), device.no_host_waits("take"):
        raise ZeroDivisionError
    device.synchronize()


# --- cost ---------------------------------------------------------------------------------------------------------


def busy_loop(device: ModelledDevice, iterations: int) -> None:
    """Eight calls an iteration that do something, and the waits that order them: what a scheduler does."""
    random = np.random.default_rng(0)
    page_count = WINDOW.unit_count(device.arena_bytes) - 1
    mirror = device.create_mirrors({"rows": 2048, "ids": 4096})["ids"]
    stream, forwards = device.schedule_stream, device.forward_stream
    ends = []
    for step in range(iterations):
        pages = random.choice(page_count, 24, replace=False)
        spans = device.unit_spans(WINDOW, pages)
        mirror.stage(random.integers(0, 4096, 16), pages[:16])
        if ends:
            device.wait_event(stream, ends[-1])
        device.copy_units(stream, WINDOW, pages[:8], pages[8:16])
        device.zero_units(stream, WINDOW, pages[16:])
        device.upload(stream)
        device.wait_event(forwards, device.record_event(stream))
        device.submit(forwards, f"metadata {step}", reads=[device.mirror_span("ids")])
        device.submit(forwards, f"forward {step}", reads=spans, writes=spans[:4])
        ends.append(device.record_event(forwards))
        receive = device.start_transfer(f"receive {step}", writes=[device.create_buffer("peer", 16).span()])
        if step:
            device.wait_on_host(ends[-2])
        device.wait_on_host(receive)


def remembered(device: ModelledDevice) -> tuple[int, int]:
    """How many accesses the watch still holds, in how many histories."""
    segments = [
        segment for watched in device._watch._watched.values() for segment in watched.history._segments
    ]
    accesses = {access for segment in segments for held in segment.values() for access in held}
    return len(accesses), len({id(segment) for segment in segments})


@pytest.mark.requirement("V2")
def test_a_long_run_holds_no_more_than_a_short_one() -> None:
    """What the host has seen the end of is forgotten, so that a simulation of hours holds what is in flight."""
    held: list[tuple[int, int]] = []
    for iterations in (60, 240):
        device = ModelledDevice(2**14, seed=1)
        busy_loop(device, iterations)
        assert len(device._timelines._ticks) == 4  # The host, two streams, one transfer at a time.
        assert len(device._watch._watched) <= 5  # Arena, mirrors, staging; no peer's buffer that is gone.
        held.append(remembered(device))
    (short_accesses, short_histories), (long_accesses, long_histories) = held
    assert long_accesses < 1.5 * short_accesses
    assert long_histories < 1.5 * short_histories
