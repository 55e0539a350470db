"""Sends and receives by an engine outside every stream: announced behind a gate, begun, failed (rows T1-T6)."""

from __future__ import annotations

import random

from kvtide.ledger import ReceiveHold
from kvtide.simulation import use_rules, use_steps
from kvtide.simulation.actions import Numbers
from kvtide.simulation.handed import HOW
from kvtide.simulation.operations.choices import ALL, draw_bits, one_of, some_of
from kvtide.simulation.operations.forwards import MANY_MOVES, flush
from kvtide.simulation.operations.host_copies import take_whole
from kvtide.simulation.operations.named_units import (
    able,
    able_to_leave,
    everything,
    named_parts,
    settled,
)
from kvtide.simulation.operations.phrases import UNDER, phrases, under
from kvtide.simulation.rank import Rank
from kvtide.simulation.requests import Request
from kvtide.simulation.uses import Kind, Part, Stage, Use, parts_of
from kvtide.simulation.world import World

MOST_TRANSFERS = 5
"""Of one kind at one stage."""

STILL_READ = "held, a forward may still read there"
"""What a receive says whose ids may not leave yet."""

ITS_REQUEST = ", its request over"
"""Tail of an outcome that ends the request, too, that a transfer is the last of."""


class Send:
    """A peer is to read units: finished pages of requests that run on, or all of one that has computed its last token here."""

    name = "send"
    weight = 60
    outcomes = frozenset({"nothing to send", "announced", "announced, the request's last"})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose, in which bands, which; whether it is a request's last."""
        if len(world.uses.of(Kind.SEND, Stage.ANNOUNCED)) >= MOST_TRANSFERS:
            return None
        last = rng.randrange(2)
        requests = able_to_leave(world) if last else able(world, settled)
        if not requests:
            return None
        return {
            "requests": draw_bits(rng, len(requests)),
            "bands": rng.choice((ALL, draw_bits(rng, len(world.bands)))),
            "bits": rng.choice((ALL, draw_bits(rng))),
            "last": last,
            "closes": rng.randrange(2),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Record its gates."""
        if numbers["last"]:
            requests, choice = some_of(able_to_leave(world), numbers["requests"])[:1], everything
        else:
            requests, choice = some_of(able(world, settled), numbers["requests"]), settled
        parts = named_parts(world, requests, choice, numbers["bands"], numbers["bits"])
        if not parts:
            return "nothing to send"
        if numbers["last"]:
            leave(world, requests[0], parts, closes=bool(numbers.get("closes")))
            return "announced, the request's last"
        use_steps.announce(world, world.uses.open(Kind.SEND, parts, stage=Stage.ANNOUNCED))
        return "announced"


class Receive:
    """Units are taken for what a peer will write, and held until it is told of them."""

    name = "receive"
    weight = 40
    outcomes = phrases("held, ", HOW) | {"no row free", "refused", STILL_READ}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """How many pages, or fewer if so many do not fit, whether all of them will be written, whether an idle loop has flushed before."""
        if not world.attention or not world.free_rows:
            return None
        if len(world.uses.of(Kind.RECEIVE, Stage.ANNOUNCED)) >= MOST_TRANSFERS:
            return None
        return {
            "pages": rng.choice((rng.randrange(3), rng.randrange(24))),
            "yields": rng.choice((0, 1, 1)),
            "promise": rng.choice((0, 1, 1)),
            "flush": rng.choice((0, 0, 1)),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Take, hold, and record a gate if no forward may read the units any more."""
        if not world.attention or not world.free_rows:
            return "no row free"
        if numbers.get("flush"):
            flush(world, MANY_MOVES)
        handed = take_whole(world, numbers)
        if handed is None:
            return "refused"
        request = world.open_request(handed.state_slots)
        world.append_pages(request, handed.pages)
        parts = parts_of(world.shadow, world.bands, handed.units)
        use = world.uses.open(Kind.RECEIVE, parts, taken=handed.taken)
        return f"held, {handed.how}" if hold(world, use, request) else STILL_READ


class BeginTransfer:
    """An announced transfer begins, once every rank's host has seen its gate and nothing has moved since."""

    name = "begin transfer"
    weight = 200
    outcomes = phrases(
        ("send: ", "receive: "),
        ("moved, gated anew", "gate not seen by every rank", *phrases("begun, ", (*UNDER, "flushed over"))),
    ) | {
        "none announced",
        "send: freed before it began",
        "receive: a forward may still read there",
        "receive: gated",
    }

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Which, and whether a loop that has nothing else to do flushes next: what is sent may move."""
        if not _announced(world):
            return None
        return {"transfer": rng.randrange(16), "flush": rng.randrange(2)}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Look at the gates; begin, or record them anew."""
        transfers = _announced(world)
        if not transfers:
            return "none announced"
        use = one_of(transfers, numbers["transfer"])
        held = [part.still_held(world.shadow) for part in use.parts]
        if not all(each.all() for each in held):
            # Only a send of a request that runs on: its pages went with a window, or with the request.
            world.uses.close(use)
            return f"{use.kind.value}: freed before it began"
        if not use.gates or use_rules.has_moved(world, use):
            was_gated = bool(use.gates)
            if not use_steps.announce(world, use):
                return f"{use.kind.value}: a forward may still read there"
            return f"{use.kind.value}: {'moved, gated anew' if was_gated else 'gated'}"
        if not use_rules.passed_gates(world, use):
            return f"{use.kind.value}: gate not seen by every rank"
        use_steps.begin_transfer(world, use)
        if numbers["flush"] and flush(world, MANY_MOVES) > 0:
            return f"{use.kind.value}: begun, flushed over"
        return f"{use.kind.value}: begun, {under(world.flying)}"


class Fail:
    """A transfer fails on some rank: all of them leave what it touches alone from now on. A request whose receive failed is over."""

    name = "fail"
    weight = 16
    outcomes = (
        phrases("send quarantined", (*use_steps.FATES, *phrases(use_steps.FATES_OF_PARKED, ITS_REQUEST)))
        | phrases("receive quarantined", (use_steps.FREED, ITS_REQUEST))
        | {"none open"}
    )

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Which, and whether its request ends before or after ranks agree that it failed."""
        return {"transfer": rng.randrange(16), "first": rng.randrange(2)} if _open(world) else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Quarantine it."""
        transfers = _open(world)
        if not transfers:
            return "none open"
        use = one_of(transfers, numbers["transfer"])
        fate = use_steps.fate_of(world, use)
        request = world.unpark(use)
        if request is not None and numbers["first"]:
            world.close([request])
        use_steps.quarantine(world, use)
        if request is not None and not numbers["first"]:
            world.close([request])
        return f"{use.kind.value} quarantined{fate}{ITS_REQUEST if request is not None else ''}"


def leave(world: World, request: Request, parts: tuple[Part, ...], *, closes: bool = False) -> Use:
    """Announce a request's last send: the request waits until the peer has what it sends, or it is called off.

    With `closes` it is over as soon as a relief has waited for the send.
    """
    use = world.uses.open(Kind.SEND, parts, stage=Stage.ANNOUNCED, closes=closes)
    world.park(use, request)
    use_steps.announce(world, use)
    return use


def hold(world: World, use: Use, request: Request) -> bool:
    """Hold a receive's units until their ids may leave, and let its request wait; false while a forward may still read them."""
    use.stage = Stage.ANNOUNCED
    use_steps.check_leaves_alone(world, use)

    def hold_on(rank: Rank) -> None:
        use.owners.append(ReceiveHold(use.name))
        rank.chain.uses.hold(use.owners[-1], use.units)

    world.on_each("a hold", hold_on)
    world.park(use, request)
    return use_steps.announce(world, use)


def _announced(world: World) -> list[Use]:
    return [use for use in world.uses.uses if use.kind.is_transfer and use.stage is Stage.ANNOUNCED]


def _open(world: World) -> list[Use]:
    return [use for use in world.uses.uses if use.is_open_transfer]
