"""How others come in the way of checkpoints: they take every state slot, for a time, and fix what is about to be handed over."""

from __future__ import annotations

import numpy as np

from kvtide.simulation import Kind, World, fix, one_of, parts_of
from kvtide.storage.simulated.sharers import Sharers


def fix_checkpoints(world: World, sharers: Sharers) -> bool:
    """Fix the states on their way to the tree, so that it keeps them; whether there are any.

    Sooner than service would, which fixes what the tree has, so only those that the tree is certain to take: a row copies onto the others again.
    """
    slots = sharers.unrivalled_checkpoints()
    if not slots or world.state is None:
        return False
    parts = parts_of(world.shadow, [world.state], {world.state.name: np.array(slots, np.int64)})
    fix(world, world.uses.open(Kind.FIX, parts))
    return True


def take_slots(world: World, sharers: Sharers, taker: int) -> int:
    """A request, a new one if none runs, takes every state slot that is left or that the tree can spare; how many."""
    assert world.state is not None, "state slots are taken"
    count = 0
    while (world.requests or world.free_rows) and sharers.make_room({world.state.name: 1}) is not False:
        handed = world.take(state_slots=1)
        if handed is None:
            break
        if world.requests:
            one_of(world.requests, taker).state_slots += handed.state_slots.tolist()
        else:
            world.open_request(handed.state_slots)
        count += 1
    return count


def give_slots_back(world: World) -> None:
    """Requests that share nothing free their state slots but the running ones."""
    slots = [slot for request in world.requests for slot in request.state_slots[1:]]
    if world.state is None or not slots:
        return
    world.free(world.state, np.array(slots, np.int64))
    for request in world.requests:
        del request.state_slots[1:]
