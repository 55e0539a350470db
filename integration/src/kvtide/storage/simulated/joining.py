"""How operations find the sharers of a world."""

from __future__ import annotations

from kvtide.simulation import World
from kvtide.storage.simulated.settings import settings_of
from kvtide.storage.simulated.sharers import Sharers


def can_share(world: World) -> bool:
    """Whether the storage runs such bands."""
    return settings_of(world.scenario) is not None


def sharers_of(world: World, *, joins: bool = False) -> Sharers | None:
    """The world's; `None` while nobody has joined, unless they are to join now and the storage runs such bands."""
    for holder in world.holders:
        if isinstance(holder, Sharers):
            return holder
    settings = settings_of(world.scenario) if joins else None
    if settings is None:
        return None
    sharers = Sharers(world, settings)
    world.holders.append(sharers)
    return sharers
