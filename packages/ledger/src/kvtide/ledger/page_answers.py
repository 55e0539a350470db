"""What a band's ledger answers: whom a move waits for, and what binds the next writer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray
from kvtide.ledger.forward_steps import RecordedForward
from kvtide.ledger.signals import HostCopy, NetworkTransfer, Signal


class Writers(NamedTuple):
    """What a move must wait for before it reads its sources: all that may still write them."""

    forward: RecordedForward | None
    """The newest unretired forward that may write a source: the schedule stream waits for its event."""

    copies: tuple[HostCopy, ...]
    """Loads: the schedule stream waits for their finish events."""

    transfers: tuple[NetworkTransfer, ...]
    """Receives: the host waits, outside every stream."""


class Hazards(NamedTuple):
    """What binds the next writer of some pages. Who waits for each, and where, is in `CLEARANCE`."""

    places: IntArray
    """Places in the pages asked about, one for each pair of a page and a hazard on it."""

    kinds: npt.NDArray[np.int8]
    """The `Hazard` of each pair."""

    signals: list[Signal]
    """Copies and transfers among them, each once."""

    newest_forward: int
    """The newest unretired forward that may read one of the pages; −1 for none."""
