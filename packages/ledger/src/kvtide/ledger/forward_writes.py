"""What recorded forwards write in one band, until they retire (rows L4, L7).

A write set is a reference to the arrays that the step made anyway. It is compared with pages only when a move asks, so a step
pays the same for any number of pages; whether it names pages of the band is looked at then, too.
"""

from __future__ import annotations

from collections import deque

import attrs
import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray
from kvtide.ledger.forward_steps import ForwardSteps, RecordedForward
from kvtide.ledger.page_lists import PageLists


@attrs.define(eq=False)
class _WriteSet:
    forward: RecordedForward
    pages: IntArray | None
    is_checked: bool = False


class ForwardWrites:
    """Write sets of the forwards in flight, oldest first. It never waits, on host or stream; a move waits for the writers.

    A question raises `InvariantError` for a write set that names a page outside the band: a padded row's −1 was not masked.
    """

    def __init__(self, steps: ForwardSteps, lists: PageLists, page_count: int) -> None:
        """None yet; forwards retire as `steps` says."""
        self._steps = steps
        self._lists = lists
        self._sets: deque[_WriteSet] = deque()
        self._marks: npt.NDArray[np.bool_] = np.zeros(page_count, np.bool_)

    def record(self, forward: RecordedForward, pages: IntArray | None) -> None:
        """Keep a write set, None for unknown, until its forward retires."""
        sets, retired = self._sets, self._steps.retired_through
        while sets and sets[0].forward.forward <= retired:
            sets.popleft()
        sets.append(_WriteSet(forward, pages))

    def newest_writer(self, pages: IntArray) -> RecordedForward | None:
        """The newest unretired forward that may write one of `pages`."""
        unretired = self._unretired()
        if not len(pages):
            return None
        self._marks[pages] = True
        try:
            for each in reversed(unretired):
                if each.pages is None or self._marks[each.pages].any():
                    return each.forward
        finally:
            self._marks[pages] = False
        return None

    def written(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `pages` an unretired forward may write; all of them while one's writes are unknown."""
        unretired = self._unretired()
        known = [each.pages for each in unretired if each.pages is not None]
        if len(known) < len(unretired):
            return np.ones(len(pages), np.bool_)
        for written in known:
            self._marks[written] = True
        found = self._marks[pages]
        for written in known:
            self._marks[written] = False
        return found

    def unretired(self) -> list[tuple[int, IntArray | None]]:
        """Each unretired forward that has a write set here, oldest first, and the set, None for unknown."""
        return [(each.forward.forward, each.pages) for each in self._unretired()]

    def _unretired(self) -> list[_WriteSet]:
        """Write sets of the forwards that have not retired, oldest first, each looked at once before it is compared."""
        retired = self._steps.retired_through
        unretired = [each for each in self._sets if each.forward.forward > retired]
        for each in unretired:
            if each.pages is not None and not each.is_checked:
                self._lists.check(each.pages, f"what forward {each.forward.forward} writes")
            each.is_checked = True
        return unretired
