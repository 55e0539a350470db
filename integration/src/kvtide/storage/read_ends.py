"""Where a forward has read what the schedule stream is about to write: its *read end* (row K4).

    forward stream    ┤ N: metadata │ layers … ├┤ N + 1: metadata │ layers …
                                                                  ▲ read end of N + 1
    schedule stream                              ── waits ─────── ┤ frees, zeroing, moves, upload for N + 2

The tables that a forward reads, rows and id tables, are read in its metadata phase. A backend that resolves everything there and
looks nothing up later says so by declaring its read end; then the schedule stream may change the tables while the layers run. If
one backend does not, the schedule stream waits for the whole forward.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtide.device import Device, Event
from kvtide.storage.errors import StorageError


class SharedReadEnds:
    """The read ends of one forward's backends; give it to `KVStorage.record_forward`."""

    def __init__(self, device: Device, backends: Iterable[str]) -> None:
        """None declared yet; `backends` names whoever reads shared tables in this forward."""
        self._device = device
        self._open = set(backends)
        self._newest: Event | None = None

    def declare(self, *backends: str) -> None:
        """Note that what these backends read lies behind the forward stream as it is now.

        Raises `StorageError` for a backend that the forward does not have or that has declared already.
        """
        unknown = [backend for backend in backends if backend not in self._open]
        if unknown:
            raise StorageError(
                f"cannot declare read ends of {unknown}: still open are {sorted(self._open)}; each declares once a forward"
            )
        self._open.difference_update(backends)
        self._newest = self._device.record_event(self._device.forward_stream)

    @property
    def end(self) -> Event | None:
        """Behind the last read of all backends; `None` while one has declared none."""
        return None if self._open else self._newest
