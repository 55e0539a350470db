"""States that the exhaustive search takes for one, though reached otherwise, and what may become of a state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from kvtide.simulation.exhaustive import SHAPES, Action
from kvtide.simulation.exhaustive.small_actions import actions, leaves_alone
from kvtide.simulation.exhaustive.small_steps import step
from kvtide.simulation.exhaustive.small_world import Facts, SmallWorld
from kvtide.simulation.failures import failure_of

Future: TypeAlias = dict[Action, tuple[str, int]]
"""Action → what becomes of it, and the digest of the state behind it; the check and 0 where it fails."""


class Merged(NamedTuple):
    """Two states of one digest."""

    first: tuple[Action, ...]
    """The sequence that the search goes on from."""

    other: tuple[Action, ...]
    """One that it does not."""

    first_future: Future
    other_future: Future


def merged_states(shape: str, depth: int, *, one_in: int = 1) -> Iterator[Merged]:
    """Every sequence of at most `depth` actions, each of which does something, that leads where an earlier one has led.

    Of the longest, one in `one_in`.
    """
    longest = 0
    root = SmallWorld(Facts(SHAPES[shape]))
    known: dict[int, tuple[tuple[Action, ...], SmallWorld]] = {root.digest(): ((), root)}
    futures: dict[int, Future] = {}
    layer = [((), root)]
    for _ in range(depth):
        following = []
        for sequence, world in layer:
            for action in list(actions(world)):
                if leaves_alone(world, action):
                    continue
                after = world.clone()
                step(after, action)
                digest, path = after.digest(), (*sequence, action)
                if digest not in known:
                    known[digest] = path, after
                    following.append((path, after))
                    continue
                if len(path) == depth:
                    longest += 1
                    if longest % one_in:
                        continue
                first, representative = known[digest]
                if digest not in futures:
                    futures[digest] = future_of(representative)
                yield Merged(first, path, futures[digest], future_of(after))
        layer = following


def future_of(world: SmallWorld) -> Future:
    """What a correct scheduler may do, in its order, and what becomes of each."""
    future: Future = {}
    for action in list(actions(world)):
        after = world.clone()
        try:
            future[action] = step(after, action), after.digest()
        except Exception as error:  # noqa: BLE001 - a fault that only one of two states shows is what is looked for
            future[action] = failure_of(error, 0).check, 0
    return future
