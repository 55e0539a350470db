"""Every sequence of operations on tiny arenas, and a search that is itself searched for blind spots (row X4)."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import pytest

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.simulation.exhaustive import SHAPES, Action, Exhausted, described, exhaust, repeat
from kvtide.simulation.exhaustive.ordered_device import FORWARD, SCHEDULE
from kvtide.simulation.exhaustive.search import Explorer
from kvtide.simulation.exhaustive.small_actions import actions
from kvtide.simulation.exhaustive.small_steps import step
from kvtide.simulation.exhaustive.small_world import Facts, SmallWorld
from kvtide.simulation.failures import CheckFailedError

from .small_canaries import SMALL_CANARIES


def after(shape: str, *sequence: Action) -> SmallWorld:
    world = SmallWorld(Facts(SHAPES[shape]))
    for action in sequence:
        assert action in list(actions(world)), f"{action} is not offered after {sequence}"
        step(world, action)
    return world


@pytest.mark.requirement("X4", "C5", "C11", "C13", "L2")
@pytest.mark.parametrize("shape", SHAPES)
def test_no_short_sequence_of_operations_breaks_a_rule(shape: str) -> None:
    """A slice for CI; the weekly session goes as far as its time allows."""
    found = exhaust(SHAPES[shape], depth=3)
    assert found.failure is None, (found.failure, found.sequence)
    assert found.depth == 3
    assert found.states == sum(found.layers) > 400
    assert {word for word, _ in found.outcomes} >= {
        "take",
        "free",
        "launch",
        "back up",
        "send",
        "fix",
        "flush",
        "abort",
    }


@pytest.mark.requirement("X4")
@pytest.mark.parametrize("name", SMALL_CANARIES)
def test_a_planted_fault_is_found_with_a_shortest_sequence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence fails at its last action, does without none of its actions, and holds once the fault is mended."""
    canary = SMALL_CANARIES[name]
    canary.plant(monkeypatch)
    found = exhaust(SHAPES[canary.shape], depth=4)
    assert found.failure is not None
    assert found.failure.check == canary.check, found.failure
    assert len(found.sequence) == canary.length, found.sequence
    assert found.failure.action_index == canary.length - 1
    assert_repeated(canary.shape, found)
    for place in range(canary.length):
        shorter = found.sequence[:place] + found.sequence[place + 1 :]
        assert not fails(canary.shape, shorter, canary.check), f"{shorter} is enough"
    monkeypatch.undo()
    assert repeat(SHAPES[canary.shape], found.sequence) is None


@pytest.mark.requirement("X4")
def test_behind_a_failure_only_shorter_sequences_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is told at once, for to empty every state of the layers before may take long; those layers are told, too."""
    SMALL_CANARIES["settles wait for nothing"].plant(monkeypatch)
    told: list[object] = []
    found = exhaust(
        SHAPES["two-bands"],
        depth=4,
        on_layer=lambda reached, _: told.append(reached),
        on_failure=lambda failure: told.append(failure.check),
    )
    assert len(found.sequence) == 4
    assert told == [1, 2, 3, 3, "unordered_overlap", 1, 2, 3]


@pytest.mark.requirement("X4", "C1")
def test_some_states_are_emptied_to_see_what_they_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """State slots that a free does not give back show in no answer until there are none left, but in the books of the empty chain."""
    free = ChainAllocator.free_state_slots

    def free_and_lose(chain: ChainAllocator, virtual_slots: IntArray) -> None:
        before = chain._slots._free_count
        free(chain, virtual_slots)
        chain._slots._free_count = before

    monkeypatch.setattr(ChainAllocator, "free_state_slots", free_and_lose)
    for shape in ("two-bands", "float", "sub-pages"):
        found = exhaust(SHAPES[shape], depth=3)
        assert found.failure is not None
        assert found.failure.check == "ledger_leak"
        assert "with nothing held the books are ((" in found.failure.message
        # Few states are emptied, and the first of them had more done to it.
        assert [described(SHAPES[shape], action) for action in found.sequence] == ["take a state slot"]
        assert_repeated(shape, found)
    monkeypatch.undo()
    assert repeat(SHAPES["two-bands"], [("take", 3)]) is None


def assert_repeated(shape: str, found: Exhausted) -> None:
    """Whoever mends a fault repeats its sequence until it holds, so it must fail before."""
    repeated = repeat(SHAPES[shape], found.sequence)
    assert repeated is not None
    assert found.failure is not None
    assert repeated.is_like(found.failure)
    assert repeated.action_index == found.failure.action_index == len(found.sequence) - 1


@pytest.mark.requirement("X4", "L5")
@pytest.mark.parametrize(
    ("reads", "writes", "is_ordered"),
    [
        # The copy waits for whoever may write either slot, and reads what somebody else reads.
        ("both", "both", True),
        ("both", "source", True),
        ("target", "target", True),
        ("source", "none", True),
        # Nobody waits for a forward that only reads the target: it is the caller's, and models write every state that they read.
        ("target", "none", False),
        ("both", "none", False),
    ],
)
def test_a_state_copy_waits_for_writers_and_not_for_who_only_reads_its_target(
    reads: str, writes: str, is_ordered: bool
) -> None:
    """The sequence that the search found on its first day, and what the contract of `copy_state_slots` says of it since."""
    world = after("two-bands", ("take", 3), ("take", 3))
    slots = world.by_unit(0)
    chosen = {"both": slots, "source": slots[:1], "target": slots[1:], "none": []}
    record = world.chain.steps.forward_launched()
    world.device.order_behind(FORWARD, world.device.behind(SCHEDULE))
    read, written = ([(0, unit) for unit, _ in chosen[which]] for which in (reads, writes))
    event = world.device.work(FORWARD, "a forward", world.cells(read), world.cells(written))
    recorded = world.chain.steps.forward_recorded(record, event)
    virtual = np.array([slot for _, slot in chosen[writes]], np.int64)
    world.chain.forward_recorded(recorded, {"state": virtual, "full": np.empty(0, np.int64)})
    source, target = (np.array([slot]) for _, slot in slots)
    if not is_ordered:
        with pytest.raises(CheckFailedError, match="a forward reading them") as found:
            world.chain.copy_state_slots(source, target)
        assert found.value.check == "unordered_overlap"
        world.device.wait_event(SCHEDULE, event)
        world.chain.steps.wait_queued(event)
    world.chain.copy_state_slots(source, target)


@pytest.mark.requirement("X4", "H1", "T1")
@pytest.mark.parametrize(
    ("use", "end"), [(("back up", 0, 0), ("end copy",)), (("send", 0, 0), ("end transfer",))]
)
def test_a_forward_leaves_out_a_state_that_a_copy_or_a_peer_reads(use: Action, end: Action) -> None:
    """It would write what it reads, and nobody writes what they read.

    The search's own scheduler let a forward read it, and once the use was over, six actions deep, copied onto it: for writers alone
    a copy waits.
    """
    sequence = [("take", 3), use, ("launch", 1), ("take", 3), end, ("copy slot", 1, 0)]
    assert repeat(SHAPES["two-bands"], sequence) is None


def fails(shape: str, sequence: Sequence[Action], check: str) -> bool:
    """Whether the same check fails in a sequence, if a correct scheduler may do it at all."""
    world = SmallWorld(Facts(SHAPES[shape]))
    for action in sequence:
        if action not in list(actions(world)):
            return False
        try:
            step(world, action)
        except Exception:  # noqa: BLE001 - whatever is raised, `repeat` says which check it is
            break
    failure = repeat(SHAPES[shape], sequence)
    return failure is not None and failure.check == check


@pytest.mark.requirement("X4", "C13")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        # Pages taken and given back leave their ids in another order.
        ([("take", 0), ("take", 0), ("free", 1, 4), ("free", 1, 5)], []),
        # A forward and its processing leave nothing behind but the time that has passed.
        ([("take", 0), ("launch", 1), ("process",)], [("take", 0)]),
        # Batches freed under one forward come back together.
        (
            [("take", 2), ("launch", 1), ("free", 1, 5), ("free", 1, 4)],
            [("take", 2), ("launch", 1), ("free all",)],
        ),
        # A backup that is over, a promise that ended.
        ([("take", 0), ("back up", 1, 5), ("end copy",)], [("take", 0), ("fix", 1, 5), ("unfix",)]),
    ],
)
def test_states_with_one_future_are_one(one: list[Action], other: list[Action]) -> None:
    """What cannot matter is left out: otherwise the search would go in circles, and reach nothing."""
    assert after("two-bands", *one).form() == after("two-bands", *other).form()


@pytest.mark.requirement("X4", "C13")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        # A page that pends is not a hole.
        ([("take", 2), ("launch", 1), ("free", 1, 5)], [("take", 2), ("free", 1, 5), ("launch", 1)]),
        # Written or only read: a move waits for one of the two.
        ([("take", 0), ("launch", 1)], [("take", 0), ("launch", 0)]),
        # A forward that the schedule stream stands behind has retired.
        ([("take", 0), ("launch", 1)], [("take", 0), ("launch", 1), ("stand behind",)]),
        # Fixed, backed up, sent.
        ([("take", 0), ("fix", 1, 5)], [("take", 0), ("back up", 1, 5)]),
        ([("take", 0), ("back up", 1, 5)], [("take", 0), ("send", 1, 5)]),
        # A transfer that may be waited for, one that may not.
        ([("take", 0), ("send", 1, 5)], [("take", 0), ("send", 1, 5), ("fail",)]),
        # Owed zeroing.
        ([("take", 0)], [("take", 1)]),
    ],
)
def test_states_that_differ_in_what_may_follow_are_two(one: list[Action], other: list[Action]) -> None:
    """What can matter is kept: otherwise the search would pass faults by."""
    assert after("two-bands", *one).digest() != after("two-bands", *other).digest()


@pytest.mark.requirement("X4", "C13")
def test_each_part_of_the_form_tells_states_apart_that_no_other_does() -> None:
    """Else a part could be lost unnoticed, and states with different futures be taken for one."""
    # A page that pends under a forward that has retired, and a hole: nothing is unordered any more.
    pends = after("two-bands", ("take", 2), ("launch", 0), ("stand behind",), ("free", 1, 5))
    is_hole = after("two-bands", ("take", 2), ("free", 1, 5), ("launch", 0), ("stand behind",))
    assert pends.form()[1:] == is_hole.form()[1:] == ((), (None, None, None))
    assert pends.chain.books() != is_hole.chain.books()
    # A page that a forward reads, and one that was taken after its launch: the allocator is told the same.
    is_read = after("two-bands", ("take", 3), ("take", 0), ("launch", 0))
    is_new = after("two-bands", ("take", 3), ("launch", 0), ("take", 0))
    assert is_read.form()[::2] == is_new.form()[::2]
    assert is_read.form()[1] != is_new.form()[1]
    # A fixed page: nobody touches it, and the shadow knows as well as the allocator.
    is_free, is_fixed = after("two-bands", ("take", 0)), after("two-bands", ("take", 0), ("fix", 1, 5))
    assert is_free.form()[1] == is_fixed.form()[1]
    assert is_free.chain.books() != is_fixed.chain.books()
    assert is_free.form()[2] != is_fixed.form()[2]


@pytest.mark.requirement("C13")
def test_a_clone_goes_its_own_way() -> None:
    """Whatever is done to a clone, its origin's form stays, use by use."""
    world = after("two-bands", ("take", 0), ("take", 3), ("back up", 1, 5), ("send", 1, 5), ("launch", 1))
    before = world.form()
    for action in list(actions(world)):
        step(world.clone(), action)
        assert world.form() == before, action


@pytest.mark.requirement("X4")
def test_processes_find_what_one_finds() -> None:
    """Jobs change the time and nothing else."""
    alone, together = (exhaust(SHAPES["two-bands"], depth=3, jobs=jobs) for jobs in (1, 2))
    assert alone.layers == together.layers
    assert alone.outcomes == together.outcomes


@pytest.mark.requirement("X4")
def test_a_state_is_gone_with_the_last_that_refers_to_it() -> None:
    """The search collects no garbage while it goes on from states; one kept by a cycle would be kept for long, with its chain."""
    explorer = Explorer(SHAPES["window-and-full"])
    gc.collect()
    before = sum(isinstance(each, SmallWorld) for each in gc.get_objects())
    gc.disable()
    try:
        piece = explorer.explore([(), (("take", 0),), (("take", 0), ("launch", 1))])
        assert not gc.isenabled(), "whoever has disabled it is left alone"
        left = sum(isinstance(each, SmallWorld) for each in gc.get_objects())
    finally:
        gc.enable()
    assert piece.failure is None
    assert len(piece.fresh) > 15
    assert left - before < 3, "the path to the last state is kept, and nothing else"
    explorer.explore([()])
    assert gc.isenabled()


@pytest.mark.requirement("X4")
def test_fewer_kinds_of_actions_reach_further() -> None:
    """In the time of three actions of every kind, six of a few."""
    words = ("take", "free", "launch", "process")
    found = exhaust(SHAPES["window-and-full"], depth=6, words=words)
    assert found.failure is None
    assert {word for word, _ in found.outcomes} == set(words)
    assert found.states > 1_000


@pytest.mark.requirement("X4", "T6")
def test_a_quarantine_is_entered_and_left_in_every_order() -> None:
    """Its end is the fourth action at the soonest, so a slice of all kinds of actions never comes there."""
    words = ("take", "send", "fail", "free", "prove", "flush")
    found = exhaust(SHAPES["two-bands"], depth=5, words=words)
    assert found.failure is None
    assert found.outcomes["prove", "proved"] > 10
    assert found.states > 500


@pytest.mark.requirement("X4", "K8")
def test_pages_are_rehomed_in_every_order() -> None:
    """With a debt and without, back again, and with their last page freed behind them."""
    words = ("take", "free", "rehome", "pay", "launch", "process")
    for name in ("window-and-full", "sub-pages", "window-only"):
        found = exhaust(SHAPES[name], depth=4, words=words)
        assert found.failure is None
        assert found.outcomes["rehome", "rehomed"] > 10
        has_promises = any(take.promised for take in SHAPES[name].takes)
        assert (found.outcomes["rehome", "rehomed with its debt"] > 0) == has_promises


@pytest.mark.requirement("X4", "K8")
def test_no_page_stands_for_one_that_is_still_filled() -> None:
    """A window's part of a page may be free while a receive fills the page's others: a tree names the page once it has arrived."""
    filled = after("window-and-full", ("take", 0), ("receive",), ("publish",), ("free", 0, 2))
    rehoming = ("rehome", 0, 1, 0)
    assert rehoming not in list(actions(filled))
    step(filled, ("end transfer",))
    assert rehoming in list(actions(filled))


@pytest.mark.requirement("X4")
def test_a_ledger_that_is_not_idle_is_none_that_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds of work that is over shows nowhere else; it says so itself, and is asked."""
    assert repeat(SHAPES["two-bands"], [("take", 3)]) is None

    def is_not_idle(_: object) -> None:
        raise CheckFailedError("ledger_leak", "a record is left")

    world = SmallWorld(Facts(SHAPES["two-bands"]))
    monkeypatch.setattr(type(world.chain.ledger("full")), "check_idle", is_not_idle)
    failure = repeat(SHAPES["two-bands"], [("take", 3)])
    assert failure is not None
    assert failure.message == "a record is left"


@pytest.mark.requirement("X4")
def test_arenas_are_tiny() -> None:
    """What is exhausted is every placement of a few units: more bytes, and no depth that is reached would fill them."""
    for shape in SHAPES.values():
        layout = shape.layout()
        alone = [band.capacity_pages for band in layout.bands]
        assert 3 <= min(alone) <= max(alone) <= 7, shape.name
        room = layout.arena_bytes - layout.prefix_bytes
        assert 1 <= room // sum(band.unit_bytes for band in layout.bands) <= 3


def test_every_action_has_words() -> None:
    """A bad sequence is read by people."""
    shape = SHAPES["two-bands"]
    assert described(shape, ("take", 3)) == "take a state slot"
    assert described(shape, ("make room", 0)) == "make room for {'state': 2}"
    assert described(shape, ("fix", 1, 5)) == "fix unit 5 of band 'full'"
    assert described(shape, ("copy slot", 0, 1)) == "copy slot 0 1"
    rehoming = "rehome unit 4 of band 'window-2' to page 1 in the order of their units"
    assert described(SHAPES["float"], ("rehome", 1, 4, 1)) == rehoming


@pytest.mark.requirement("C13")
def test_books_are_equal_where_decisions_are() -> None:
    """Virtual ids, ordinals and the past are left out of them; spans, bindings and uses are not."""
    world = after("window-and-full", ("take", 0), ("take", 0), ("launch", 1), ("release", 4), ("process",))
    again = after("window-and-full", ("take", 0))
    assert isinstance(world.chain, ChainAllocator)
    assert world.chain.statistics().moved_units == 0
    assert world.chain.books() != again.chain.books(), "another page is left, and a hole"
