"""Operations on what the tree holds: it makes room for others, and others read, send and fix what it may let go of meanwhile."""

from __future__ import annotations

import random

import numpy as np

from kvtide.simulation import (
    UNDER,
    Kind,
    Numbers,
    Part,
    Stage,
    World,
    announce,
    back_up,
    draw_bits,
    draw_units,
    fix,
    parts_of,
    phrases,
    some_of,
    some_places,
    under,
)
from kvtide.storage.simulated.crowding import fix_checkpoints, take_slots
from kvtide.storage.simulated.joining import sharers_of

MOST_USES = 3
"""Of one kind at a time."""

_KINDS = (Kind.BACKUP, Kind.SEND, Kind.FIX)


class MakeRoom:
    """Somebody needs room, a load or a receive perhaps: the tree lets go of as much as it takes, and no more."""

    name = "tree: make room"
    weight = 40
    outcomes = phrases("evicted, ", UNDER) | {"no tree", "had room", "cannot"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Units of each band, by place."""
        sharers = sharers_of(world)
        return draw_units(rng, world) if sharers is not None and sharers.units_of_tree() else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Evict until it fits."""
        sharers = sharers_of(world)
        if sharers is None:
            return "no tree"
        asked = {band.name: numbers.get(f"band {place}", 0) for place, band in enumerate(world.bands)}
        answer = sharers.make_room(asked)
        if answer is None:
            return "had room"
        if not answer:
            return "cannot"
        world.ask(asked)
        return f"evicted, {under(world.flying)}"


class ReadNodes:
    """Units of the tree are copied to host memory, sent, or fixed: it may let go of them under the copy, and not under the others."""

    name = "tree: use nodes"
    weight = 30
    outcomes = phrases([kind.value for kind in _KINDS], ", ", UNDER) | {"enough of them", "nothing to use"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """What is done, in which bands, to which units."""
        sharers = sharers_of(world)
        if sharers is None or not sharers.units_of_tree():
            return None
        return {
            "use": rng.choice((0, 0, 1, 2)),
            "bands": draw_bits(rng, len(world.bands)),
            "bits": draw_bits(rng),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Begin, or announce."""
        kind = _KINDS[numbers["use"] % len(_KINDS)]
        stage = Stage.ANNOUNCED if kind is Kind.SEND else Stage.OPEN
        if len(world.uses.of(kind, stage)) >= 2 * MOST_USES:
            return "enough of them"
        parts = _parts(world, numbers)
        if not parts:
            return "nothing to use"
        use = world.uses.open(kind, parts, stage=stage)
        if kind is Kind.BACKUP:
            back_up(world, use)
        elif kind is Kind.SEND:
            announce(world, use)
        else:
            fix(world, use)
        return f"{kind.value}, {under(world.flying)}"


class Empty:
    """The tree lets go of all that no request needs, as when a cache is reset; forwards in flight read some of it."""

    name = "tree: empty"
    weight = 6
    outcomes = phrases("emptied, ", UNDER) | {"no tree"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """No number."""
        sharers = sharers_of(world)
        return {} if sharers is not None and sharers.units_of_tree() else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Evict."""
        sharers = sharers_of(world)
        if sharers is None:
            return "no tree"
        sharers.empty()
        return f"emptied, {under(world.flying)}"


class Crowd:
    """Others take every state slot that is left, and all that the tree can spare, while checkpoints are due: both stalls come of it.

    What is about to be handed over can be fixed too, so that the tree may not let go of it for the slot that replaces it.
    """

    name = "tree: crowd"
    weight = 40
    outcomes = phrases("crowded, ", ("some", "none"), " left", ("", ", checkpoints on their way fixed")) | {
        "nobody"
    }

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Who takes them, and whether checkpoints on their way are fixed."""
        sharers = sharers_of(world)
        if sharers is None or world.state is None or not sharers.has_checkpoint_due():
            return None
        return {"request": rng.randrange(16), "fixes": rng.choice((0, 1, 1))}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Fix, then evict and take slot by slot."""
        sharers = sharers_of(world)
        if sharers is None or world.state is None:
            return "nobody"
        is_fixed = bool(numbers["fixes"]) and fix_checkpoints(world, sharers)
        taken = take_slots(world, sharers, numbers["request"])
        return f"crowded, {'some' if taken else 'none'} left{', checkpoints on their way fixed' if is_fixed else ''}"


def _parts(world: World, numbers: Numbers) -> tuple[Part, ...]:
    sharers = sharers_of(world)
    if sharers is None:
        return ()
    held = sharers.held_by_tree()
    chosen = {}
    for band in some_of(world.bands, numbers["bands"]):
        units = held[band.name]
        chosen[band.name] = units[some_places(len(units), numbers["bits"])]
    return parts_of(world.shadow, world.bands, {name: np.unique(units) for name, units in chosen.items()})
