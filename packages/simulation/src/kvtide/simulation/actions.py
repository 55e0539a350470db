"""Operations as plug-ins, and the actions they are carried out by, as data.

An *action* is one operation with whole numbers: `{"do": "finish", "request": 3}`. Numbers are drawn at random and read
relative to the state they meet (request 3 of those that run, counted round), so a sequence keeps its meaning when a shrink
takes actions out of it. What an operation makes of its numbers it says as an *outcome*, a few words.

Packages bring operations without being imported from here: an entry point of the group `kvtide.simulation.operations` names a
sequence of them.
"""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import attrs

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

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Numbers for one action, or `None` where it would be pointless now. Draws from `rng` alone, changes nothing."""

    def apply(self, world: World, numbers: Numbers) -> str:
        """Carry it out on every rank and say what became of it, in a few words that repeat from run to run.

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


def installed_operations() -> dict[str, Operation]:
    """Every installed operation by name, in an order that depends on names alone.

    Raises `ValueError` when none is installed and when two have one name, `TypeError` for what is no operation.
    """
    found: dict[str, Operation] = {}
    for entry_point in sorted(
        importlib.metadata.entry_points(group=OPERATION_GROUP), key=lambda one: one.name
    ):
        for operation in entry_point.load():
            if not isinstance(operation, Operation):
                raise TypeError(
                    f"entry point {entry_point.value!r} names {operation!r}, which is no operation: it needs name, weight, "
                    "generate and apply"
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
