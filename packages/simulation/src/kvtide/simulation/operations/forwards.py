"""Forwards: launched and recorded, processed in order some time later, or given up; and flushes, which go on beside them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np

from kvtide.chain import Taken
from kvtide.ledger import InvariantError
from kvtide.simulation.actions import Numbers
from kvtide.simulation.claims import held_places, moved_holds
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.operations.choices import draw_bits, some_of
from kvtide.simulation.operations.phrases import UNDER, phrases, under
from kvtide.simulation.rank import Rank
from kvtide.simulation.requests import BatchEntry
from kvtide.simulation.world import World

MANY_MOVES = 1_000
"""More than an arena here has units."""

_LEFT = ("none left in flight", "one left in flight", "two left in flight", "three or more left in flight")
_PROGRESS = ("before its launch", "after its launch", "with work queued")


class LaunchForward:
    """The open batch runs, and beside it some requests that only read and go on from their state."""

    name = "launch"
    weight = 200
    outcomes = phrases(
        ("launched", "launched to read"), ("", ", writes unknown", ", pages asked for meanwhile")
    ) | {
        "too many in flight",
        "another micro-batch has a request of it",
        "nothing to run",
    }

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """In which bands writes are unknown, whether the result is copied, who asks for pages meanwhile, who reads."""
        if not world.requests or len(world.flying) >= world.scenario.overlap:
            return None
        if not world.batch.entries and rng.random() < 0.5:
            return None
        return {
            "unknown": rng.choice((0, 0, 0, draw_bits(rng))),
            "completion": rng.randrange(2),
            "probe": rng.choice((0, 0, 0, 0, 0, 0, 1, 2)),
            "readers": draw_bits(rng, len(world.requests)),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Launch, record, hold back uploads."""
        if len(world.flying) >= world.scenario.overlap:
            return "too many in flight"
        outcome = "launched" if world.batch.entries else "launched to read"
        if not world.batch.entries:
            # A batch whose requests are all over has nothing to run; what it took is zeroed after all.
            world.abandon()
        waiting = [request for request in world.requests if request not in world.batch]
        if world.scenario.micro_batches:
            if any(world.forwards_over(entry.request) for entry in world.batch.entries):
                return "another micro-batch has a request of it"
            waiting = [request for request in waiting if not world.forwards_over(request)]
        entries = world.batch.entries + [
            BatchEntry(request, request.length, request.length)
            for request in some_of(waiting, numbers["readers"])
        ]
        if not entries:
            return "nothing to run"
        unknown = some_of(world.bands, numbers["unknown"])
        probe = (None, _take_while_open, _free_while_open)[numbers["probe"] % 3]
        world.launch(
            entries,
            unknown=unknown,
            has_completion=bool(numbers["completion"]),
            while_open=None if probe is None else partial(probe, world),
        )
        if probe is not None:
            return f"{outcome}, pages asked for meanwhile"
        return f"{outcome}, writes unknown" if unknown else outcome


class ProcessForward:
    """The host looks at the oldest forward's result; then, as an overlap loop does, perhaps flushes while the next one runs."""

    name = "process"
    weight = 100
    outcomes = phrases("processed, ", (*_LEFT, *phrases("flushed, ", UNDER))) | {"nothing in flight"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """At most how many moves a band the flush makes; 0 for no flush."""
        if not world.flying or (len(world.flying) < world.scenario.overlap and rng.random() < 0.7):
            return None
        return {"flush": rng.choice((0, 2, MANY_MOVES))}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Wait, process, let pending pages return, flush."""
        if not world.flying:
            return "nothing in flight"
        world.process()
        if numbers["flush"] and flush(world, numbers["flush"]) > 0:
            return f"processed, flushed, {under(world.flying)}"
        return f"processed, {_LEFT[min(len(world.flying), len(_LEFT) - 1)]}"


class Flush:
    """Holes are closed while there is nothing better to do, under whatever forwards run."""

    name = "flush"
    weight = 40
    outcomes = phrases("moved, ", UNDER) | {"nothing to move"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """At most how many moves a band; where an end has a hole."""
        bands = world.ranks[0].chain.statistics().bands
        if not (bands[0].hole_units or bands[-1].hole_units):
            return None
        return {"moves": rng.choice((1, 2, 5, MANY_MOVES))}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Flush."""
        if not flush(world, numbers["moves"]):
            return "nothing to move"
        return f"moved, {under(world.flying)}"


def flush(world: World, most_moves: int) -> int:
    """Flush every rank; units moved. A wait ends the run, and a move of held units.

    What a flush could wait for is a forward in flight, or a copy whose stream stands behind one.
    """
    held = held_places(world.uses, world.ranks[0])
    before = [(rank.steps.retired_through, rank.schedule_waits) for rank in world.ranks]
    moved = world.on_each("a flush", lambda rank: rank.chain.flush_opportunistic(most_moves))[0]
    for rank, (retired, wait_count) in zip(world.ranks, before, strict=True):
        if rank.steps.retired_through != retired:
            raise CheckFailedError(
                "needless_wait",
                f"a flush waits for forward {rank.steps.retired_through} on rank {rank.place}",
            )
        if rank.schedule_waits != wait_count:
            raise CheckFailedError(
                "needless_wait", f"a flush makes the schedule stream of rank {rank.place} wait"
            )
    for use in moved_holds(held, world.ranks[0]):
        raise CheckFailedError("disturbed_use", f"a flush for gain moves units that {use.name} holds")
    return moved


class AbortForward:
    """The open batch is given up: before its launch, after it, or with its metadata phase queued."""

    name = "abort"
    weight = 16
    outcomes = frozenset({"no batch", *_PROGRESS})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """How far it has come."""
        return {"progress": rng.randrange(3)} if world.batch.entries else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Abort, pay the debts."""
        if not world.batch.entries:
            return "no batch"
        progress = numbers["progress"] % len(_PROGRESS)
        world.abandon(is_launched=progress > 0, has_metadata=progress > 1)
        return _PROGRESS[progress]


def _take_while_open(world: World, rank: Rank) -> None:
    _expect_invariant("a take", lambda: rank.chain.take(pages=1 if world.attention else 0))


def _free_while_open(world: World, rank: Rank) -> None:
    band = world.bands[-1]
    held = np.flatnonzero(world.shadow.bound[band.name])[:1]
    if band.is_state:
        _expect_invariant("a free", lambda: rank.chain.free_state_slots(held))
    else:
        _expect_invariant("a free", lambda: rank.chain.free_pages(band.name, held))


def _expect_invariant(what: str, call: Callable[[], object]) -> None:
    try:
        answer = call()
    except InvariantError:
        return
    found = "served" if isinstance(answer, Taken) or answer is None else "refused"
    raise CheckFailedError(
        "misuse_accepted", f"{what} between a forward's launch and its recording is {found}"
    )
