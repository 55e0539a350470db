"""Questions and what follows from their answers: capacity, refusals, estimates, what-if clones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.chain import BandTake, ChainAllocator, ChainError, Taken, TakeRefusal
from kvtide.device import NumpyDevice
from kvtide.ledger import (
    Access,
    CheckLevel,
    ForwardSteps,
    HostCopy,
    InvariantChecks,
    InvariantError,
    NetworkTransfer,
)
from kvtide.plan import pack

from .books import books_of
from .test_takes import RATIO, Bytes, ids, mixed_layout
from .walk import Walk, chain_over, layout_of


@pytest.mark.requirement("C5", "C2", "P10")
@settings(max_examples=120, deadline=None)
@given(data=st.data(), full=st.booleans())
def test_a_yes_is_a_take_that_succeeds_and_a_no_changes_nothing(data: st.DataObject, full: bool) -> None:
    """The scheduler admits by the question and fails by the take: the two must be one answer, whatever went before."""
    world = Bytes(mixed_layout(data.draw(st.integers(1500, 5000)), full=full))
    chain, names = world.chain, [band.name for band in world.layout.bands]
    owner = "full" if full else "window-64"
    held: dict[str, list[int]] = {name: [] for name in names}
    in_flight = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["take", "take", "take", "ensure", "free", "launch", "process"]))
        live = [len(held[name]) for name in names]
        if action in ("take", "ensure"):
            pages, slots = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 3))
            tail = sorted(data.draw(st.sets(st.integers(0, pages * RATIO - 1), max_size=6))) if pages else []
            places = np.array(tail, np.int64)
            asked = {"state": slots, "window-16": len(tail), owner: pages}
            fits = (
                pack(world.layout, [count + asked[name] for name, count in zip(names, live, strict=True)])
                is not None
            )
            before = books_of(chain)
            assert chain.units_fit(asked) is fits
            assert books_of(chain) == before, "a question changed something"
            if action == "ensure":
                answer = chain.ensure_capacity(asked)
                assert (answer is None) is fits
                if fits:
                    moved = chain.statistics().moved_units
                    assert chain.ensure_capacity(asked) is None
                    assert chain.statistics().moved_units == moved, "room was made once"
                    continue
            else:
                bands = {"window-16": BandTake(fresh=places), owner: BandTake()}
                answer = chain.take(pages=pages, state_slots=slots, bands=bands)
                assert isinstance(answer, Taken) is fits
            if isinstance(answer, TakeRefusal):
                assert books_of(chain) == before, "a refusal changed something"
                continue
            assert isinstance(answer, Taken)
            sub_pages = (answer.pages[:, None] * RATIO + np.arange(RATIO)).reshape(-1)
            for name, units in (
                ("state", answer.state_slots),
                ("window-16", sub_pages[places]),
                (owner, answer.pages),
            ):
                held[name] += units.tolist()
        elif action == "free":
            name = data.draw(st.sampled_from(names))
            locked = {unit // RATIO for unit in held["window-16"]} if name == "full" else set()
            free = sorted(set(held[name]) - locked)
            if free:
                gone = data.draw(st.lists(st.sampled_from(free), unique=True, min_size=1))
                units = np.array(gone, np.int64)
                chain.free_state_slots(units) if name == "state" else chain.free_pages(name, units)
                held[name] = [unit for unit in held[name] if unit not in gone]
        elif action == "launch":
            in_flight.append(world.forward())
        elif in_flight:
            recorded = in_flight.pop(0)
            world.steps.host_synchronised(recorded.event)
            world.steps.forward_processed(recorded)  # type: ignore[arg-type]  # it has the record's ordinal
            chain.forward_processed(recorded.forward)
        chain.verify_byte_accounting()


@pytest.mark.requirement("C5")
def test_two_takes_that_each_fit_and_together_do_not() -> None:
    """Admission that asks for each alone overcommits; one take of both is refused whole."""
    walk = Walk(layout_of({"state": 112, "full": 48}, 1000))
    room = 1000 - 48
    slots, pages = room // 112 - 1, room // 48 - 3
    assert walk.chain.units_fit({"state": slots})
    assert walk.chain.units_fit({"full": pages})
    assert not walk.chain.units_fit({"state": slots, "full": pages})
    before = walk.chain.statistics()
    assert isinstance(walk.chain.take(pages=pages, state_slots=slots), TakeRefusal)
    assert walk.chain.statistics() == before
    assert isinstance(walk.chain.take(state_slots=slots), Taken)
    assert isinstance(walk.chain.take(pages=pages), TakeRefusal)


@pytest.mark.requirement("C5")
def test_a_refusal_says_what_would_have_to_be_freed() -> None:
    """At 3 a.m. the question is what to kill; units of one kind may be worth more than their number."""
    layout = layout_of({"state": 112, "4": 80, "full": 48}, 1200)
    walk = Walk(layout)
    walk.take(4, 2)
    refusal = walk.chain.take(pages=4)
    assert isinstance(refusal, TakeRefusal)
    assert not refusal.is_final
    serves = refusal.would_serve()
    assert serves
    for name, units in serves.items():
        held = [band.live + band.asked - (units if band.name == name else 0) for band in refusal.bands]
        assert pack(layout, held) is not None
        held[[band.name for band in refusal.bands].index(name)] += 1
        assert pack(layout, held) is None, f"one of {name} fewer would do"
        assert f"{units} of {name!r}" in str(refusal)


@pytest.mark.requirement("C5")
def test_a_take_larger_than_the_arena_says_how_much_of_it_an_empty_one_holds() -> None:
    """It would wait for ever: whoever asks must know at once, and what to ask for instead."""
    layout = layout_of({"state": 112, "full": 48}, 1000)
    walk = Walk(layout)
    refusal = walk.chain.take(pages=40)
    assert isinstance(refusal, TakeRefusal)
    assert refusal.is_final
    largest = refusal.largest()["full"]
    assert isinstance(walk.chain.take(pages=largest + 1), TakeRefusal)
    assert isinstance(walk.chain.take(pages=largest), Taken)
    assert f"an empty arena would hold {largest} of 'full' of it, so it can never be served" in str(refusal)


@pytest.mark.requirement("C5", "L4")
@pytest.mark.parametrize("is_freed", [False, True])
def test_a_unit_that_stays_hides_no_other_from_what_could_be_freed(is_freed: bool) -> None:
    """One page is fixed and sent at once, or sent and freed: that it stays is one unit, and the page beside it would do."""
    walk = Walk(layout_of({"state": 96, "full": 48}, 48 + 96))
    pages, send = walk.chain.take(pages=2), NetworkTransfer("send", Access.READ)
    assert isinstance(pages, Taken)
    walk.chain.uses.begin(send, {"full": pages.pages[:1]})
    if is_freed:
        walk.chain.free_pages("full", pages.pages[:1])
    else:
        walk.chain.uses.fix("somebody", {"full": pages.pages[:1]})
    refusal = walk.chain.take(pages=1)
    assert isinstance(refusal, TakeRefusal)
    assert refusal.would_serve() == {"full": 1}
    walk.chain.free_pages("full", pages.pages[1:])
    assert isinstance(walk.chain.take(pages=1), Taken)


def test_where_one_kind_alone_cannot_help_the_refusal_says_so() -> None:
    """Freeing every page of either band leaves too little."""
    walk = Walk(layout_of({"state": 96, "full": 48}, 48 + 960))
    walk.take(8, 5)
    refusal = walk.chain.take(pages=16)
    assert isinstance(refusal, TakeRefusal)
    assert refusal.would_serve() == {}
    assert "units of more than one band must be freed" in str(refusal)


def test_questions_about_what_is_not_there_are_refused() -> None:
    """A misspelt band would read as a yes."""
    walk = Walk(layout_of({"state": 112, "full": 48}, 1000))
    for ask in (walk.chain.units_fit, walk.chain.ensure_capacity):
        with pytest.raises(ChainError, match="no band 'ful'; the chain has"):
            ask({"ful": 1})
        for wrong in (-1, 1.5, True):
            with pytest.raises(ChainError, match="cannot ask for"):
                ask({"full": wrong})  # type: ignore[dict-item]  # the mistake


@pytest.mark.requirement("C9")
def test_estimates_follow_free_bytes_and_id_room() -> None:
    """They serve dashboards: right about bytes, and blind to alignment and to what cannot move."""
    world = Bytes(mixed_layout(3000))
    chain, layout = world.chain, world.layout
    taken = world.take(pages=2, slots=1)
    unit = {band.name: band.unit_bytes for band in layout.bands}
    free = 3000 - layout.prefix_bytes - unit["state"] - 2 * unit["full"] - 2 * RATIO * unit["window-16"]
    assert chain.available_size() == free // (unit["full"] + RATIO * unit["window-16"]) * 8
    assert chain.full_available_size() == free // unit["full"] * 8
    assert chain.window_available_size("window-16") == free // unit["window-16"] * 2
    assert chain.estimated_units_available("state") == free // unit["state"]
    assert chain.usage() == 1 - free / (3000 - layout.prefix_bytes)
    chain.free_state_slots(taken.state_slots)
    assert chain.estimated_units_available("state") == free // unit["state"] + 1
    assert Bytes(mixed_layout(3000, full=False)).chain.full_available_size() == 0


@pytest.mark.requirement("C9", "L8")
def test_an_estimate_read_inside_a_decision_raises_where_checks_are_strict() -> None:
    """A decision by an estimate overcommits on one arena in a hundred; it must show in a test, not at a user's."""
    layout = mixed_layout()
    for level, raises in ((CheckLevel.OFF, False), (CheckLevel.WARN, False), (CheckLevel.STRICT, True)):
        device = NumpyDevice(layout.arena_bytes, byte_work=False)
        mirrors = device.create_mirrors({f"ids:{band.name}": layout.id_count(band) for band in layout.bands})
        chain = ChainAllocator(layout, device, mirrors, ForwardSteps(), checks=InvariantChecks(level))
        reads = (
            chain.available_size,
            chain.full_available_size,
            lambda chain=chain: chain.window_available_size("window-16"),
            lambda chain=chain: chain.estimated_units_available("state"),
            chain.usage,
        )
        for read in reads:
            read()
            with chain.capacity_decision("an admission"):
                assert chain.units_fit({"full": 1})
                if raises:
                    with pytest.raises(InvariantError, match="was read while an admission was decided"):
                        read()
                else:
                    read()
            read()


@pytest.mark.requirement("C13", "C6")
def test_a_clone_waits_for_nobody_where_the_original_would() -> None:
    """The original's waiter blocks the host and ends transfers in the original: a what-if may do neither."""
    layout = layout_of({"state": 112, "full": 48}, 48 + 48 * 40)
    device, steps = NumpyDevice(layout.arena_bytes), ForwardSteps()
    lengths = {f"ids:{band.name}": layout.id_count(band) for band in layout.bands}
    waited: list[object] = []
    chain = ChainAllocator(
        layout, device, device.create_mirrors(lengths), steps, wait_for_transfers=waited.append
    )
    taken = chain.take(pages=40)
    assert isinstance(taken, Taken)
    send = NetworkTransfer("send 1", Access.READ)
    chain.uses.begin(send, {"full": taken.pages[38:]})
    chain.free_pages("full", taken.pages[:36])
    other = NumpyDevice(layout.arena_bytes, byte_work=False)
    clone = chain.clone(other, other.create_mirrors(lengths))
    for each in (clone, clone.clone(other, NumpyDevice(layout.arena_bytes).create_mirrors(lengths))):
        assert isinstance(each.take(state_slots=15), Taken)
        assert send not in each.ledger("full")
        each.verify_byte_accounting()
    assert not waited
    assert send in chain.ledger("full")

    def wait(transfers: Sequence[NetworkTransfer]) -> None:
        waited.extend(transfers)
        told.uses.end_each(transfers)

    mirrors = NumpyDevice(layout.arena_bytes).create_mirrors(lengths)
    told = chain.clone(other, mirrors, wait_for_transfers=wait)
    assert isinstance(told.take(state_slots=15), Taken)
    assert waited == [send], "a waiter of its own is asked"


@pytest.mark.requirement("C13", "C10")
def test_books_tell_chains_apart_exactly_where_they_may_decide_otherwise() -> None:
    """An exhaustive search takes chains with equal books for one, ranks and traces compare them."""
    layout = layout_of({"state": 32, "4": 32, "full": 48}, 64 + 16 * 40)

    def chain() -> tuple[ChainAllocator, ForwardSteps, NumpyDevice]:
        device, steps = NumpyDevice(layout.arena_bytes), ForwardSteps()
        return chain_over(layout, device, steps), steps, device

    plain, _, _ = chain()
    first = plain.take(pages=2, state_slots=1)
    assert isinstance(first, Taken)
    other, steps, device = chain()
    # Ids in another order, a forward that is over, a state slot that came and went: no decision can tell.
    gone = other.take(pages=3, state_slots=1)
    assert isinstance(gone, Taken)
    record = steps.forward_launched()
    event = device.record_event(device.forward_stream)
    other.forward_recorded(steps.forward_recorded(record, event), {"full": gone.pages})
    steps.host_synchronised(event)
    steps.forward_processed(record)
    other.forward_processed(record.forward)
    other.free_state_slots(gone.state_slots)
    for name in ("window-4", "full"):
        other.free_pages(name, gone.pages[::-1].copy())
    again = other.take(pages=2, state_slots=1)
    assert isinstance(again, Taken)
    assert not np.array_equal(first.pages, again.pages)
    assert other.books() == plain.books()
    # Which page a window lets go of does matter, and so does what pends, what is fixed, and what a copy reads.
    seen = {plain.books()}
    plain.uses.fix("somebody", {"full": first.pages[:1]})
    seen.add(plain.books())
    plain.uses.begin(NetworkTransfer("send", Access.READ), {"full": first.pages[1:]})
    seen.add(plain.books())
    plain.free_pages("window-4", first.pages[:1])
    seen.add(plain.books())
    other.free_pages("window-4", again.pages[1:])
    seen.add(other.books())
    record = steps.forward_launched()
    event = device.record_event(device.forward_stream)
    other.forward_recorded(steps.forward_recorded(record, event), {"full": None})
    seen.add(other.books())
    other.free_state_slots(again.state_slots)
    seen.add(other.books())
    assert len(seen) == 7


@pytest.mark.requirement("C13")
def test_a_clone_goes_its_own_way_and_begins_where_the_original_stood() -> None:
    """What-if questions and exhaustive search: hundreds of thousands of clones, none of which may touch the original."""
    world = Bytes(mixed_layout())
    debt = world.take(pages=4, slots=2, bands={"full": BandTake(unwritten=ids()), "window-16": BandTake()})
    flying = world.forward(full=debt.pages)
    world.chain.free_pages("window-16", ids(*range(RATIO, 3 * RATIO)))
    before = books_of(world.chain)
    device = NumpyDevice(world.layout.arena_bytes, byte_work=False)
    mirrors = device.create_mirrors(
        {f"ids:{band.name}": world.layout.id_count(band) for band in world.layout.bands}
    )
    clone = world.chain.clone(device, mirrors)
    assert books_of(clone) == before
    device.upload(device.schedule_stream)
    world.device.upload(world.device.schedule_stream)
    for name, table in world.device.tables.items():
        assert (device.tables[name] == table).all()
    clone.free_state_slots(debt.state_slots)
    assert isinstance(clone.take(pages=3), Taken)
    assert clone.ensure_capacity({"full": 30}) is None
    clone.pay_zero_debt(debt)
    clone.steps.host_synchronised(flying.event)
    clone.steps.forward_processed(flying)  # type: ignore[arg-type]  # it has the record's ordinal
    clone.forward_processed(flying.forward)
    clone.verify_byte_accounting()
    assert books_of(world.chain) == before
    assert books_of(clone) != before


@pytest.mark.requirement("K5", "T6")
def test_what_admission_may_wait_for_and_what_binds_layouts_are_told_apart() -> None:
    """A copy in flight ends by itself and is a reason to wait; a failed transfer's pages may stay for ever, and are none."""
    world = Bytes(mixed_layout(4000, full=True))
    chain = world.chain
    pages = world.take(pages=3).pages
    first, second, third = pages[:1], pages[1:2], pages[2:]
    answers = [(chain.uses.has_host_copies, chain.uses.bind_layout)]
    copy = HostCopy("backup", Access.READ, world.device.record_event(world.device.schedule_stream))
    send = NetworkTransfer("send", Access.READ)
    chain.uses.begin(copy, {"full": first})
    answers.append((chain.uses.has_host_copies, chain.uses.bind_layout))
    chain.uses.end(copy)
    chain.uses.begin(send, {"full": second})
    answers.append((chain.uses.has_host_copies, chain.uses.bind_layout))
    chain.uses.quarantine(send)
    answers.append((chain.uses.has_host_copies, chain.uses.bind_layout))
    chain.uses.unfix(send)
    chain.uses.fix("a load", {"full": third})
    answers.append((chain.uses.has_host_copies, chain.uses.bind_layout))
    assert answers == [(False, False), (True, False), (False, True), (False, True), (False, True)]
