"""The one rule of who waits for whom: `CLEARANCE` (row L5, decision D6).

Before a page gets new bytes, everything that may still touch the old ones must be over, or ordered before the writer. The
row is the *consumer*, who writes next; the column is the *hazard*, a use that is not over. Nothing else in the project
decides this, and `format_clearance` prints it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import TypeAlias


class Consumer(Enum):
    """Who writes a page next; each member says on which stream its waits are queued."""

    FORWARD = "FORWARD"
    """The next forward; its waits are on the forward stream."""

    SCHEDULE_COPY = "SCHEDULE_COPY"
    """A move, or a copy of a state; its waits are on the schedule stream."""

    ZERO = "ZERO"
    """Zeroing on hand-out; its waits are on the schedule stream."""

    HOST_LOAD = "HOST_LOAD"
    """A load from host memory; its waits are on its copy stream, which has waited for the forward and schedule streams before."""

    NETWORK_RECEIVE = "NETWORK_RECEIVE"
    """A peer's write; its waits are on the schedule stream, and the ids leave behind a gate on it (row T4)."""


class Hazard(IntEnum):
    """A use of a page that is not over, and what can wait for it. Members are column numbers of the compiled table."""

    FORWARD = 0
    """A running forward may read the bytes that a move left behind; a stream can wait for it."""

    COPY_READ = 1
    """A backup reads the page; a stream can wait for it."""

    COPY_WRITE = 2
    """A load writes the page; a stream can wait for it."""

    NETWORK = 3
    """A transfer reads or writes the page; only the host can wait for it."""

    FIXED = 4
    """Somebody was promised that the page stays as it is; nobody waits, the page is passed over."""


class Clear(IntEnum):
    """What a consumer does about a hazard: who waits, and where. The mildest first: of several on one page the strictest binds."""

    NONE = 0
    """Nothing: another rule orders the two."""

    STREAM_WAIT = 1
    """The consumer's stream waits for the hazard's event; the host goes on."""

    AFTER_RETIRE = 2
    """Nothing is queued; the page's id leaves the process only once the forward has retired."""

    HOST_WAIT = 3
    """The host waits, outside every stream."""

    EXCLUDED = 4
    """The page is not used."""

    @property
    def label(self) -> str:
        """As the table prints it. Nobody waits here."""
        return self.name.lower().replace("_", " ")


ClearanceTable: TypeAlias = Mapping[Consumer, Mapping[Hazard, Clear]]


def _row(forward: Clear) -> Mapping[Hazard, Clear]:
    """A consumer's row: consumers differ in what orders them behind a forward, and in nothing else."""
    return MappingProxyType(
        {
            Hazard.FORWARD: forward,
            Hazard.COPY_READ: Clear.STREAM_WAIT,
            Hazard.COPY_WRITE: Clear.STREAM_WAIT,
            Hazard.NETWORK: Clear.HOST_WAIT,
            Hazard.FIXED: Clear.EXCLUDED,
        }
    )


CLEARANCE: ClearanceTable = MappingProxyType(
    {
        Consumer.FORWARD: _row(Clear.NONE),
        Consumer.SCHEDULE_COPY: _row(Clear.STREAM_WAIT),
        Consumer.ZERO: _row(Clear.STREAM_WAIT),
        Consumer.HOST_LOAD: _row(Clear.NONE),
        Consumer.NETWORK_RECEIVE: _row(Clear.AFTER_RETIRE),
    }
)
"""What each consumer does about each hazard; who waits, and where, is in the docstrings of the three enums."""

REASONS: Mapping[tuple[Consumer, Hazard], str] = MappingProxyType(
    {
        (Consumer.FORWARD, Hazard.FORWARD): "forward stream order",
        (Consumer.HOST_LOAD, Hazard.FORWARD): "its stream has waited for the forward and schedule streams",
        (Consumer.NETWORK_RECEIVE, Hazard.FORWARD): "ids leave behind a gate, only after the forward",
    }
)
"""What orders the two where the consumer queues no wait: the rules whose breach the cell would not survive."""

_ROW_NAMES = {
    Consumer.FORWARD: "the next forward",
    Consumer.SCHEDULE_COPY: "a move or a state copy",
    Consumer.ZERO: "zeroing on hand-out",
    Consumer.HOST_LOAD: "a load from host memory",
    Consumer.NETWORK_RECEIVE: "a peer's write",
}
_COLUMNS = (
    (Hazard.FORWARD,),
    (Hazard.COPY_READ, Hazard.COPY_WRITE),
    (Hazard.NETWORK,),
    (Hazard.FIXED,),
)


def format_clearance(table: ClearanceTable = CLEARANCE) -> str:
    """The table in markdown, one row a consumer, hazards with one column a wait. Nobody waits here."""
    titles = [", ".join(f"`{hazard.name}`" for hazard in hazards) for hazards in _COLUMNS]
    lines = [f"| consumer | {' | '.join(titles)} |", "| - | - | - | - | - |"]
    for consumer in Consumer:
        cells = []
        for hazards in _COLUMNS:
            texts = [_cell(table, consumer, hazard) for hazard in hazards]
            cells.append(", ".join(dict.fromkeys(texts)))
        lines.append(f"| `{consumer.name}`: {_ROW_NAMES[consumer]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(table: ClearanceTable, consumer: Consumer, hazard: Hazard) -> str:
    reason = REASONS.get((consumer, hazard))
    return table[consumer][hazard].label + (f": {reason}" if reason else "")
