"""Operations as plug-ins, and the actions they are carried out by, as data.

An *action* is one operation with whole numbers: `{"do": "finish", "request": 3}`. Numbers are drawn at random and read
relative to the state they meet (request 3 of those that run, counted round), so a sequence keeps its meaning when a shrink
takes actions out of it. What an operation makes of its numbers it says as an *outcome*, a few words, all of which it declares.

Packages bring operations without being imported from here: an entry point of the group `kvtide.simulation.operations` names a
sequence of them.
"""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import attrs

from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.world import World

OPERATION_GROUP = "kvtide.simulation.operations"
"""Entry-point group; each entry point names a sequence of operations."""

Numbers: TypeAlias = Mapping[str, int]
"""An action's numbers by name."""


@runtime_checkable
class Operation(Protocol):
    """One thing that a scheduler, or time, may do."""

    name: str
    """Unique among all that are installed."""

    weight: int
    """How often it is drawn, beside the others' weights."""

    outcomes: frozenset[str]
    """All that `apply` may say: the table that every run ends with shows which of it was never met."""

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Numbers for one action, or `None` where it would be pointless now. Draws from `rng` alone, changes nothing."""

    def apply(self, world: World, numbers: Numbers) -> str:
        """Carry it out on every rank and say what became of it, in a few words: one of `outcomes`.

        Any numbers must make sense in any state, if only as "nothing to do". Raises `CheckFailedError` for what is wrong.
        """


@attrs.frozen
class Action:
    """One operation with its numbers."""

    operation: str
    """Name of the operation."""

    numbers: Numbers
    """By name."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"do": self.operation, **self.numbers}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Action:
        """What `document` made; raises `KeyError` for anything else."""
        return cls(document["do"], {name: int(value) for name, value in document.items() if name != "do"})

    def __str__(self) -> str:
        return " ".join([self.operation, *(f"{name}={value}" for name, value in self.numbers.items())])


def carry_out(action: Action, world: World, operations: Mapping[str, Operation]) -> str:
    """Apply an action; its outcome, which the operation must have declared."""
    operation = operations[action.operation]
    outcome = operation.apply(world, action.numbers)
    if outcome not in operation.outcomes:
        raise CheckFailedError(
            "undeclared_outcome",
            f"{action.operation!r} says {outcome!r}, which is none of its outcomes; declared: {', '.join(sorted(operation.outcomes))}",
        )
    return outcome


def not_reached(
    operations: Mapping[str, Operation], coverage: Collection[tuple[str, str]]
) -> dict[str, list[str]]:
    """By operation, the outcomes that it declares and `coverage` has not; operations of which it has all are left out."""
    missing = {
        name: sorted(outcome for outcome in operation.outcomes if (name, outcome) not in coverage)
        for name, operation in operations.items()
    }
    return {name: outcomes for name, outcomes in missing.items() if outcomes}


def installed_operations() -> dict[str, Operation]:
    """Every installed operation by name, in an order that depends on names alone.

    Raises `ValueError` when none is installed and when two have one name, `TypeError` for what is no operation.
    """
    found: dict[str, Operation] = {}
    for entry_point in sorted(
        importlib.metadata.entry_points(group=OPERATION_GROUP), key=lambda one: one.name
    ):
        for operation in entry_point.load():
            if not isinstance(operation, Operation) or not isinstance(operation.outcomes, frozenset):
                raise TypeError(
                    f"entry point {entry_point.value!r} names {operation!r}, which is no operation: it needs name, weight, "
                    "outcomes (a frozenset of all that it may say), generate and apply"
                )
            if found.setdefault(operation.name, operation) is not operation:
                raise ValueError(
                    f"two operations are called {operation.name!r}: rename that of {entry_point.value!r}"
                )
    if not found:
        raise ValueError(
            f"no operation is installed: no entry point in group {OPERATION_GROUP!r}; install kvtide-simulation, also to run it "
            "from its source"
        )
    return dict(sorted(found.items()))
