"""Who holds units beside the requests of a world: somebody that another package brings, such as a prefix tree and requests that share it.

A holder's requests are entries of batches like any other: it puts them there, and hears what becomes of the forward. It calls each
rank's allocator itself and says what came of it (`Allocators.note_taken` and the like). Nobody else frees, copies or refills what
it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtide.simulation.requests import BatchEntry, Request


class Holder(Protocol):
    """Appended to `World.holders`; requests of others are in its arguments too."""

    def launched(self, entries: Sequence[BatchEntry]) -> None:
        """A forward over `entries` was launched and recorded; their requests have the new lengths."""

    def processed(self, requests: Sequence[Request]) -> None:
        """The oldest forward, over `requests`, was processed; some may be over."""

    def abandoned(self, entries: Sequence[BatchEntry], *, is_launched: bool) -> None:
        """The open batch was given up, its debts paid."""

    def check(self) -> None:
        """Behind every action: raise `CheckFailedError` for what is wrong."""

    def let_go(self) -> None:
        """The run is over and nothing in flight: free all that is held."""
