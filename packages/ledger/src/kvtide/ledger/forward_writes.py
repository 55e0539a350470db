"""What recorded forwards write in one band, until they retire (rows L4, L7).

A write set is a reference to the arrays that the step made anyway. It is compared with pages only when a move asks, so a step
pays the same for any number of pages.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray
from kvtide.ledger.forward_steps import ForwardSteps, RecordedForward


class ForwardWrites:
    """Write sets of the forwards in flight, oldest first. It never waits, on host or stream; a move waits for the writers."""

    def __init__(self, steps: ForwardSteps, page_count: int) -> None:
        """None yet; forwards retire as `steps` says."""
        self._steps = steps
        self._writes: deque[tuple[RecordedForward, IntArray | None]] = deque()
        self._marks: npt.NDArray[np.bool_] = np.zeros(page_count, np.bool_)

    def record(self, forward: RecordedForward, pages: IntArray | None) -> None:
        """Keep a write set, None for unknown, until its forward retires."""
        writes, retired = self._writes, self._steps.retired_through
        while writes and writes[0][0].forward <= retired:
            writes.popleft()
        writes.append((forward, pages))

    def newest_writer(self, pages: IntArray) -> RecordedForward | None:
        """The newest unretired forward that may write one of `pages`."""
        if not len(pages):
            return None
        retired = self._steps.retired_through
        self._marks[pages] = True
        try:
            for forward, written in reversed(self._writes):
                if forward.forward > retired and (written is None or self._marks[written].any()):
                    return forward
        finally:
            self._marks[pages] = False
        return None

    def written(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `pages` an unretired forward may write; all of them while one's writes are unknown."""
        unretired = [
            written for forward, written in self._writes if forward.forward > self._steps.retired_through
        ]
        known = [written for written in unretired if written is not None]
        if len(known) < len(unretired):
            return np.ones(len(pages), np.bool_)
        for written in known:
            self._marks[written] = True
        found = self._marks[pages]
        for written in known:
            self._marks[written] = False
        return found
