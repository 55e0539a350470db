"""How copies, sends and receives are carried out on every rank: what is queued, what the ledger is told, in which order.

The rules that order them stand in `use_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtide.device import Buffer, ByteSpan, ModelledEvent, ModelledStream, RunningWork
from kvtide.ledger import (
    Access,
    Clearance,
    Consumer,
    HostCopy,
    NetworkTransfer,
    clearance,
    queue_stream_waits,
)
from kvtide.simulation import use_rules
from kvtide.simulation.bands import NONE
from kvtide.simulation.claims import places_of
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.rank import Rank
from kvtide.simulation.shadow import check_words
from kvtide.simulation.uses import Kind, Part, Stage, Use
from kvtide.simulation.world import World

KEPT, FREED, FENCED, MOVED = FATES = (
    "",
    ", freed under it",
    ", freed under it, its units were fenced",
    ", moved elsewhere meanwhile",
)
"""What may become of a use's units until it ends, as tails of outcomes."""

FATES_OF_PARKED = (KEPT, MOVED)
"""Of the units of a request that waits for the use: nobody frees them."""

# ── host copies ──


def back_up(world: World, use: Use) -> None:
    """Queue a copy to host memory."""
    use.words = {part.band.name: world.shadow.words[part.band.name][part.units] for part in use.parts}
    loads = [
        load
        for load in world.uses.of(Kind.LOAD, Stage.OPEN)
        if any(np.isin(part.units, load.units.get(part.band.name, [])).any() for part in use.parts)
    ]

    def queue(rank: Rank) -> None:
        use_rules.stand_behind(rank, rank.backups)
        use_rules.follow_loads(rank, loads)
        reads, buffer, run = _reading(rank, use)
        rank.device.submit(rank.backups, use.name, reads=reads, writes=[_whole(buffer)], run=run)
        copy = HostCopy(use.name, Access.READ, rank.device.record_event(rank.backups))
        rank.chain.uses.begin(copy, use.units)
        _opened(use, copy, rank.device.record_event(rank.backups))

    world.on_each("a backup", queue)
    note_places(world, use)


def submit_load(world: World, use: Use) -> None:
    """Queue the copy that fills a load's units; its request may run from now on, behind it."""
    _draw_words(world, use)

    def queue(rank: Rank) -> None:
        copy = _queue_load(rank, use, rank.loads)
        use_rules.hand_over(rank, use, copy)
        assert use.taken is not None, "a load has taken its units"
        rank.chain.written(use.taken[rank.place])
        use.owners[rank.place] = copy

    world.on_each("a load", queue)
    use.stage = Stage.OPEN
    world.written_whole(use)
    world.unpark(use)


def refill(world: World, use: Use) -> None:
    """Queue a copy onto units that were there before, behind what the ledger says of a load."""
    check_leaves_alone(world, use)
    _draw_words(world, use)

    def queue(rank: Rank) -> None:
        for name, found in _clearances(rank, use, Consumer.HOST_LOAD).items():
            queue_stream_waits(found, rank.chain.ledger(name), rank.device, rank.refills)
        use.owners.append(_queue_load(rank, use, rank.refills))
        rank.chain.uses.begin(use.owners[-1], use.units)

    world.on_each("a load onto what was there", queue)
    note_places(world, use)
    world.written_whole(use)


def make_way(world: World, consumer: Consumer, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Those of some live units that `consumer` may write; the host has waited for transfers that touch them."""
    allowed, waits = [], set()
    for part in parts:
        rank = world.ranks[0]
        places = rank.chain.physical_units(part.band.name, part.units)
        found = clearance(consumer, rank.chain.ledger(part.band.name), places)
        stays = np.isin(places, found.excluded)
        if not stays.all():
            allowed.append(Part(part.band, part.units[~stays], part.tenures[~stays]))
        waits |= {transfer.name for transfer in found.host_waits}
    for use in [use for use in world.uses.uses if use.is_open_transfer and use.name in waits]:
        for rank in world.ranks:
            rank.device.wait_on_host(use.ends[rank.place])
        world.facts[f"{use.kind.value}s waited for"] += 1
        end(world, use)
    return tuple(allowed)


def check_leaves_alone(world: World, use: Use) -> None:
    """Raise `CheckFailedError` where what is about to be written anew has been promised to stay, or is in quarantine."""
    chain = world.ranks[0].chain
    for other in world.uses.uses:
        if other is use or not other.is_fixed:
            continue
        for part in use.parts:
            places = chain.physical_units(part.band.name, part.units)
            met = places[np.isin(places, other.places.get(part.band.name, NONE))]
            if len(met):
                raise CheckFailedError(
                    "disturbed_use",
                    f"{use.name} is about to write units {met.tolist()} of band {part.band.name!r}, which stay for {other.name} "
                    f"({other.stage.value})",
                )


# ── transfers ──


def announce(world: World, use: Use) -> bool:
    """Record the gates behind which the units' bytes are nobody else's; false while a forward may still read a receive's."""
    use.gates = []
    if use.kind is Kind.RECEIVE:
        use.publish_after = max(world.on_each("clearing a receive", lambda rank: _clear_receive(rank, use)))
        if use.publish_after > world.ranks[0].steps.retired_through:
            return False
    note_places(world, use)
    use.moves = use_rules.moves_of(world, use)
    use.gates = [use_rules.record_gate(rank) for rank in world.ranks]
    return True


def begin_transfer(world: World, use: Use) -> None:
    """Let the engine read, or the peer write, from now on and behind nothing but what the host has seen."""
    is_send = use.kind is Kind.SEND
    if is_send:
        use.words = {part.band.name: world.shadow.words[part.band.name][part.units] for part in use.parts}
    else:
        _draw_words(world, use)

    def begin(rank: Rank) -> None:
        transfer = NetworkTransfer(use.name, Access.READ if is_send else Access.WRITE)
        if is_send:
            reads, buffer, run = _reading(rank, use)
            end = rank.device.start_transfer(use.name, reads=reads, writes=[_whole(buffer)], run=run)
        else:
            writes, run = _writing(rank, use)
            end = rank.device.start_transfer(use.name, writes=writes, run=run)
        rank.chain.uses.begin(transfer, use.units)
        if not is_send:
            rank.chain.uses.release_hold(use.owners[rank.place])
            use.owners[rank.place] = transfer
            if use.taken is not None:
                rank.chain.written(use.taken[rank.place])
            use.ends.append(end)
        else:
            _opened(use, transfer, end)
        rank.transfers[transfer] = end

    world.on_each("a transfer", begin)
    use.stage = Stage.OPEN
    note_places(world, use)


def quarantine(world: World, use: Use) -> None:
    """It has failed: its engine may do what it was told at any time."""
    world.on_each("a failed transfer", lambda rank: rank.chain.uses.quarantine(use.owners[rank.place]))
    for rank in world.ranks:
        del rank.transfers[use.owners[rank.place]]
    use.stage = Stage.QUARANTINED
    found = places_of(world.ranks[0], use)
    use.elsewhere = {name: found[name] != places for name, places in use.places.items()}


# ── fixed units ──


def fix(world: World, use: Use) -> None:
    """Promise that the units stay where they are."""

    def fix_on(rank: Rank) -> None:
        use.owners.append(object())
        rank.chain.uses.fix(use.owners[-1], use.units)

    world.on_each("fix", fix_on)
    note_places(world, use)


# ── ends ──


def end(world: World, use: Use) -> str:
    """An open copy or transfer is over on every rank; what became of its units meanwhile, in words."""
    fate = fate_of(world, use)
    world.on_each("the end of a use", lambda rank: rank.chain.uses.end(use.owners[rank.place]))
    for rank in world.ranks:
        rank.transfers.pop(use.owners[rank.place], None)
    check_read(world, use)
    world.over(use)
    return fate


def unfix(world: World, use: Use) -> str:
    """Fixed units may move again; for a failed transfer, once every host has seen that its engine is done."""
    if use.stage is Stage.QUARANTINED:
        use_rules.see_the_end(world, use)
    fate = fate_of(world, use)
    world.on_each("unfix", lambda rank: rank.chain.uses.unfix(use.owners[rank.place]))
    world.uses.close(use)
    return fate


def give_up(world: World, use: Use) -> None:
    """A parked request ends: what is announced is withdrawn, what is open goes on over freed units."""
    if use.stage is Stage.ANNOUNCED:
        if use.kind is Kind.LOAD:
            world.on_each("unfix", lambda rank: rank.chain.uses.unfix(use.owners[rank.place]))
        elif use.kind is Kind.RECEIVE:
            world.on_each("release", lambda rank: rank.chain.uses.release_hold(use.owners[rank.place]))
        if use.taken is not None:
            taken = use.taken
            world.on_each("pay_zero_debt", lambda rank: rank.chain.pay_zero_debt(taken[rank.place]))
            for part in use.parts:
                world.shadow.pay(part.band.name, part.units)
        world.uses.close(use)
    request = world.unpark(use)
    if request is not None:
        world.close([request])


def poll(world: World) -> None:
    """The loop looks at what others do: what is over on every rank is ended, and units that were fixed for a while may move."""
    for use in list(world.uses.uses):
        if use.kind is Kind.FIX:
            unfix(world, use)
        elif use.stage is Stage.OPEN and use_rules.is_over(world, use):
            end(world, use)


def end_all(world: World) -> None:
    """End every use, with nothing in flight: hosts wait for what is open, what is announced is carried out."""
    for use in list(world.uses.uses):
        if use.stage is Stage.ANNOUNCED and use.kind is Kind.LOAD:
            submit_load(world, use)
        elif use.stage is Stage.ANNOUNCED and use.kind is Kind.SEND:
            world.uses.close(use)
            world.unpark(use)
            continue
        elif use.stage is Stage.ANNOUNCED:
            announced = announce(world, use)
            assert announced, "no forward is in flight"
            for rank in world.ranks:
                rank.device.wait_on_host(use.gates[rank.place])
            begin_transfer(world, use)
        if use.is_fixed:
            unfix(world, use)
        else:
            for rank in world.ranks:
                rank.device.wait_on_host(use.ends[rank.place])
            end(world, use)


def fate_of(world: World, use: Use) -> str:
    """What has become of its units since the ledger was told of them, one of `FATES`: where they had several, what is rarest."""
    rank, is_freed, is_fenced = world.ranks[0], False, False
    for part in use.parts:
        name, places = part.band.name, use.places[part.band.name]
        held, span = part.still_held(world.shadow), rank.chain.span(part.band.name)
        moved = held & (rank.chain.physical_units(name, part.units) != places)
        if moved.any():
            return MOVED
        is_freed |= not held.all()
        is_fenced |= bool(((places < span.first_page) | (places >= span.end_page)).any())
    # What has not moved and lies outside its band was freed, and the band has retreated from it.
    return FENCED if is_fenced else FREED if is_freed else KEPT


def check_read(world: World, use: Use) -> None:
    """Raise `CheckFailedError` unless host or peer memory has what the units held when the read was told of."""
    for rank, buffer in zip(world.ranks, use.buffers, strict=False):
        found = rank.device.read_on_host(_whole(buffer), name=f"the end of {use.name}").view(np.uint64)
        expected = np.concatenate([use.words[part.band.name].ravel() for part in use.parts])
        if not np.array_equal(found, expected):
            raise CheckFailedError(
                "lost_write", f"{use.name} has not read on rank {rank.place} what it was handed"
            )


def note_places(world: World, use: Use) -> None:
    """Where its units stand now."""
    use.places = places_of(world.ranks[0], use)


# ── helpers ──


def _opened(use: Use, signal: HostCopy | NetworkTransfer, end: ModelledEvent) -> None:
    use.owners.append(signal)
    use.ends.append(end)


def _clearances(rank: Rank, use: Use, consumer: Consumer) -> dict[str, Clearance]:
    """Band → what `consumer` waits for before it writes the use's units there, now that nobody is in its way."""
    answers = {}
    for name, places in places_of(rank, use).items():
        found = answers[name] = clearance(consumer, rank.chain.ledger(name), places)
        if found.host_waits or len(found.excluded):
            raise CheckFailedError(
                "disturbed_use", f"{use.name} was handed units of band {name!r} that are in use"
            )
    return answers


def _clear_receive(rank: Rank, use: Use) -> int:
    """The schedule stream, on which the gate will stand, waits for whoever touches the units; the forward that must retire first."""
    newest = -1
    for name, found in _clearances(rank, use, Consumer.NETWORK_RECEIVE).items():
        queue_stream_waits(found, rank.chain.ledger(name), rank.device, rank.device.schedule_stream)
        newest = max(newest, found.publish_after)
    return newest


def _queue_load(rank: Rank, use: Use, stream: ModelledStream) -> HostCopy:
    """Queue the copy on its stream, behind the forward and schedule streams."""
    use_rules.stand_behind(rank, stream)
    writes, run = _writing(rank, use)
    rank.device.submit(stream, use.name, writes=writes, run=run)
    use.ends.append(rank.device.record_event(stream))
    return HostCopy(use.name, Access.WRITE, rank.device.record_event(stream))


def _draw_words(world: World, use: Use) -> None:
    for part in use.parts:
        numbers = world.shadow.numbers(part.band, len(part.units))
        use.words[part.band.name] = np.repeat(numbers[:, None], part.band.words, axis=1)


def _spans(rank: Rank, use: Use) -> list[ByteSpan]:
    places = places_of(rank, use)
    return [
        span for part in use.parts for span in rank.device.unit_spans(part.band.grid, places[part.band.name])
    ]


def _whole(buffer: Buffer) -> ByteSpan:
    return buffer.span(0, len(buffer.bytes))


def _reading(rank: Rank, use: Use) -> tuple[Sequence[ByteSpan], Buffer, Callable[[RunningWork], None]]:
    """What it reads, where to, and the work."""
    places, words = places_of(rank, use), use.words
    buffer = rank.device.create_buffer(f"memory of {use.name}", 8 * sum(each.size for each in words.values()))
    use.buffers.append(buffer)

    def read(_: RunningWork) -> None:
        found = []
        for part in use.parts:
            name = part.band.name
            found.append(rank.units[name][places[name]])
            check_words(f"{use.name} on rank {rank.place}", part.band, part.units, words[name], found[-1])
        buffer.bytes.view(np.uint64)[:] = np.concatenate([each.ravel() for each in found])

    return _spans(rank, use), buffer, read


def _writing(rank: Rank, use: Use) -> tuple[Sequence[ByteSpan], Callable[[RunningWork], None]]:
    """What it writes, and the work."""
    places, words = places_of(rank, use), use.words

    def write(_: RunningWork) -> None:
        for part in use.parts:
            rank.units[part.band.name][places[part.band.name]] = words[part.band.name]

    return _spans(rank, use), write
