"""Capacity questions: each is asked, and none may answer as it likes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from kvtide.chain import ChainAllocator, TakeRefusal
from kvtide.device import IntArray
from kvtide.simulation import BandDraft, CheckFailedError, Operation, Scenario, World, run_seed
from kvtide.simulation.checks import after_action
from kvtide.simulation.refusals import check_refusal

ChainUses: Any = import_module("kvtide.chain.uses").ChainUses

TWO_BANDS = Scenario(
    bands=(
        BandDraft(kind="window", window_tokens=4, entry_bytes=16),
        BandDraft(kind="full", entry_bytes=16),
    ),
    arena_bytes=512,
    row_count=2,
    overlap=1,
    declares_read_end=True,
    rank_seeds=(1,),
    random_queries=False,
)


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


def test_a_refusal_of_room_that_was_to_be_made_is_looked_at_too(
    monkeypatch: pytest.MonkeyPatch, operations: dict[str, Operation]
) -> None:
    """`ensure_capacity` refuses as a take does, and whoever reads its refusal waits or gives up by it."""
    alone = {"ensure capacity": operations["ensure capacity"]}
    assert run_seed(3, 40, alone).failure is None
    monkeypatch.setattr(TakeRefusal, "is_final", property(lambda _: False))
    failures = (run_seed(seed, 40, alone).failure for seed in range(3, 30))
    found = next(failure for failure in failures if failure is not None)
    assert found.check == "capacity_answer"
    assert "not final" in found.message


@pytest.mark.requirement("X1", "C5")
@pytest.mark.parametrize(
    ("said", "needed", "freeable", "is_right"),
    [
        (2, 2, 3, True),
        (None, 3, 2, True),
        (3, 2, 3, False),
        (1, 2, 3, False),
        (3, 3, 2, False),
        (0, 0, 2, False),
        (None, 2, 2, False),
    ],
)
def test_the_fewest_units_that_would_have_to_go_are_neither_more_nor_fewer(
    said: int | None, needed: int, freeable: int, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who evicts by a number too small is refused again, by one too large loses what it need not; more than there are helps nobody."""
    world = World(TWO_BANDS)
    asked = {band.name: 1_000 for band in world.bands}
    refusal = world.ranks[0].chain.take(pages=1_000)
    assert isinstance(refusal, TakeRefusal)

    def holds(_: Mapping[str, int], freed: Mapping[str, int]) -> bool:
        return freed["full"] >= needed

    def check() -> None:
        check_refusal(refusal, asked, layout=world.layout, freeable={"full": freeable}, holds=holds)

    monkeypatch.setattr(TakeRefusal, "would_serve", lambda _: {} if said is None else {"full": said})
    if is_right:
        check()
        return
    with pytest.raises(CheckFailedError, match="units of band 'full', freed, would do"):
        check()


@pytest.mark.requirement("X1", "C5")
@pytest.mark.parametrize("place", [0, 1])
def test_a_chain_that_keeps_too_much_of_any_band_is_noticed(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bands are looked at in turn; what would come free and is kept makes refusals final that are not."""
    world = World(TWO_BANDS)
    assert world.take(pages=2) is not None
    name, keeps = world.bands[place].name, ChainUses.keeps
    for _ in world.bands:
        after_action(world)

    def keep_all(uses: Any, band_name: str, units: IntArray) -> Any:
        return np.ones(len(units), np.bool_) if band_name == name else keeps(uses, band_name, units)

    monkeypatch.setattr(ChainUses, "keeps", keep_all)

    def look_at_each() -> None:
        for _ in world.bands:
            after_action(world)

    with pytest.raises(CheckFailedError, match=f"of band '{name}' would not come free"):
        look_at_each()
