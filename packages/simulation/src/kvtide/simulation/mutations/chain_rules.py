"""Rules of the chain: whom takes, moves and copies wait for, and how room is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.simulation.mutations.mutation import (
    Mutation,
    Replacement,
    around,
    during,
    instead,
    nothing_during,
    nowhere,
    preceded,
    without,
)

_ALLOCATOR = "kvtide.chain:ChainAllocator"
_BAND = "kvtide.chain.band:Band"
_RELIEF = "kvtide.chain.relief:Relief"
_DEBTS = "kvtide.chain.takes:ZeroDebts"
_IDS = "kvtide.chain.id_space:UnitIds"
_USES = "kvtide.chain.uses:ChainUses"
_USAGE = "kvtide.ledger:PageUsage"
_NO_PAGES: IntArray = np.empty(0, np.int64)


# ── waits ──


def _settle_without_waiting(original: Replacement) -> Replacement:
    return lambda pages, count: (original(pages, count)[0], None)


def _readers_not_waited_for(original: Replacement) -> Replacement:
    """The ledger is told of a wait that was never queued."""

    def recover(relief: Any) -> None:
        steps, usages = relief._steps, [band.usage for band in relief._bands]
        reader = max((usage.newest_reader for usage in usages if usage.vacated_count), default=-1)
        if reader > steps.retired_through:
            steps.wait_queued(steps.recorded(reader).event)
        original(relief)

    return recover


def _forwards_not_waited_for(band: Any, units: IntArray) -> None:
    writers = band.usage.writers(units)
    if writers.forward is not None:
        band._steps.wait_queued(writers.forward.event)
    for copy in writers.copies:
        band._device.wait_event(band._device.schedule_stream, copy.finish)


def _loads_not_waited_for(band: Any, units: IntArray) -> None:
    writers = band.usage.writers(units)
    if writers.forward is not None:
        band._device.wait_event(band._device.schedule_stream, writers.forward.event)
        band._steps.wait_queued(writers.forward.event)


# ── room ──


def _growth_sees_no_transfer(relief: Any, asked: Sequence[int]) -> Any:
    return relief._grow_in_place(asked) or relief._plan_in_place(asked)


def _holds_never_stay(original: Replacement) -> Replacement:
    def snapshot(relief: Any, *, holds_stay: bool = False) -> Any:
        return original(relief)

    return snapshot


def _waits_at_once(original: Replacement) -> Replacement:
    def plan(snapshot: Any, asked: Sequence[int], *, around_network: bool) -> Any:
        is_in_the_way = snapshot.network_bytes or any(band.network for band in snapshot.bands)
        return None if is_in_the_way else original(snapshot, asked, around_network=around_network)

    return plan


# ── flushes ──


def _wait_for_the_newest(chain: ChainAllocator, *_: object, **__: object) -> None:
    newest, device = chain.steps.newest_recorded, chain._device
    if newest is not None:
        device.wait_event(device.schedule_stream, newest.event)
        chain.steps.wait_queued(newest.event)


def _flush_unheld(original: Replacement) -> Replacement:
    """Nothing is held while it runs."""

    def flush(chain: ChainAllocator, *args: int) -> Any:
        held = [band.usage._held for band in chain._bands]
        kept = [(claims.owned, claims._counts) for claims in held]
        for claims in held:
            claims.owned, claims._counts = {}, claims._counts * 0
        try:
            return original(chain, *args)
        finally:
            for claims, (owned, counts) in zip(held, kept, strict=True):
                claims.owned, claims._counts = owned, counts

    return flush


def chain_rules() -> Iterator[Mutation]:
    """See the module's docstring."""
    yield from _waits()
    yield from _room()
    yield from _flushes()


def _waits() -> Iterator[Mutation]:
    yield Mutation(
        id="wait.settle",
        rule="a settle makes the schedule stream wait for the forwards that its units pend under",
        rows=("L3",),
        plant=around("kvtide.ledger:PendingPages.settle", _settle_without_waiting),
    )
    yield Mutation(
        id="wait.relief",
        rule="a relief waits for the forwards that read vacated units before they are free",
        rows=("C6", "C7"),
        plant=around(f"{_RELIEF}._recover", _readers_not_waited_for),
    )
    for name, method in (("move", "_move"), ("state_copy", "copy")):
        what = "a move" if name == "move" else "a state copy"
        yield Mutation(
            id=f"wait.{name}.forward",
            rule=f"{what} waits for the newest forward that may write a source",
            rows=("C7",),
            plant=during(f"{_BAND}.{method}", f"{_BAND}._wait_writers", _forwards_not_waited_for),
        )
        yield Mutation(
            id=f"wait.{name}.load",
            rule=f"{what} waits for loads that write a source",
            rows=("C7",),
            plant=during(f"{_BAND}.{method}", f"{_BAND}._wait_writers", _loads_not_waited_for),
        )
        yield Mutation(
            id=f"wait.{name}.target",
            rule=f"{what} clears its targets",
            rows=("L5",),
            plant=nothing_during(f"{_BAND}.{method}", f"{_BAND}._clear"),
        )
    yield Mutation(
        id="copy.stays",
        rule="a state copy onto a slot that is fixed or under a transfer is an error",
        rows=("L5",),
        plant=without("kvtide.chain.allocator:check_may_write"),
    )
    yield Mutation(
        id="wait.zero",
        rule="zeroing clears what it zeroes",
        rows=("L5", "A5"),
        plant=nothing_during(f"{_BAND}.zero", f"{_BAND}._clear"),
    )
    yield Mutation(
        id="wait.promise",
        rule="what a take leaves unzeroed is cleared all the same",
        rows=("L5", "A5"),
        plant=nothing_during(f"{_BAND}._zero_taken", f"{_BAND}._clear"),
    )
    yield Mutation(
        id="host.takes",
        rule="a take waits on no stream on the host",
        rows=("V3", "C10"),
        plant=preceded(f"{_ALLOCATOR}.take", _wait_on_the_host),
    )
    yield Mutation(
        id="host.frees",
        rule="a free reads nothing of the device",
        rows=("V3", "C10"),
        plant=preceded(f"{_ALLOCATOR}.free_pages", lambda chain, *_: chain._device.tables),
    )


def _room() -> Iterator[Mutation]:
    yield Mutation(
        id="order.settle",
        rule="pending units are settled before a layout is planned",
        rows=("C6",),
        plant=without(f"{_BAND}.settle_all"),
    )
    yield Mutation(
        id="order.moves",
        rule="floats are relocated in an order in which none meets another",
        rows=("C6",),
        plant=around("kvtide.chain.relief:move_order", lambda order: lambda *asked: order(*asked)[::-1]),
    )
    yield Mutation(
        id="plan.moves",
        rule="units move where that makes room",
        rows=("C5", "C6"),
        plant=instead(f"{_RELIEF}.make_room", lambda relief, asked: relief._grow_in_place(asked)),
    )
    yield Mutation(
        id="plan.answer",
        rule="a yes is a take that will be served",
        rows=("C5",),
        plant=without(f"{_ALLOCATOR}.units_fit", answer=True),
    )
    yield Mutation(
        id="plan.transfers",
        rule="plans go around units under a transfer",
        rows=("C6",),
        plant=without(f"{_USAGE}.transfer_pages", answer=_NO_PAGES),
    )
    yield Mutation(
        id="plan.fixed",
        rule="plans go around fixed units",
        rows=("C4", "C6"),
        plant=without(f"{_USAGE}.fixed_pages", answer=_NO_PAGES),
    )
    yield Mutation(
        id="plan.fenced",
        rule="plans go around bytes that left a band under a transfer",
        rows=("C4", "C6"),
        plant=without("kvtide.ledger:FencedBytes.extents", answer=(_NO_PAGES, _NO_PAGES)),
    )
    yield Mutation(
        id="plan.growth",
        rule="a band grows in place only where no transfer is in the way",
        rows=("C6",),
        plant=instead(f"{_RELIEF}._stay_in_place", _growth_sees_no_transfer),
    )
    yield Mutation(
        id="plan.holds",
        rule="a relief moves held units only where no layout goes around them",
        rows=("C6", "T4"),
        plant=around(f"{_RELIEF}.snapshot", _holds_never_stay),
    )
    yield Mutation(
        id="plan.waits",
        rule="a relief waits for transfers only where no layout goes around them",
        rows=("C6", "C10"),
        plant=around("kvtide.chain.relief:first_plan", _waits_at_once),
    )
    yield Mutation(
        id="plan.refusal",
        rule="a take that is refused has waited for nothing",
        rows=("C2",),
        plant=preceded(f"{_ALLOCATOR}.take", _wait_for_forwards),
    )
    yield Mutation(
        id="plan.reached",
        rule="that an event has been reached changes no choice",
        rows=("C10",),
        plant=preceded(f"{_ALLOCATOR}.take", _process_what_is_over),
    )


def _flushes() -> Iterator[Mutation]:
    yield Mutation(
        id="flush.waits",
        rule="a flush for gain waits for no forward",
        rows=("C7",),
        plant=preceded(f"{_ALLOCATOR}.flush_opportunistic", _wait_for_the_newest),
    )
    yield Mutation(
        id="flush.forwards",
        rule="a flush for gain stops at a unit that a forward may write",
        rows=("C7",),
        plant=during(f"{_USAGE}.stopping", "kvtide.ledger.forward_writes:ForwardWrites.written", nowhere),
    )
    yield Mutation(
        id="flush.writers",
        rule="a flush for gain stops at a unit that a load or a receive writes",
        rows=("C7",),
        plant=nothing_during(
            f"{_USAGE}.stopping", "kvtide.ledger.signal_uses:SignalUses.by_signal", answer=()
        ),
    )
    yield Mutation(
        id="flush.targets",
        rule="a flush for gain moves into no hole that somebody still touches",
        rows=("C7",),
        plant=instead(f"{_BAND}._clear_holes", lambda band, count: band._holes.nearest(count)),
    )
    yield Mutation(
        id="flush.holds",
        rule="a flush for gain leaves held units alone",
        rows=("T4",),
        plant=around(f"{_ALLOCATOR}.flush_opportunistic", _flush_unheld),
    )


def _wait_on_the_host(chain: ChainAllocator, **_: object) -> None:
    if chain.steps.newest_recorded is not None:
        chain._device.wait_on_host(chain.steps.newest_recorded.event)


def _wait_for_forwards(chain: ChainAllocator, **_: object) -> None:
    device = chain._device
    device.wait_event(device.schedule_stream, device.record_event(device.forward_stream))


def _process_what_is_over(chain: ChainAllocator, **_: object) -> None:
    newest, device = chain.steps.newest_recorded, chain._device
    if newest is not None and device.query_event(newest.event):
        for band in chain._bands:
            band.release_pending_through(newest.forward)
