"""Cells of `CLEARANCE`, one mutation for each that makes anybody wait or stay away: as if another rule ordered the two."""

from __future__ import annotations

from collections.abc import Iterator

from kvtide.ledger import CLEARANCE, Clear, Consumer, Hazard
from kvtide.simulation.mutations.mutation import Mutation, Patch, Plant

_COMPILED = "kvtide.ledger.clearing:_ANSWERS"

_CONSUMERS = {
    Consumer.FORWARD: "a forward that writes what a take left unzeroed",
    Consumer.SCHEDULE_COPY: "a move or a state copy",
    Consumer.ZERO: "zeroing on hand-out",
    Consumer.HOST_LOAD: "a load",
    Consumer.NETWORK_RECEIVE: "a peer's write",
}
_HAZARDS = {
    Hazard.FORWARD: "a forward that may still read there",
    Hazard.COPY_READ: "a backup that reads there",
    Hazard.COPY_WRITE: "a load that writes there",
    Hazard.NETWORK: "a transfer that touches it",
    Hazard.FIXED: "what was promised to stay",
}
_ACTS = {
    Clear.STREAM_WAIT: "waits on its stream for",
    Clear.AFTER_RETIRE: "is told of the ids only after",
    Clear.HOST_WAIT: "makes the host wait for",
    Clear.EXCLUDED: "leaves alone",
}
_PLANNED = {
    Hazard.NETWORK: "no plan hands out such a unit (`plan.transfers`, `plan.growth`, `plan.fenced`, `withheld.kept`), no state copy onto one begins (`copy.stays`), no debt of one is paid (`call.paid_onto`)",
    Hazard.FIXED: "no plan hands out such a unit (`plan.fixed`, `withheld.kept`), no state copy onto one begins (`copy.stays`), no debt of one is paid (`call.paid_onto`)",
}
"""Hazards that chains plan around, and by which rules; those are in the table of what is found."""

_RAISED = "met all the same, it is an error, `band.plan_clears_transfers`, so that a run that holds has never asked the cell"


def weakened(consumer: Consumer, hazard: Hazard) -> Plant:
    """Nobody waits, and nothing is left alone."""

    def plant(patch: Patch) -> None:
        row = patch.look(_COMPILED)[consumer].copy()
        row[hazard] = Clear.NONE
        patch.put(_COMPILED, consumer, row)

    return plant


def cells() -> Iterator[Mutation]:
    """One for each cell that is not "none"."""
    for consumer, row in CLEARANCE.items():
        for hazard, clear in row.items():
            if clear is not Clear.NONE:
                is_planned = consumer in _PLANNED_CONSUMERS and hazard in _PLANNED
                yield Mutation(
                    id=f"clearance.{consumer.name}.{hazard.name}".lower(),
                    rule=f"{_CONSUMERS[consumer]} {_ACTS[clear]} {_HAZARDS[hazard]}",
                    rows=("L5",),
                    plant=weakened(consumer, hazard),
                    unreachable=f"{_PLANNED[hazard]}; {_RAISED}" if is_planned else "",
                )


_PLANNED_CONSUMERS = (Consumer.FORWARD, Consumer.SCHEDULE_COPY, Consumer.ZERO)
"""Those whose pages the chain chooses. They ask in two places: for a choice among holes, of which none is withheld, and before they
write, where a transfer or a fixed page is an error. Every cell of theirs is proved by a schedule among the ledger's tests."""
