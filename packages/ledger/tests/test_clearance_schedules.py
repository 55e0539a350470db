"""Every cell of `CLEARANCE`, proved by the schedule that it prevents (L5).

For each consumer and hazard one schedule runs twice on the modelled device, by the same code: with the table as it is, where
nothing may be reported, and with that one cell weakened to "none", where the race must be. A cell that says "none" relies on
another rule instead; there the second run breaks that rule.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from kvtide.ledger import CLEARANCE, REASONS, Clear, ClearanceTable, Consumer, Hazard, clearance

from .scene import HAZARDS, PAGE, SPARE, WRITES, Scene, forward_reads_what_a_move_left, ids

CELLS = [
    pytest.param(consumer, hazard, schedule, id=f"{consumer.name}-{hazard.name}-{schedule.__name__}")
    for consumer, hazard in product(Consumer, Hazard)
    for schedule in HAZARDS[hazard]
]


def weakened(consumer: Consumer, hazard: Hazard) -> ClearanceTable:
    """The table with one cell that asks for nothing."""
    return {**CLEARANCE, consumer: {**CLEARANCE[consumer], hazard: Clear.NONE}}


@pytest.mark.requirement("L5")
def test_every_cell_has_its_schedule() -> None:
    """A new consumer or hazard without its pair of runs, or a "none" without the rule that it relies on, fails here."""
    assert set(CLEARANCE) == set(Consumer) == set(WRITES)
    assert set(HAZARDS) == set(Hazard)
    assert all(set(row) == set(Hazard) for row in CLEARANCE.values())
    proved = {(cell.values[0], cell.values[1]) for cell in CELLS}
    assert proved == set(product(Consumer, Hazard))
    queue_nothing = {
        (consumer, hazard)
        for consumer, hazard in proved
        if CLEARANCE[consumer][hazard] in (Clear.NONE, Clear.AFTER_RETIRE)
    }
    assert set(REASONS) == queue_nothing


@pytest.mark.requirement("L5", "L4")
@pytest.mark.parametrize(("consumer", "hazard", "schedule"), CELLS)
def test_with_the_cell_the_schedule_is_clean(
    consumer: Consumer, hazard: Hazard, schedule: Callable[[Scene], None]
) -> None:
    """The page is written after all, unless it is excluded, so clean means ordered and not avoided."""
    scene = Scene()
    schedule(scene)
    # The holes offered hold a clear one too: C8 takes that first, so the hazardous one is offered alone where it may be used.
    if CLEARANCE[consumer][hazard] is not Clear.EXCLUDED:
        scene.usage.fix("not for this test", ids(SPARE))
    assert scene.consume(consumer) == ()
    assert scene.written == [SPARE if CLEARANCE[consumer][hazard] is Clear.EXCLUDED else PAGE]


@pytest.mark.requirement("L5", "L4")
@pytest.mark.parametrize(("consumer", "hazard", "schedule"), CELLS)
def test_without_the_cell_the_schedule_is_reported(
    consumer: Consumer, hazard: Hazard, schedule: Callable[[Scene], None]
) -> None:
    """Each cell is needed: no other rule prevents this schedule."""
    relies_on_a_rule = CLEARANCE[consumer][hazard] is Clear.NONE
    scene = Scene(weakened(consumer, hazard), broken_rule=consumer if relies_on_a_rule else None)
    schedule(scene)
    races = scene.consume(consumer)
    assert scene.written == [PAGE]
    assert races, "nothing was reported"
    for race in races:
        assert race.buffer == "the arena"
        assert (race.start_byte, race.end_byte) == (PAGE * 64, PAGE * 64 + 64)
        assert race.second.is_write or race.first.is_write


@pytest.mark.requirement("L5", "L6")
@pytest.mark.parametrize("unwaited", ["forward", "schedule", None])
def test_a_load_relies_on_its_stream_having_waited_for_both_the_forward_and_the_schedule_stream(
    unwaited: str | None,
) -> None:
    """The move that left the page reads it on the schedule stream, the forward on its own; the cell queues a wait for neither."""
    scene = Scene()
    forward_reads_what_a_move_left(scene)
    scene.unwaited = {
        "forward": scene.device.forward_stream,
        "schedule": scene.device.schedule_stream,
        None: None,
    }[unwaited]
    scene.usage.fix("not for this test", ids(SPARE))
    assert clearance(Consumer.HOST_LOAD, scene.usage, ids(PAGE)).free_to_go.tolist() == [PAGE]
    races = scene.consume(Consumer.HOST_LOAD)
    assert bool(races) == (unwaited is not None)
    assert all(race.start_byte == PAGE * 64 for race in races)
