"""A broken invariant is our bug, or a scheduler that skipped a hook: an internal error with an id (row L8)."""

from __future__ import annotations


class InvariantError(RuntimeError):
    """An invariant does not hold; the call that found it changed nothing, and neither host nor stream has waited.

    Its id is one of `kvtide.ledger.INVARIANTS`, which says what must hold, at which levels it is checked, and who guards it.
    """

    def __init__(self, invariant: str, found: str, likely_cause: str) -> None:
        super().__init__(f"[{invariant}] {found} (likely cause: {likely_cause})")
        self.invariant = invariant
        """Id of the invariant, e.g. `forward.record_before_pages`."""
