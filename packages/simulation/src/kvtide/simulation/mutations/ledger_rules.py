"""Rules of the ledger: what pends, what a move leaves behind, what is fenced, when each is over, and what is told of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.ledger import FencedBytes, HostCopy, NetworkTransfer, PageUsage, PendingPages, RecordedForward
from kvtide.simulation.mutations.mutation import (
    Mutation,
    Patch,
    Plant,
    Replacement,
    all_of,
    around,
    during,
    instead,
    nothing_during,
    nowhere,
    without,
)

_PENDING = "kvtide.ledger:PendingPages"
_STEPS = "kvtide.ledger:ForwardSteps"
_USAGE = "kvtide.ledger:PageUsage"
_FENCES = "kvtide.ledger:FencedBytes"
_VACATED = "kvtide.ledger.vacated_pages:VacatedPages"
_UNDER_TRANSFER = "kvtide.ledger.signal_uses:SignalUses.under_transfer"
_BAND = "kvtide.chain.band:Band"
_UNITS = "kvtide.chain.band_units:BandUnits"
_NO_PAGES: IntArray = np.empty(0, np.int64)


# ── pending ──


def _released_early(original: Replacement) -> Replacement:
    return lambda pages, forward: original(pages, forward + 1)


def _unknown_is_nothing(original: Replacement) -> Replacement:
    def record(
        chain: ChainAllocator, forward: RecordedForward, writes: Mapping[str, IntArray | None]
    ) -> None:
        original(chain, forward, {name: units for name, units in writes.items() if units is not None})

    return record


def _settled_by_the_oldest(original: Replacement) -> Replacement:
    def settle(pages: PendingPages, page_count: int) -> Any:
        batches = pages._batches
        oldest = batches[0].event if batches else None
        return original(pages, page_count)[0], oldest

    return settle


# ── vacated ──


def _no_unretired(patch: Patch) -> None:
    patch.replace(f"{_STEPS}.newest_unretired", property(lambda steps: None))


def _moves_see_no_forward(patch: Patch) -> None:
    """`vacate` asks for the newest unretired forward and is told of none."""
    vacate = patch.look(f"{_USAGE}.vacate")

    def blind(usage: PageUsage, *asked: Any) -> Any:
        inner = Patch()
        _no_unretired(inner)
        try:
            return vacate(usage, *asked)
        finally:
            inner.undo()

    patch.replace(f"{_USAGE}.vacate", blind)


def _vacated_by_the_oldest(original: Replacement) -> Replacement:
    def add(vacated: Any, pages: IntArray, forward: int) -> None:
        original(vacated, pages, max(forward - 1, 0) if forward >= 0 else forward)

    return add


def _returned_early(original: Replacement) -> Replacement:
    return lambda vacated, retired, **named: original(vacated, retired + 1, **named)


def _read_no_longer(original: Replacement) -> Replacement:
    return lambda vacated, pages, retired: original(vacated, pages, retired + 1)


# ── fences ──


def _without_fences_of(kind: type | None) -> Plant:
    """Fences of one kind of signal are not kept; those of forwards for `None`."""

    def make(original: Replacement) -> Replacement:
        def add(fences: FencedBytes, fence: Any) -> None:
            if fence.signal is None if kind is None else isinstance(fence.signal, kind):
                return
            original(fences, fence)

        return add

    return around(f"{_FENCES}.add", make)


def _fences_over_early(original: Replacement) -> Replacement:
    def drop(fences: FencedBytes) -> None:
        steps = fences._steps
        steps.retired_through += 1
        try:
            original(fences)
        finally:
            steps.retired_through -= 1

    return drop


# ── epochs ──


def _epoch_stands_still(name: str) -> Plant:
    """A change of the ledger that leaves its epoch as it was."""

    def make(original: Replacement) -> Replacement:
        def call(usage: PageUsage, *args: Any, **named: Any) -> Any:
            epoch = usage.epoch
            try:
                return original(usage, *args, **named)
            finally:
                usage.epoch = epoch

        return call

    return around(f"{_USAGE}.{name}", make)


_EPOCHS = {
    "record": "a copy or transfer begins",
    "end": "a copy or transfer ends",
    "quarantine": "a transfer fails",
    "fix": "units are fixed",
    "unfix": "units are fixed no longer",
}


def _failed_is_over(patch: Patch) -> None:
    uses = "kvtide.chain.uses:ChainUses"
    end, unfix = patch.look(f"{uses}.end"), patch.look(f"{uses}.unfix")

    def unfix_others(chain_uses: Any, owner: Any) -> None:
        if not isinstance(owner, NetworkTransfer):
            unfix(chain_uses, owner)

    patch.replace(f"{uses}.quarantine", end)
    patch.replace(f"{uses}.unfix", unfix_others)


def ledger_rules() -> Iterator[Mutation]:
    """See the module's docstring."""
    yield Mutation(
        id="pending.free",
        rule="units freed while a recorded forward may touch them pend",
        rows=("L2",),
        plant=instead(f"{_UNITS}._let_go", lambda band, units: band._add_holes(units)),
    )
    yield Mutation(
        id="pending.return",
        rule="pending units return when their forward is processed, and not before",
        rows=("L2", "L3"),
        plant=around(f"{_PENDING}.release_through", _released_early),
    )
    yield Mutation(
        id="pending.over",
        rule="pending units return at all",
        rows=("L3",),
        plant=without(f"{_PENDING}.release_through", _NO_PAGES),
    )
    yield Mutation(
        id="pending.newest",
        rule="of the batches that a settle takes, the newest one's forward is waited for",
        rows=("L3",),
        plant=around(f"{_PENDING}.settle", _settled_by_the_oldest),
    )
    yield Mutation(
        id="withheld.pend",
        rule="withheld units pend once their use is over, if a forward may still touch them",
        rows=("L2", "L4"),
        plant=during(
            f"{_BAND}.release_withheld", f"{_UNITS}._let_go", lambda band, units: band._add_holes(units)
        ),
    )
    yield Mutation(
        id="withheld.kept",
        rule="free units that are fixed or under a transfer are not handed out",
        rows=("L4",),
        plant=instead(f"{_UNITS}._without_withheld", lambda band, units: units),
    )
    yield Mutation(
        id="withheld.over",
        rule="withheld units are free again once their use is over",
        rows=("L4",),
        plant=without(f"{_BAND}.release_withheld"),
    )
    yield Mutation(
        id="writes.told",
        rule="the ledger is told what a forward writes",
        rows=("L4",),
        plant=without("kvtide.chain:ChainAllocator.forward_recorded"),
    )
    yield Mutation(
        id="writes.unknown",
        rule="writes that are unknown may be anywhere in the band",
        rows=("L7",),
        plant=around("kvtide.chain:ChainAllocator.forward_recorded", _unknown_is_nothing),
    )
    yield Mutation(
        id="vacated.forward",
        rule="what a move leaves under a forward in flight is vacated, and no hole yet",
        rows=("C7", "L4"),
        plant=_moves_see_no_forward,
    )
    yield Mutation(
        id="vacated.newest",
        rule="vacated units are kept for the newest forward that may read them",
        rows=("C7", "L4"),
        plant=around(f"{_VACATED}.add", _vacated_by_the_oldest),
    )
    yield Mutation(
        id="vacated.send",
        rule="what a move leaves under a send is vacated, and no hole yet",
        rows=("C7", "L4"),
        plant=during(f"{_USAGE}.vacate", _UNDER_TRANSFER, nowhere),
    )
    yield Mutation(
        id="vacated.return",
        rule="vacated units return, and are read no longer, when their forward has retired, and not before",
        rows=("C7", "L6"),
        plant=all_of(
            around(f"{_VACATED}.take_retired", _returned_early),
            around(f"{_VACATED}.unretired", _read_no_longer),
            around(f"{_VACATED}.pass_on_readers", _read_no_longer),
        ),
    )
    yield Mutation(
        id="vacated.return_send",
        rule="vacated units whose forward has retired stay vacated while a send reads them",
        rows=("C7", "L4"),
        plant=all_of(
            during(f"{_USAGE}.take_ready_vacated", _UNDER_TRANSFER, nowhere),
            during(f"{_UNITS}._collect_vacated", f"{_UNITS}._without_withheld", lambda band, units: units),
        ),
    )
    yield Mutation(
        id="fence.forward",
        rule="bytes that leave a band are fenced while a forward may read them",
        rows=("L4", "C7"),
        plant=_without_fences_of(None),
    )
    yield Mutation(
        id="fence.copy",
        rule="bytes that leave a band are fenced while a copy touches them",
        rows=("L4", "C7"),
        plant=_without_fences_of(HostCopy),
    )
    yield Mutation(
        id="fence.send",
        rule="bytes that leave a band are fenced while a transfer touches them",
        rows=("L4", "C6", "C7"),
        plant=_without_fences_of(NetworkTransfer),
    )
    yield Mutation(
        id="fence.return",
        rule="a fence is over when its forward has retired, and not before",
        rows=("L4", "L6"),
        plant=around(f"{_FENCES}._drop_retired", _fences_over_early),
    )
    yield Mutation(
        id="fence.retreat",
        rule="a frontier that retreats over free units fences them",
        rows=("L4", "C7"),
        plant=without(f"{_UNITS}.give_back"),
    )
    yield Mutation(
        id="fence.move",
        rule="a span that shrinks behind moves fences what it leaves",
        rows=("L4", "C7"),
        plant=nothing_during(f"{_UNITS}._leave", f"{_USAGE}.fence"),
    )
    yield Mutation(
        id="quarantine.units",
        rule="a failed transfer's units are nobody's until it is proved that its engine is done",
        rows=("T6",),
        plant=_failed_is_over,
    )
    yield Mutation(
        id="quarantine.fenced",
        rule="so are bytes that left a band under it",
        rows=("T6", "L4"),
        plant=instead(f"{_FENCES}.quarantine", lambda fences, band, transfer: fences.end(band, transfer)),
    )
    yield Mutation(
        id="hold.follows",
        rule="a hold follows a move that must be made",
        rows=("T4",),
        plant=without("kvtide.ledger.claims:Claims.move"),
    )
    yield Mutation(
        id="launch.open",
        rule="no unit changes hands between a forward's launch and its recording",
        rows=("L1",),
        plant=without(f"{_STEPS}.check_pages_may_change"),
    )
    yield Mutation(
        id="launch.synchronised",
        rule="a forward is processed behind a host wait that the ledger was told of",
        rows=("L1",),
        plant=without(f"{_STEPS}.host_synchronised"),
    )
    for name, when in _EPOCHS.items():
        yield Mutation(
            id=f"epoch.{name}",
            rule=f"the ledger's epoch moves when {when}",
            rows=("C4", "C11"),
            plant=_epoch_stands_still(name),
        )
    yield Mutation(
        id="epoch.hold",
        rule="the ledger's epoch moves when units are held, or held no longer",
        rows=("C4", "T4"),
        plant=all_of(_epoch_stands_still("hold"), _epoch_stands_still("release_hold")),
    )
    yield Mutation(
        id="epoch.moves",
        rule="the ledger's epoch moves when what is held or sent moves or leaves the band",
        rows=("C4", "C11"),
        plant=all_of(_epoch_stands_still("vacate"), _epoch_stands_still("fence")),
    )
