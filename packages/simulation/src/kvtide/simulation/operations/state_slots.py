"""State slots that are copied: forks, checkpoints, and going on from a checkpoint.

A copy runs on the schedule stream, behind the forwards that may write its source or its target; the request goes on at once.
"""

from __future__ import annotations

import random

import numpy as np

from kvtide.simulation.actions import Numbers
from kvtide.simulation.handed import HOW
from kvtide.simulation.operations.choices import draw_bits, one_of, some_of
from kvtide.simulation.operations.phrases import UNDER, phrases, under
from kvtide.simulation.world import World


class Fork:
    """A new request starts from another's state."""

    name = "fork"
    weight = 4
    outcomes = phrases("copied, ", UNDER) | {"nobody", "refused"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """From whose."""
        can = world.state is not None and world.requests and world.free_rows
        return {"request": rng.randrange(16)} if can else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Take a slot, copy the state into it, open a row."""
        if world.state is None or not world.requests or not world.free_rows:
            return "nobody"
        source = one_of(world.requests, numbers["request"])
        handed = world.take(state_slots=1)
        if handed is None:
            return "refused"
        world.copy_state(np.array(source.state_slots[:1], np.int64), handed.state_slots)
        world.open_request(handed.state_slots)
        return f"copied, {under(world.forwards_over(source))}"


class Checkpoint:
    """Requests keep a copy of their running state, all in one copy: in a fresh slot, or over their latest checkpoint."""

    name = "checkpoint"
    weight = 5
    outcomes = (
        phrases("copied over", ("", ", in the open batch")) | phrases("kept, ", HOW) | {"nobody", "refused"}
    )

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose, and whether over the latest one."""
        if world.state is None or not world.requests:
            return None
        return {"requests": draw_bits(rng, len(world.requests)), "over": rng.choice((0, 0, 1))}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Take as many slots, unless there are some, and copy."""
        requests = some_of(world.requests, numbers["requests"])
        if numbers["over"]:
            requests = [
                one
                for one in requests
                if len(one.state_slots) > 1 and world.may_be_written(one.state_slots[-1])
            ]
        if world.state is None or not requests:
            return "nobody"
        running = np.array([request.state_slots[0] for request in requests], np.int64)
        if numbers["over"]:
            world.copy_state(running, np.array([request.state_slots[-1] for request in requests], np.int64))
            is_prepared = any(request in world.batch for request in requests)
            return "copied over, in the open batch" if is_prepared else "copied over"
        handed = world.take(state_slots=len(requests))
        if handed is None:
            return "refused"
        world.copy_state(running, handed.state_slots)
        for request, slot in zip(requests, handed.state_slots.tolist(), strict=True):
            request.state_slots.append(slot)
        return f"kept, {handed.how}"


class Restore:
    """A request goes on from its latest checkpoint: copied over its running slot, or into a fresh one that replaces it."""

    name = "restore"
    weight = 4
    outcomes = phrases(("copied over, ", "restored, "), UNDER) | {"no checkpoint", "refused"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose, and whether over the running slot."""
        kept = any(len(request.state_slots) > 1 for request in world.requests)
        return {"request": rng.randrange(16), "over": rng.randrange(2)} if kept else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Copy; or take, copy, and free the slot that it ran in."""
        kept = [
            one
            for one in world.requests
            if len(one.state_slots) > 1
            and one not in world.batch
            and world.may_be_written(one.state_slots[0])
        ]
        if world.state is None or not kept:
            return "no checkpoint"
        request = one_of(kept, numbers["request"])
        checkpoint, running = (np.array([request.state_slots[place]], np.int64) for place in (-1, 0))
        when = under(world.forwards_over(request))
        if numbers["over"]:
            world.copy_state(checkpoint, running)
            return f"copied over, {when}"
        handed = world.take(state_slots=1)
        if handed is None:
            return "refused"
        world.copy_state(checkpoint, handed.state_slots)
        world.free(world.state, running)
        request.state_slots[0] = int(handed.state_slots[0])
        return f"restored, {when}"
