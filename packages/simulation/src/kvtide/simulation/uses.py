"""What others do with units in a run: copies to and from host memory, sends and receives, units fixed for a while (rows L4, H1, H2, T1-T6).

| kind | announced | open | over |
| - | - | - | - |
| backup | – | its copy is queued: HostCopy READ | acknowledged in an agreed step |
| load | its units are taken, and fixed under a reservation; units that are filled anew have no such stage | its copy is queued: HostCopy WRITE | acknowledged in an agreed step |
| send | a gate is recorded behind what moved its units | the engine reads: NetworkTransfer READ | released in an agreed step |
| receive | its units are taken, or were there before; they are held, a gate is recorded | the peer writes: NetworkTransfer WRITE | released in an agreed step |
| fix | – | its units are fixed | unfixed |

A failed transfer is *quarantined* until it is proved that its engine is done. A request whose load, receive or last send runs
is *parked*: no forward includes it, and nothing of it is freed but by giving it up.

Here stands what the allocator is compared with: which units, where they were when the use was told of, what must be read there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import attrs
import numpy as np

from kvtide.chain import Taken
from kvtide.device import IntArray, ModelledEvent
from kvtide.simulation.bands import NONE, SimulatedBand
from kvtide.simulation.requests import Request
from kvtide.simulation.shadow import Bools, Shadow, Words


class Kind(enum.Enum):
    """Of a use; the value is its word in outcomes."""

    BACKUP = "backup"
    LOAD = "load"
    SEND = "send"
    RECEIVE = "receive"
    FIX = "fix"

    @property
    def is_transfer(self) -> bool:
        """Whether an engine outside every stream does it."""
        return self in (Kind.SEND, Kind.RECEIVE)


class Stage(enum.Enum):
    """How far a use has come."""

    ANNOUNCED = "announced"
    OPEN = "open"
    QUARANTINED = "quarantined"


class Part(NamedTuple):
    """Some units of one band, each as long as whoever holds it now does."""

    band: SimulatedBand
    """Which."""

    units: IntArray
    """Virtual."""

    tenures: IntArray
    """Of each, `Shadow.tenures` when it was named."""

    def still_held(self, shadow: Shadow) -> Bools:
        """Which of them have not been freed since."""
        name = self.band.name
        held: Bools = shadow.bound[name][self.units] & (shadow.tenures[name][self.units] == self.tenures)
        return held


def parts_of(
    shadow: Shadow, bands: Iterable[SimulatedBand], units: Mapping[str, IntArray]
) -> tuple[Part, ...]:
    """Parts for units by band; bands without any are left out."""
    return tuple(
        Part(band, units[band.name], shadow.tenures[band.name][units[band.name]])
        for band in bands
        if len(units.get(band.name, NONE))
    )


@attrs.define(eq=False, kw_only=True)
class Use:
    """One use, the same on every rank."""

    kind: Kind
    """What is done."""

    number: int
    """Ordinal."""

    parts: tuple[Part, ...]
    """To which units."""

    stage: Stage = Stage.OPEN
    """How far it has come."""

    owners: list[Any] = attrs.field(factory=list)
    """What the ledger knows it by, one a rank: a signal, a reservation, a hold, an owner of fixed units."""

    gates: list[ModelledEvent] = attrs.field(factory=list)
    """Of an announced transfer, one a rank: its units' bytes are nobody else's behind it."""

    moves: dict[str, int] = attrs.field(factory=dict)
    """Band → how many of its units had moved when the gates were recorded (the move epoch)."""

    publish_after: int = -1
    """The newest forward that may read a receive's bytes: the gate counts if recorded once that one had retired."""

    ends: list[ModelledEvent] = attrs.field(factory=list)
    """Of an open copy or transfer, one a rank."""

    buffers: list[Any] = attrs.field(factory=list)
    """Host or peer memory of what is read, one a rank."""

    places: dict[str, IntArray] = attrs.field(factory=dict)
    """Band → physical units, when the ledger was last told of them, or the gate recorded."""

    words: dict[str, Words] = attrs.field(factory=dict)
    """Band → what is read there, or written."""

    elsewhere: dict[str, Bools] = attrs.field(factory=dict)
    """Band → which units had moved before a transfer was quarantined."""

    parked: Request | None = None
    """Whose load, receive or last send it is, as long as it may not run."""

    closes: bool = False
    """Whether a relief that waits for a request's last send frees all that the request holds, before anything is taken."""

    taken: tuple[Taken, ...] | None = None
    """The take it was made for, one a rank; `None` for units that were there before."""

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.kind.value} {self.number}"

    @property
    def is_fixed(self) -> bool:
        """Whether its units neither move nor are handed out."""
        return (
            self.kind is Kind.FIX
            or self.stage is Stage.QUARANTINED
            or (self.kind is Kind.LOAD and self.stage is Stage.ANNOUNCED)
        )

    @property
    def is_touched(self) -> bool:
        """Whether an engine touches its units, or a peer is about to be told of them."""
        return (self.kind.is_transfer and self.stage is Stage.OPEN) or self.is_held

    @property
    def is_held(self) -> bool:
        """Whether its units await publication."""
        return self.kind is Kind.RECEIVE and self.stage is Stage.ANNOUNCED

    @property
    def is_open_transfer(self) -> bool:
        """Whether a wait for it could be asked for."""
        return self.kind.is_transfer and self.stage is Stage.OPEN

    @property
    def units(self) -> dict[str, IntArray]:
        """Virtual units by band."""
        return {part.band.name: part.units for part in self.parts}


class UseBook:
    """The uses of one run that are not over, oldest first."""

    def __init__(self) -> None:
        """None."""
        self.uses: list[Use] = []
        self._count = 0

    def open(self, kind: Kind, parts: tuple[Part, ...], **fields: Any) -> Use:
        """Note a new one."""
        use = Use(kind=kind, number=self._count, parts=parts, **fields)
        self._count += 1
        self.uses.append(use)
        return use

    def close(self, use: Use) -> None:
        """It is over."""
        self.uses.remove(use)

    def of(self, kind: Kind, stage: Stage) -> list[Use]:
        """Those of one kind at one stage."""
        return [use for use in self.uses if use.kind is kind and use.stage is stage]

    def parked(self) -> list[Request]:
        """Requests that may not run."""
        return [use.parked for use in self.uses if use.parked is not None]

    def covers(self, kind: Kind, band: SimulatedBand, units: IntArray, stage: Stage = Stage.OPEN) -> Bools:
        """Which of these virtual units a use of a kind at a stage names."""
        found = np.zeros(len(units), np.bool_)
        for use in self.of(kind, stage):
            for part in use.parts:
                if part.band is band:
                    found |= np.isin(units, part.units)
        return found
