"""Which units of a request a copy or a transfer may name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from kvtide.device import IntArray
from kvtide.simulation.actions import Numbers
from kvtide.simulation.bands import NONE, SimulatedBand
from kvtide.simulation.operations.choices import draw_bits, some_of, some_places
from kvtide.simulation.requests import Request
from kvtide.simulation.uses import Kind, Part, Stage, parts_of
from kvtide.simulation.world import World

Choice = Callable[[World, Request, SimulatedBand], IntArray]


def finished(world: World, request: Request, band: SimulatedBand) -> IntArray:
    """Whole pages behind the request's last token and kept checkpoints: no later forward writes them."""
    if band.is_state:
        entry = world.batch.entry_of(request)
        written = () if entry is None else entry.written_slots
        units = np.array([slot for slot in request.state_slots[1:] if slot not in written], np.int64)
    else:
        units = request.sub_pages(band)
        units = units[(np.arange(len(units)) + 1) * band.page_tokens <= request.length]
    return defined(world, band, units)


def settled(world: World, request: Request, band: SimulatedBand) -> IntArray:
    """Finished pages whose writers the host has seen the end of. A checkpoint may be copied over, and is none."""
    return NONE if band.is_state else seen_by_host(world, band, finished(world, request, band))


def everything(world: World, request: Request, band: SimulatedBand) -> IntArray:
    """All that a request holds and that means something, of which the host has seen the writers' end."""
    return seen_by_host(world, band, live(world, request, band))


def live(world: World, request: Request, band: SimulatedBand) -> IntArray:
    """All that a request holds and that means something."""
    return defined(world, band, request.bound(band, world.shadow))


def refillable(world: World, request: Request, band: SimulatedBand) -> IntArray:
    """All that a request holds and that means something, but for what a peer has been promised."""
    units = live(world, request, band)
    return units[~world.uses.covers(Kind.SEND, band, units, Stage.ANNOUNCED)]


def defined(world: World, band: SimulatedBand, units: IntArray) -> IntArray:
    """Those that are bound and that nobody has yet to write whole."""
    shadow = world.shadow
    return units[shadow.bound[band.name][units] & ~shadow.undefined[band.name][units]]


def seen_by_host(world: World, band: SimulatedBand, units: IntArray) -> IntArray:
    """Those that no forward in flight and no open load writes."""
    for writes in world.flying_writes:
        units = units[~np.isin(units, writes.get(band.name, NONE))]
    return units[~world.uses.covers(Kind.LOAD, band, units)]


def able(world: World, choice: Choice) -> list[Request]:
    """Requests of which `choice` allows anything."""
    return [
        request
        for request in world.requests
        if any(len(choice(world, request, band)) for band in world.bands)
    ]


def able_to_leave(world: World) -> list[Request]:
    """Requests with something to send that no forward includes, neither in flight nor the next one."""
    return [one for one in able(world, everything) if is_idle(world, one)]


def able_to_be_refilled(world: World) -> list[Request]:
    """Requests with something that could be written anew; a peer's write is behind no forward, so none includes them."""
    return [one for one in able(world, refillable) if one.length and is_idle(world, one)]


def is_idle(world: World, request: Request) -> bool:
    """Whether no forward includes it, neither one in flight nor the next."""
    return request not in world.batch and not world.forwards_over(request)


def draw_names(rng: random.Random, world: World, choice: Choice) -> Numbers | None:
    """Numbers that name some of what `choice` allows of some requests; `None` where that is nothing."""
    requests = able(world, choice)
    if not requests:
        return None
    return {
        "requests": draw_bits(rng, len(requests)),
        "bands": draw_bits(rng, len(world.bands)),
        "bits": draw_bits(rng),
    }


def named(world: World, choice: Choice, numbers: Numbers) -> tuple[Part, ...]:
    """What such numbers name."""
    requests = some_of(able(world, choice), numbers["requests"])
    return named_parts(world, requests, choice, numbers["bands"], numbers["bits"])


def named_parts(
    world: World, requests: Sequence[Request], choice: Choice, bands: int, bits: int
) -> tuple[Part, ...]:
    """What `choice` allows of some requests, in the bands and at the places whose bits are set."""
    units = {}
    for band in some_of(world.bands, bands):
        allowed = np.concatenate([*(choice(world, request, band) for request in requests), NONE])
        units[band.name] = allowed[some_places(len(allowed), bits)]
    return parts_of(world.shadow, world.bands, units)
