"""The simulation's operations on a GPU's streams: seeds with every wait, and seeds without any, which must be noticed."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

from gpu_place import Place
from kvtide.simulation import OPERATIONS, RealDevice, Run, open_device, run_seed_on

ACTIONS = 150
FAULT_SEEDS = range(24)


def simulate(place: Place, seed: int, opener: Callable[[int, int], RealDevice] | None = None) -> str:
    """Run a seed; what it did, in words. Raises `AssertionError` with the check that failed, or for a seed that shows nothing."""
    run = _run(place, seed, opener)
    assert run.failure is None, str(run.failure)
    facts = run.facts
    assert facts.get("forwards"), "no forward ran: the seed shows nothing"
    return f"{len(run.actions)} actions, {facts['forwards']} forwards, {facts['units moved']} units moved, on two ranks"


def simulate_without_waits(place: Place, opener: Callable[[int, int], RealDevice] | None = None) -> str:
    """No stream waits for another: how soon that is noticed, in words. Raises as `first_wrong_byte` does."""
    with patch.object(RealDevice, "wait_event", lambda *_: None):
        return first_wrong_byte(place, opener)


def first_wrong_byte(place: Place, opener: Callable[[int, int], RealDevice] | None = None) -> str:
    """Run seeds until bytes come out wrong, in a device that something was taken from: which seed, and where, in words.

    Raises `AssertionError` when none does, and when a run fails in another way: it would show nothing of what was taken.
    """
    for seed in FAULT_SEEDS:
        failure = _run(place, seed, opener).failure
        if failure is not None:
            assert failure.check == "lost_write", (
                f"wrong bytes were looked for, and this is something else: {failure}"
            )
            return f"caught by seed {seed}: {failure}"
    raise AssertionError(
        "not caught: delays are too short to show a missing wait, and these seeds show nothing of them"
    )


def _run(place: Place, seed: int, opener: Callable[[int, int], RealDevice] | None) -> Run:
    operations = {operation.name: operation for operation in OPERATIONS}
    return run_seed_on(opener or partial(open_device, place.memory), seed, ACTIONS, operations)
