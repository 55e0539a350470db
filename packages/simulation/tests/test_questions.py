"""Capacity questions: each is asked, and none may answer as it likes."""

from __future__ import annotations

import pytest

from kvtide.chain import ChainAllocator
from kvtide.simulation import Operation, run_seed


@pytest.mark.requirement("X1", "C5", "K8", "T8")
@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("question", ["units_fit", "admits", "fits_after_frees", "prealloc_fits"])
def test_a_question_that_is_answered_wrongly_is_noticed(
    question: str, answer: bool, monkeypatch: pytest.MonkeyPatch, operations: dict[str, Operation]
) -> None:
    """One that nobody asks here could lie to admission and to the prefix tree; an exhaustive placement knows."""
    few = {name: operations[name] for name in ("admit", "grow", "ask")}
    assert run_seed(3, 40, few).failure is None
    monkeypatch.setattr(ChainAllocator, question, lambda *_: answer)
    failures = (run_seed(seed, 40, few).failure for seed in range(3, 30))
    found = next(failure for failure in failures if failure is not None)
    assert found.check == "capacity_answer"
    assert f"{question} sa" in found.message
