"""The simulation's operations on a GPU's streams: seeds with every wait, and seeds without any, which must be noticed."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

from gpu_place import Place
from kvtide.simulation import OPERATIONS, RealDevice, open_device, run_seed_on

ACTIONS = 150
FAULT_SEEDS = range(3, 8)


def simulate(place: Place, seed: int, opener: Callable[[int, int], RealDevice] | None = None) -> str:
    """Run a seed; what it did, in words. Raises `AssertionError` with the check that failed."""
    operations = {operation.name: operation for operation in OPERATIONS}
    run = run_seed_on(opener or partial(open_device, place.memory), seed, ACTIONS, operations)
    assert run.failure is None, str(run.failure)
    facts = run.facts
    assert facts["forwards"] > 0, "no forward ran: the seed shows nothing"
    return f"{len(run.actions)} actions, {facts['forwards']} forwards, {facts['units moved']} units moved, on two ranks"


def simulate_without_waits(place: Place, opener: Callable[[int, int], RealDevice] | None = None) -> str:
    """No stream waits for another: how soon that is noticed, in words. Raises `AssertionError` when it is not."""
    with patch.object(RealDevice, "wait_event", lambda *_: None):
        for seed in FAULT_SEEDS:
            try:
                simulate(place, seed, opener)
            except AssertionError as error:
                return f"caught by seed {seed}: {error}"
    raise AssertionError(
        "not caught: delays are too short to show a missing wait, and these seeds show nothing of them"
    )
