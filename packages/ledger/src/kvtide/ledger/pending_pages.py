"""Pages of one band that were freed while a forward might still touch them (rows L2, L3).

They are free in every question of capacity and in none of reuse. They come back in one of two ways: the forward they wait
for is *processed*, or a take that needs them *settles* the oldest batches, which means that the schedule stream waits their events.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from kvtide.device import Event, IntArray
from kvtide.ledger.cloning import clone_of
from kvtide.ledger.errors import InvariantError
from kvtide.ledger.forward_steps import RecordedForward


class PendingBatch(NamedTuple):
    """Pages of one free. Whoever needs them early makes the schedule stream wait for `event`; otherwise nobody waits."""

    forward: int
    """The forward they wait for: the newest in flight when they were freed."""

    event: Event
    """Its event."""

    pages: IntArray
    """Physical pages, as they were freed."""


class PendingPages:
    """Pending batches of one band, oldest first. It never waits itself; `settle` says what the schedule stream must wait for."""

    def __init__(self) -> None:
        self._batches: deque[PendingBatch] = deque()
        self._page_count = 0

    def clone(self) -> PendingPages:
        """The same batches, which go their own way; events are shared (row C13). Nobody waits."""
        return clone_of(self)

    def __len__(self) -> int:
        """Pages in all batches; free in every question of capacity. Nobody waits here."""
        return self._page_count

    def add(self, pages: IntArray, newest: RecordedForward) -> None:
        """Let `pages` wait for `newest`, the newest forward in flight; neither host nor stream waits now.

        Raises `InvariantError` for a forward before one that pages wait for already: batches come back in their order.
        """
        if not len(pages):
            return
        if self._batches and newest.forward < self._batches[-1].forward:
            raise InvariantError(
                "forward.pending_in_launch_order",
                f"{len(pages)} pages are freed under forward {newest.forward}, others pend behind {self._batches[-1].forward}",
                "the free did not ask newest_recorded, or two ForwardSteps share a band",
            )
        self._batches.append(PendingBatch(newest.forward, newest.event, pages))
        self._page_count += len(pages)

    def release_through(self, forward: int) -> IntArray:
        """Pages of every batch keyed at or before `forward`, which the host has waited for and processed; nobody waits now."""
        batches = []
        while self._batches and self._batches[0].forward <= forward:
            batches.append(self._batches.popleft())
        return self._pages_of(batches)

    def settle(self, page_count: int) -> tuple[IntArray, Event | None]:
        """The oldest whole batches that cover `page_count` pages, and the newest event among them.

        Batches that share that event come too: the wait that clears one clears all. The schedule stream must wait for that
        event, and `ForwardSteps.wait_queued` be told of it, before anything writes the pages, on whichever stream: copy streams
        wait for the schedule stream, ids leave behind a gate on it, and the next forward runs behind the one waited for. Events
        of one stream are reached in order, so it covers the older ones. The host does not wait, and the forwards stay in flight.
        """
        batches: list[PendingBatch] = []
        covered = 0
        while self._batches and (
            covered < page_count or (batches and self._batches[0].forward == batches[-1].forward)
        ):
            batches.append(self._batches.popleft())
            covered += len(batches[-1].pages)
        return self._pages_of(batches), batches[-1].event if batches else None

    def batches(self) -> tuple[PendingBatch, ...]:
        """Oldest first. Nobody waits here."""
        return tuple(self._batches)

    def pages(self) -> IntArray:
        """Every pending page, oldest batch first. Nobody waits here."""
        return _concatenate([batch.pages for batch in self._batches])

    def _pages_of(self, batches: list[PendingBatch]) -> IntArray:
        if len(batches) == 1:
            self._page_count -= len(batches[0].pages)
            return batches[0].pages
        pages = _concatenate([batch.pages for batch in batches])
        self._page_count -= len(pages)
        return pages


def _concatenate(arrays: list[IntArray]) -> IntArray:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
