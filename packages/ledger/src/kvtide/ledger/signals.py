"""What ends a use of pages, and who can wait for it.

| signal | who waits for it, if anyone must | over, logically |
| - | - | - |
| `RecordedForward` | a stream, for its event | when it retires: `ForwardSteps` |
| `HostCopy` | a stream, for its finish event | `PageUsage.end`, once ranks agree that it is acknowledged |
| `NetworkTransfer` | the host, outside every stream | `PageUsage.end`, in the round in which all ranks release it |
| `Reservation` | nobody: its pages are left alone | `PageUsage.unfix` |
| `ReceiveHold` | nobody: its pages are not moved for gain | `PageUsage.release_hold` |

"Over" is what decisions see, and it is the same on every rank (D5). That an event has been reached earlier may save a wait.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import attrs

from kvtide.device import Event
from kvtide.ledger.clearance_table import Hazard


class Access(Enum):
    """What a copy or a transfer does to the pages of its use; the next writer waits for both, a move out of them for one."""

    READ = "read"
    """A backup, a send: the next writer must not overtake it; a move need not wait for it."""

    WRITE = "write"
    """A load, a receive: a move out of its pages must wait for it as well."""


@attrs.frozen(eq=False)
class HostCopy:
    """A copy between the arena and host memory, submitted on a copy stream; a later writer's stream waits for `finish`.

    Its own stream has waited for the forward stream and for the schedule stream before it began (rows H1, H2, K3).
    """

    name: str
    """For reports, e.g. `backup of node 7`."""

    access: Access
    """READ for a backup, WRITE for a load."""

    finish: Event
    """Behind the copy on its stream."""

    hazard: Hazard = attrs.field(init=False)
    """COPY_READ for a backup, COPY_WRITE for a load; the next writer's stream waits for either."""

    @hazard.default
    def _hazard(self) -> Hazard:
        return Hazard.COPY_READ if self.access is Access.READ else Hazard.COPY_WRITE


@attrs.frozen(eq=False)
class NetworkTransfer:
    """One send or receive of a transfer engine, which runs outside every stream; only the host can wait for it (row T1)."""

    name: str
    """For reports, e.g. `request 41 → decode 2`."""

    access: Access
    """READ for a send, WRITE for a receive."""

    hazard: Hazard = attrs.field(init=False, default=Hazard.NETWORK)
    """NETWORK: the next writer waits on the host."""


@attrs.frozen(eq=False)
class Reservation:
    """A load's claim on the pages it will fill, from the take to the submission of its copy (row H2). Nobody waits for it."""

    name: str
    """For reports."""


@attrs.frozen(eq=False)
class ReceiveHold:
    """A claim on the pages of a receive, from the take until the peer may be told their ids (row T4). Nobody waits for it."""

    name: str
    """For reports."""


Signal: TypeAlias = HostCopy | NetworkTransfer
"""What ends a use that `PageUsage.record` opened."""
