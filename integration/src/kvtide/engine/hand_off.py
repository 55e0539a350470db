"""A function that runs in pieces: it hands control back where it likes, and goes on when it is told to.

It runs in a thread of its own, and of the two threads one runs at a time, so nothing is concurrent and everything repeatable:

    the device   advance ┐          ┌ advance ┐          ┌ …
    the body             └ … hand_back        └ … hand_back
"""

from __future__ import annotations

import threading
from collections.abc import Callable

HandBack = Callable[[], None]
"""Called by the body where others may run."""


class HandOff:
    """One run of one body."""

    def __init__(self, body: Callable[[HandBack], None]) -> None:
        """Nothing runs yet."""
        self._body = body
        self._runs_through = False
        self._is_over = False
        self._error: BaseException | None = None
        self._body_may_run = threading.Semaphore(0)
        self._body_has_stopped = threading.Semaphore(0)
        # A run that is given up, with the program or a failed test, does not hold the program up.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Run the body to its next hand-back, or to its end; nothing if it has ended. What it raises is raised here."""
        if self._is_over:
            return
        self._body_may_run.release()
        self._body_has_stopped.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Run the body to its end, whatever it hands back."""
        self._runs_through = True
        self.advance()

    def _run(self) -> None:
        self._body_may_run.acquire()
        try:
            self._body(self._hand_back)
        except BaseException as error:  # noqa: BLE001  # it is raised where the body is told to go on
            self._error = error
        self._is_over = True
        self._body_has_stopped.release()

    def _hand_back(self) -> None:
        if not self._runs_through:
            self._body_has_stopped.release()
            self._body_may_run.acquire()
