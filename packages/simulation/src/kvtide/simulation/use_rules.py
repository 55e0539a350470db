"""Rules of whoever copies, sends and receives, each in a function of its own, so that it can be broken on purpose.

| rule | broken, it shows as |
| - | - |
| `stand_behind`: a copy stream waits for the forward and schedule streams before it copies | unordered_overlap |
| `follow_loads`: a backup waits for loads of what it reads | unordered_overlap |
| `hand_over`: a load's copy is recorded before its reservation ends | lost_write, unordered_overlap |
| `record_gate`, `passed_gates`: a transfer begins once every host has seen its gate | unordered_overlap |
| `has_moved`: and only if its units have not moved since | unordered_overlap |
| `is_over`, `see_the_end`: a use ends once it is over on every rank | lost_write, unordered_overlap |
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.device import ModelledEvent, ModelledStream
from kvtide.ledger import HostCopy
from kvtide.simulation.rank import Rank
from kvtide.simulation.uses import Use
from kvtide.simulation.world import World


def stand_behind(rank: Rank, stream: ModelledStream) -> None:
    """Ids were translated on the host, ahead of what both streams still have to run."""
    device = rank.device
    for other in (device.forward_stream, device.schedule_stream):
        device.wait_event(stream, device.record_event(other))


def follow_loads(rank: Rank, loads: Sequence[Use]) -> None:
    """A backup of what loads fill comes behind them."""
    for load in loads:
        rank.device.wait_event(rank.backups, load.ends[rank.place])


def hand_over(rank: Rank, use: Use, copy: HostCopy) -> None:
    """From reservation to copy, with no moment in between."""
    rank.chain.uses.begin(copy, use.units)
    rank.chain.uses.unfix(use.owners[rank.place])


def record_gate(rank: Rank) -> ModelledEvent:
    """Behind the take's waits, zeroing and moves: seen, the units' bytes are nobody else's."""
    return rank.device.record_event(rank.device.schedule_stream)


def passed_gates(world: World, use: Use) -> bool:
    """Whether every rank's host has seen its gate."""
    seen = [rank.device.query_event(use.gates[rank.place]) for rank in world.ranks]
    return all(seen)


def is_over(world: World, use: Use) -> bool:
    """Whether every rank's host sees the end: they agree on it, so that they act alike."""
    seen = [rank.device.query_event(use.ends[rank.place]) for rank in world.ranks]
    return all(seen)


def see_the_end(world: World, use: Use) -> None:
    """Every rank's host waits until a failed transfer's engine is done."""
    for rank in world.ranks:
        rank.device.wait_on_host(use.ends[rank.place])


def has_moved(world: World, use: Use) -> bool:
    """Whether anything of its bands has moved since its gates were recorded: a unit may also have come back to where it was."""
    return moves_of(world, use) != use.moves


def moves_of(world: World, use: Use) -> dict[str, int]:
    """Units moved in each of its bands since the start."""
    bands = world.ranks[0].chain.statistics().bands
    return {band.name: band.moved_units for band in bands if band.name in use.units}
