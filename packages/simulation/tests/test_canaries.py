"""Each check is shown what it is for: a check that finds nothing here would find nothing in the field."""

from __future__ import annotations

import pytest

from kvtide.simulation import CHECKS, Operation, run_seed

from .canaries import CANARIES
from .use_canaries import USE_CANARIES

ACTIONS = 200


@pytest.mark.requirement("X1", "X2")
@pytest.mark.parametrize("name", CANARIES)
def test_a_planted_fault_is_found_by_the_check_it_is_for(
    name: str, monkeypatch: pytest.MonkeyPatch, operations: dict[str, Operation]
) -> None:
    """Within a few short runs, and under the name that says what is wrong."""
    canary = CANARIES[name]
    canary.plant(monkeypatch)
    found: dict[str, int] = {}
    for seed in range(canary.seeds):
        failure = run_seed(seed, ACTIONS, operations).failure
        if failure is not None:
            found.setdefault(failure.check, seed)
        if canary.check in found:
            return
    pytest.fail(f"{canary.seeds} seeds found {found}, and no {canary.check}")


def test_every_check_has_a_canary() -> None:
    """A check without one may be blind."""
    canaries = [*CANARIES.values(), *USE_CANARIES.values()]
    assert {canary.check for canary in canaries} == set(CHECKS)
