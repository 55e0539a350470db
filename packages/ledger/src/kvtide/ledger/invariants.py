"""Everything kvtide promises itself, as data (row L8): `INVARIANTS`, and the checker that acts on a breach.

An invariant has an id, which its error and every log carry; the check level from which it is looked at; a fatality; and the
package that guards it. Most are checked always: their breach is our bug, or a scheduler that skipped a hook, and going on
would hand out bytes that somebody still uses. `docs/invariants.md` is generated from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

import attrs
import structlog

from kvtide.ledger.errors import InvariantError

log = structlog.get_logger(__name__)


class CheckLevel(IntEnum):
    """How much is checked beyond what always is. A setting that is passed down (D8); it makes nobody wait."""

    OFF = 0
    """Only what is checked always."""

    WARN = 1
    """Everything; a breach that is not fatal is logged."""

    STRICT = 2
    """Everything; every breach raises."""


@attrs.frozen(kw_only=True)
class Invariant:
    """One promise. Checking it makes nobody wait, neither host nor stream."""

    id: str
    """What errors and logs call it; its first part says where to look."""

    holds: str
    """What must hold."""

    guard: str
    """The package that checks it."""

    checked_from: CheckLevel = CheckLevel.OFF
    """The lowest level at which it is checked: OFF for always."""

    fatal: bool = True
    """Whether a breach raises at every level that checks it; otherwise it is logged at WARN and raises at STRICT."""


_WARN = CheckLevel.WARN

_ALL = (
    Invariant(
        id="forward.record_before_launch",
        guard="ledger",
        holds="One launch is open at a time: it is recorded or aborted before the next.",
    ),
    Invariant(
        id="forward.record_is_open",
        guard="ledger",
        holds="Only the open launch is recorded or aborted, once.",
    ),
    Invariant(
        id="forward.record_before_pages",
        guard="ledger",
        holds="No page is freed, taken or moved between a launch and its recording.",
    ),
    Invariant(
        id="forward.fresh_event",
        guard="ledger",
        holds="Each recorded forward, and each completion noted for one, has an event of its own.",
    ),
    Invariant(
        id="forward.processed_in_launch_order",
        guard="ledger",
        holds="Recorded forwards are processed once each, in launch order.",
    ),
    Invariant(
        id="forward.processed_after_completion",
        guard="ledger",
        holds="A forward is processed once the host has waited for a completion that covers its event.",
    ),
    Invariant(
        id="forward.pending_returns_after_processing",
        guard="ledger, chain",
        holds="Pages that wait for a forward return by processing only once it is processed.",
    ),
    Invariant(
        id="forward.use_names_one_in_flight",
        guard="ledger",
        holds="A forward that somebody waits for, or notes a completion of, is recorded and unprocessed.",
    ),
    Invariant(
        id="forward.idle_has_no_pending",
        guard="ledger",
        holds="With no recorded forward in flight no page is pending.",
    ),
    Invariant(
        id="forward.pending_in_launch_order",
        guard="ledger",
        holds="Pages are freed under the newest forward in flight, never under one before it.",
    ),
    Invariant(
        id="usage.page_in_band",
        guard="ledger",
        holds="A use names pages of its band.",
    ),
    Invariant(
        id="usage.page_named_once",
        guard="ledger",
        holds="A use, or a move, names each page once.",
    ),
    Invariant(
        id="usage.one_record_a_use",
        guard="ledger",
        holds="A copy or transfer has one record in each band.",
    ),
    Invariant(
        id="usage.ended_once",
        guard="ledger",
        holds="Only a use that is not over is ended.",
    ),
    Invariant(
        id="usage.claim_released_once",
        guard="ledger",
        holds="Only an owner that fixes or holds pages lets go of them.",
    ),
    Invariant(
        id="usage.fixed_page_stays",
        guard="ledger",
        holds="A fixed page neither moves nor leaves its band.",
    ),
    Invariant(
        id="usage.quarantined_whole",
        guard="ledger",
        holds="A failed transfer's pages and its fenced bytes are fixed together.",
    ),
    Invariant(
        id="usage.move_follows_writers",
        guard="ledger",
        holds="A move has waited for every forward and receive that may write a source.",
    ),
    Invariant(
        id="usage.hold_follows_move",
        guard="ledger",
        holds="A move of a held page says where it went, and the hold goes along.",
    ),
    Invariant(
        id="usage.vacated_once",
        guard="ledger",
        holds="A page is vacated by one move at a time.",
    ),
    Invariant(
        id="usage.idle_has_no_use",
        guard="ledger",
        holds="At rest every use is over.",
    ),
    Invariant(
        id="band.free_of_bound_page",
        guard="chain",
        holds="A free names bound pages only: none twice, none that was never taken.",
    ),
    Invariant(
        id="band.free_outside_reservation",
        guard="chain",
        holds="An owner's free names no page that a load has reserved.",
    ),
    Invariant(
        id="band.plan_clears_transfers",
        guard="chain",
        holds="What an allocator operation writes has no transfer to wait for: its plan left them out, or they were waited for before.",
    ),
    Invariant(
        id="band.geometry_ready",
        guard="chain",
        checked_from=_WARN,
        fatal=False,
        holds="Compaction, relocation and parking meet a band without pending pages, and a plan of its present epoch.",
    ),
    Invariant(
        id="band.host_read_before_wait",
        guard="engine, host, transfer",
        checked_from=_WARN,
        fatal=False,
        holds="Within a step every host read of device memory comes before the first stream wait.",
    ),
    Invariant(
        id="chain.window_segment_bound",
        guard="storage",
        holds="A window's segment free names slots that the window still binds.",
    ),
    Invariant(
        id="chain.window_segment_released",
        guard="storage",
        holds="A full-attention segment free names slots that every window has released.",
    ),
    Invariant(
        id="chain.stage_capacity_agreement",
        guard="chain",
        checked_from=_WARN,
        holds="Pipeline stages ask the same capacity questions, answer them alike and hold the same units.",
    ),
    Invariant(
        id="chain.units_counted_once",
        guard="chain",
        holds="Every unit of a span is live, free or pending, and counted once.",
    ),
    Invariant(
        id="chain.bytes_conserved",
        guard="chain",
        holds="Every byte of the arena has at most one owner.",
    ),
    Invariant(
        id="chain.snapshot_is_fresh",
        guard="chain",
        holds="The capacity snapshot that is kept says what the bands say.",
    ),
    Invariant(
        id="chain.moves_as_planned",
        guard="chain",
        checked_from=_WARN,
        fatal=False,
        holds="A relief moves no more bytes than the plan was chosen for.",
    ),
    Invariant(
        id="chain.yes_is_a_layout",
        guard="chain",
        holds="Where room is said to fit, some plan makes it.",
    ),
    Invariant(
        id="chain.waiter_ends_transfers",
        guard="chain",
        holds="Transfers that a relief waited for have been ended when the waiter returns.",
    ),
    Invariant(
        id="capacity.observe_only_read",
        guard="chain",
        checked_from=_WARN,
        fatal=False,
        holds="No capacity decision reads an estimate.",
    ),
    Invariant(
        id="mirror.equals_host",
        guard="storage",
        checked_from=_WARN,
        fatal=False,
        holds="At idle every mirror holds what the host's table holds.",
    ),
    Invariant(
        id="tree.books",
        guard="storage",
        holds="At idle, the prefix tree's counts are those of its nodes.",
    ),
    Invariant(
        id="tree.locks",
        guard="storage",
        holds="At idle, what the prefix tree says is needed is what the requests in service need.",
    ),
    Invariant(
        id="storage.translated_ids",
        guard="storage",
        checked_from=_WARN,
        fatal=False,
        holds="Every id that a forward translates is masked or lies in its table.",
    ),
    Invariant(
        id="storage.leak",
        guard="storage",
        holds="At idle, the units held are those that the rows in use hold.",
    ),
    Invariant(
        id="storage.row_state",
        guard="storage",
        holds="At idle, a free row holds nothing and a row in use has no step open.",
    ),
    Invariant(
        id="storage.promise_leak",
        guard="storage",
        holds="At idle, the units promised in all are those promised to the rows in use.",
    ),
    Invariant(
        id="storage.held_within_promise",
        guard="storage",
        holds="At idle, no row holds more of a band than it was promised.",
    ),
    Invariant(
        id="storage.promise_kept",
        guard="storage",
        holds="At idle, all that is promised and not held can be laid out, caches evicted, unless units are fixed or under a transfer.",
    ),
    Invariant(
        id="storage.evicted_enough",
        guard="storage",
        holds="A prefix cache that said it could evict enough for a take frees enough, unless units are fixed or under a transfer.",
    ),
    Invariant(
        id="storage.admission_guarantee",
        guard="storage",
        holds="An admitted request is never refused a take.",
    ),
)

INVARIANTS: Mapping[str, Invariant] = MappingProxyType({invariant.id: invariant for invariant in _ALL})
"""Every invariant by id, in the order in which the page lists them."""


class InvariantChecks:
    """The one place that acts on a breach, at one check level. It waits for nothing."""

    def __init__(self, level: CheckLevel) -> None:
        """Checks at `level`, as the settings say."""
        self.level = level
        """From OFF to STRICT."""

    def checks(self, invariant: str) -> bool:
        """Whether the invariant is to be checked: ask before work that only the check needs. Nobody waits."""
        return self.level >= INVARIANTS[invariant].checked_from

    def broken(self, invariant: str, found: str, likely_cause: str) -> None:
        """Act on a breach: raise `InvariantError` if it is fatal or the level is STRICT, else log it. Nobody waits."""
        if INVARIANTS[invariant].fatal or self.level is CheckLevel.STRICT:
            raise InvariantError(invariant, found, likely_cause)
        log.warning("invariant.broken", invariant=invariant, found=found, likely_cause=likely_cause)
