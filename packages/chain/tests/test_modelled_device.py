"""The shipped allocator on the modelled device: no race in any interleaving, and one at once when a wait is missing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kvtide.chain.band import Band
from kvtide.chain.units import units_of
from kvtide.device import Stream, UnorderedAccessError

from .modelled_walk import ModelledWalk
from .walk import layout_of

LAYOUTS = [
    ({"state": 112, "4": 80, "full": 48}, 1500),
    ({"state": 32, "9": 160, "4": 48, "full": 112}, 2400),
    ({"full": 48}, 700),
    ({"9": 96, "4": 48}, 900),
]


def walk_of(seed: int, *, device_seed: int | None = None) -> ModelledWalk:
    units, arena_bytes = LAYOUTS[seed % len(LAYOUTS)]
    return ModelledWalk(layout_of(units, arena_bytes), seed, device_seed=device_seed)


def seeds_to_a_race(break_it: Callable[[ModelledWalk], None]) -> tuple[int, str]:
    """How many seeds it takes until the broken walk is reported, and the report."""
    for seed in range(40):
        walk = walk_of(seed)
        break_it(walk)
        try:
            walk.run(60)
        except UnorderedAccessError as error:
            return seed + 1, str(error)
    pytest.fail("40 seeds and no race")


@pytest.mark.requirement("V2", "V3", "A5", "C10", "C11", "L2")
def test_the_allocator_as_shipped_has_no_race_in_any_interleaving() -> None:
    """Forwards overlap takes, frees and moves; every read finds the bytes of its writer; no operation waits on the host."""
    moves = 0
    for seed in range(60):
        walk = walk_of(seed)
        walk.run(60)
        moves += walk.moves
    assert moves > 100, "the walks moved too little to prove anything"


@pytest.mark.requirement("C6", "C7", "C10", "L4", "L5", "V3")
def test_flushes_and_reliefs_race_with_no_backup_send_or_forward() -> None:
    """Pages move and are taken under running forwards, copies and transfers; each of those reads what it was handed."""
    moves = host_waits = sent = 0
    for seed in range(120):
        walk = walk_of(seed)
        walk.with_uses = True
        walk.run(80)
        moves, host_waits, sent = moves + walk.moves, host_waits + walk.host_waits, sent + walk.sent_units
    assert moves > 150
    assert host_waits > 5
    assert sent > 100


@pytest.mark.requirement("C10")
def test_decisions_follow_the_calls_and_never_the_timing() -> None:
    """Ranks see completions at different times; where one's pages lay elsewhere, the collective would mix requests."""
    for seed in range(12):
        ranks = [walk_of(seed, device_seed=device_seed) for device_seed in (1, 2)]
        for walk in ranks:
            walk.with_uses = True
            walk.run(60)
        first, second = ([walk.chain.live_units(name).tolist() for name in walk.held] for walk in ranks)
        assert first == second
        assert ranks[0].chain.statistics() == ranks[1].chain.statistics()
        for name, table in ranks[0].device.tables.items():
            assert (table == ranks[1].device.tables[name]).all(), name


@pytest.mark.requirement("V2", "L3")
def test_a_settle_that_does_not_wait_is_reported_within_few_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages come back from a forward that still runs: zeroing tears out what it reads."""

    def settle_at_once(band: Band, unit_count: int) -> None:
        band._holes.add(units_of(band.pending.settle(unit_count)[0]))
        band.epoch += 1

    monkeypatch.setattr(Band, "_settle", settle_at_once)
    seeds, report = seeds_to_a_race(lambda walk: None)
    assert seeds <= 5
    assert re.search(
        r"zeroing of band '[^']+' pages .* unordered with forward \d+ (reading|writing) band", report
    )


@pytest.mark.requirement("V2")
def test_a_move_that_does_not_wait_for_its_writers_is_reported_within_few_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Live pages move under the forward that writes them: it writes where they no longer are."""
    monkeypatch.setattr(Band, "_wait_writers", lambda band, units: None)
    seeds, report = seeds_to_a_race(lambda walk: None)
    assert seeds <= 5
    assert re.search(
        r"(move|zeroing) of band '[^']+' pages .* unordered with forward \d+ (reading|writing) band", report
    )


@pytest.mark.requirement("V2")
def test_an_upload_without_a_barrier_is_reported_within_few_seeds() -> None:
    """The ids change under a metadata phase that reads them: the forward goes to somebody else's pages."""

    def break_it(walk: ModelledWalk) -> None:
        walk.upload_waits_for_forwards = False

    seeds, report = seeds_to_a_race(break_it)
    assert seeds <= 5
    assert re.search(
        r"upload \d+ of mirror 'ids:[^']+' entries .* unordered with metadata of forward \d+ reading", report
    )


@pytest.mark.requirement("V2")
def test_a_staging_buffer_that_comes_back_early_is_reported_within_few_seeds() -> None:
    """The next upload's ids overwrite those that this one has not brought yet."""

    def break_it(walk: ModelledWalk) -> None:
        upload = walk.device.upload

        def upload_and_return(stream: Stream) -> int:
            count = upload(stream)
            walk.device.return_staging()
            return count

        walk.device.upload = upload_and_return  # type: ignore[method-assign]

    seeds, report = seeds_to_a_race(break_it)
    assert seeds <= 5
    assert re.search(
        r"staging for upload \d+ writes .* of staging buffer \d+ unordered with upload \d+ reading", report
    )
