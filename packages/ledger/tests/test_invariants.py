"""The registry of invariants, and what a breach does at each check level (L8)."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from kvtide.ledger import INVARIANTS, CheckLevel, InvariantChecks, InvariantError

SEED_CHECKS = {
    "band.free_of_bound_page": (True, CheckLevel.OFF),
    "band.free_outside_reservation": (True, CheckLevel.OFF),
    "chain.window_segment_bound": (True, CheckLevel.OFF),
    "chain.window_segment_released": (True, CheckLevel.OFF),
    "chain.stage_capacity_agreement": (True, CheckLevel.WARN),
    "band.host_read_before_wait": (False, CheckLevel.WARN),
    "band.geometry_ready": (False, CheckLevel.WARN),
    "capacity.observe_only_read": (False, CheckLevel.WARN),
}


@pytest.mark.requirement("L8")
def test_the_seed_s_checks_stand_in_the_registry_with_their_fatality_and_level() -> None:
    """Four of them cost the host nothing and are checked at every level here; the rest from warn up."""
    found = {
        invariant: (INVARIANTS[invariant].fatal, INVARIANTS[invariant].checked_from)
        for invariant in SEED_CHECKS
    }
    assert found == SEED_CHECKS
    assert all(invariant == INVARIANTS[invariant].id for invariant in INVARIANTS)


@pytest.mark.requirement("L8")
@pytest.mark.parametrize(
    ("invariant", "checked_at"),
    [
        ("forward.fresh_event", {CheckLevel.OFF, CheckLevel.WARN, CheckLevel.STRICT}),
        ("chain.stage_capacity_agreement", {CheckLevel.WARN, CheckLevel.STRICT}),
        ("band.geometry_ready", {CheckLevel.WARN, CheckLevel.STRICT}),
    ],
)
def test_a_check_is_asked_for_from_its_level_on(invariant: str, checked_at: set[CheckLevel]) -> None:
    """A check that is off must cost nothing, so its guard asks before it works."""
    assert {level for level in CheckLevel if InvariantChecks(level).checks(invariant)} == checked_at


@pytest.mark.requirement("L8")
@pytest.mark.parametrize("level", [CheckLevel.WARN, CheckLevel.STRICT])
@pytest.mark.parametrize("invariant", ["band.geometry_ready", "chain.stage_capacity_agreement"])
def test_a_breach_raises_unless_it_is_not_fatal_and_the_level_is_warn(
    invariant: str, level: CheckLevel
) -> None:
    """What is not fatal may be looked at in service without stopping it; the log carries the same three texts."""
    checks = InvariantChecks(level)
    with capture_logs() as logged:
        if level is CheckLevel.WARN and not INVARIANTS[invariant].fatal:
            checks.broken(invariant, "3 pages pend", "a plan was kept too long")
            assert logged == [
                {
                    "event": "invariant.broken",
                    "log_level": "warning",
                    "invariant": invariant,
                    "found": "3 pages pend",
                    "likely_cause": "a plan was kept too long",
                }
            ]
            return
        with pytest.raises(InvariantError) as caught:
            checks.broken(invariant, "3 pages pend", "a plan was kept too long")
    assert str(caught.value) == f"[{invariant}] 3 pages pend (likely cause: a plan was kept too long)"
    assert logged == []
