"""Retraction backups (K2, K5, H1, H2): what is kept, when it is over, what is refused, and that nothing is lost on the way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvtide.arena import SCRATCH_BYTES, CPUDevice, HostMemory
from kvtide.chain import Taken
from kvtide.device import Event, IntArray, Stream, UnitGrid
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.plan import KVStoragePlan
from kvtide.sizing import CheckpointStrategy, ChunkReads, DemandPurpose, ServingPolicy, SizingError
from kvtide.storage import (
    AdmissionRefusal,
    HostMemoryError,
    KVStorage,
    Overcommit,
    PreparedStep,
    RowBackup,
    SharedReadEnds,
    StorageError,
    WillFree,
    build_kv_storage,
)

from .test_storage import CHUNK_TOKENS, MODELS, ToyModel, plan_of
from .tiny import tiny_plan, tiny_storage

HYBRID = plan_of(windows=(5,), full=True, state=True, page_tokens=2)
PLAIN, OVERLAP = ServingPolicy(), ServingPolicy(overlap=True)


def build(
    budget_bytes: int = 14_000,
    policy: ServingPolicy = PLAIN,
    plan: KVStoragePlan = HYBRID,
    **more: Any,
) -> KVStorage:
    return build_kv_storage(
        plan,
        budget_bytes=SCRATCH_BYTES + budget_bytes,
        max_running_requests=4,
        max_context_tokens=64,
        chunk_tokens=8,
        policy=policy,
        **more,
    )


def admitted(storage: KVStorage, prompt: int, output: int) -> int:
    return int(np.asarray(storage.admit([prompt], [output]))[0])


def restored(storage: KVStorage, *backups: RowBackup) -> list[int]:
    rows = storage.restore(backups)
    assert not isinstance(rows, AdmissionRefusal), str(rows)
    found: list[int] = rows.tolist()
    return found


def in_flight(storage: KVStorage, row: int, count: int, chosen: int = 0) -> PreparedStep:
    """A forward of one row, which writes its row state, queued and recorded."""
    step = storage.prepare_step([row], [count])
    assert isinstance(step, PreparedStep), str(step)
    unresolved = storage.launch_forward(step)

    def forward() -> None:
        ids = unresolved.resolve()
        storage.row_state.advance(ids.rows, count, torch.tensor([chosen]))

    storage.device.queue_work(storage.device.forward_stream, forward)
    storage.record_forward(step)
    return step


def done(storage: KVStorage, step: PreparedStep) -> None:
    assert step.done_event is not None
    storage.device.wait_on_host(step.done_event)
    storage.forward_processed(step)
    storage.advance(step)


def ran(storage: KVStorage, row: int, *counts: int, chosen: int = 0) -> None:
    for count in counts:
        done(storage, in_flight(storage, row, count, chosen))


def row_state(storage: KVStorage, row: int) -> tuple[int, int, int]:
    """Length, last token, tokens drawn, as the device has them."""
    state = storage.row_state
    return int(state.lengths[row]), int(state.last_tokens[row]), int(state.drawn_counts[row])


def modelled(policy: ServingPolicy = OVERLAP, **more: Any) -> tuple[KVStorage, ModelledTensorDevice]:
    storage = build(policy=policy, make_device=ModelledTensorDevice, **more)
    device = storage.device
    assert isinstance(device, ModelledTensorDevice)
    return storage, device


# ── the row ──


@pytest.mark.requirement("K2")
def test_a_restored_row_is_not_reset_and_a_row_handed_out_beside_it_is() -> None:
    """Its next forward finds the token that its last one chose, where it was, and the sampler's cursor; the other finds nothing."""
    storage = build()
    row = admitted(storage, 6, 9)
    ran(storage, row, 6, chosen=41)
    ran(storage, row, 1, 1, chosen=43)
    (backup,) = storage.retract_to_host([row])
    other = admitted(storage, 3, 3)
    assert other == row
    ran(storage, other, 3, chosen=99)
    (again,) = restored(storage, backup)
    fresh = admitted(storage, 2, 2)
    storage.release([other])
    ran(storage, fresh, 2, chosen=7)
    assert row_state(storage, again) == (8, 43, 3)
    assert row_state(storage, fresh) == (2, 7, 1)
    ran(storage, again, 1, chosen=44)
    assert row_state(storage, again) == (9, 44, 4)


@pytest.mark.requirement("K2")
def test_a_restored_row_is_not_reset_though_its_former_request_was_to_be() -> None:
    """That one was admitted and released before any forward came: the mark was its own."""
    storage = build()
    row = admitted(storage, 4, 9)
    ran(storage, row, 4, chosen=41)
    (backup,) = storage.retract_to_host([row])
    storage.release([admitted(storage, 3, 3)])
    (again,) = restored(storage, backup)
    assert again == row
    step = storage.prepare_step([again], [1])
    assert isinstance(step, PreparedStep), str(step)
    storage.launch_forward(step)
    assert step.beginnings is not None
    assert not len(step.beginnings.resets)
    assert list(step.beginnings.restored) == [again]
    storage.abandon(step)
    ran(storage, again, 1, chosen=42)
    assert row_state(storage, again) == (5, 42, 2)


@pytest.mark.requirement("K2", "K1")
def test_what_an_aborted_launch_was_to_bring_back_the_next_one_does() -> None:
    """Its metadata phase may never have been queued: then a row would go on from another request's token."""
    storage = build()
    row = admitted(storage, 4, 9)
    ran(storage, row, 4, chosen=41)
    (backup,) = storage.retract_to_host([row])
    ran(storage, admitted(storage, 3, 3), 3, chosen=99)
    (again,) = restored(storage, backup)
    step = storage.prepare_step([again], [1])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.abandon(step)
    ran(storage, again, 1, chosen=42)
    assert row_state(storage, again) == (5, 42, 2)


@pytest.mark.requirement("K2", "H1")
def test_a_row_is_backed_up_as_its_forward_in_flight_leaves_it() -> None:
    """The host has not seen what that forward chose, and its step is advanced over when the row is another's; the device knows both."""
    storage, device = modelled()
    row = admitted(storage, 4, 9)
    first = in_flight(storage, row, 4, chosen=41)
    second = in_flight(storage, row, 1, chosen=42)
    assert device.model.ready_streams(), "neither has run"
    (backup,) = storage.retract_to_host([row])
    assert backup.written_tokens == 5
    newcomer = admitted(storage, 8, 3)
    third = in_flight(storage, newcomer, 8, chosen=99)
    for step in (first, second, third):
        done(storage, step)
    (again,) = restored(storage, backup)
    assert storage.requests.lengths[again] == storage.requests.recorded[again] == 5
    done(storage, in_flight(storage, again, 1, chosen=43))
    assert row_state(storage, again) == (6, 43, 3)


@pytest.mark.requirement("K2", "H1", "H2")
def test_a_backup_is_restored_before_its_own_copy_has_begun() -> None:
    """Nobody waits: the copy stream does one behind the other, and the forward stream both."""
    storage, device = modelled()
    row = admitted(storage, 4, 9)
    first = in_flight(storage, row, 4, chosen=41)
    with device.model.no_host_waits("retract and restore"):
        (backup,) = storage.retract_to_host([row])
        (again,) = restored(storage, backup)
    assert storage.statistics().backups.copies_in_flight == 2
    assert (backup.memory.bytes == 0xFF).all(), "nothing was copied yet"
    second = in_flight(storage, again, 1, chosen=42)
    done(storage, first)
    done(storage, second)
    assert row_state(storage, again) == (5, 42, 2)
    assert not storage.statistics().backups.copies_in_flight


@pytest.mark.requirement("K2")
def test_a_row_that_no_forward_has_begun_is_backed_up_as_it_is_to_begin() -> None:
    """The device still has its former request's values; reset or brought back they are by a forward that has yet to come."""
    storage = build()
    former = admitted(storage, 4, 4)
    ran(storage, former, 4, chosen=77)
    storage.release([former])
    row = admitted(storage, 4, 9)
    assert row == former
    (unbegun,) = storage.retract_to_host([row])
    (again,) = restored(storage, unbegun)
    (same,) = storage.retract_to_host([again])
    assert same is unbegun, "it still is what is to be brought back"
    (again,) = restored(storage, same)
    ran(storage, again, 4, chosen=41)
    assert row_state(storage, again) == (4, 41, 1)
    (backup,) = storage.retract_to_host([again])
    (again,) = restored(storage, backup)
    (same,) = storage.retract_to_host([again])
    assert same is backup
    (again,) = restored(storage, same)
    ran(storage, again, 1, chosen=42)
    assert row_state(storage, again) == (5, 42, 2)
    assert storage.statistics().backups.backed_up_requests == 4
    storage.verify_idle()


@pytest.mark.requirement("K2", "H2")
def test_the_next_forward_waits_for_a_row_state_that_comes_back_without_any_unit() -> None:
    """No copy of units is open then that it would wait for, and the row was another's."""
    storage, device = modelled(plan=plan_of(windows=(5,), full=True, state=False, page_tokens=2))
    former = admitted(storage, 4, 4)
    done(storage, in_flight(storage, former, 4, chosen=77))
    storage.release([former])
    row = admitted(storage, 4, 9)
    (backup,) = storage.retract_to_host([row])
    (again,) = restored(storage, backup)
    assert again == former
    assert not storage.statistics().backups.copies_in_flight
    assert device.model.ready_streams(), "nothing was copied yet"
    done(storage, in_flight(storage, again, 4, chosen=41))
    assert row_state(storage, again) == (4, 41, 1)


# ── the bytes ──


def next_reads(storage: KVStorage, toy: ToyModel, row: int, *counts: int) -> None:
    """Forwards that look at all that they may read."""
    for count in counts:
        step = storage.prepare_step([row], [count])
        assert isinstance(step, PreparedStep), str(step)
        toy.forward(step)
        storage.forward_processed(step)
        storage.advance(step)


@pytest.mark.requirement("K2", "H1")
def test_a_backup_is_whole_and_no_more() -> None:
    """All of full attention, a window as far as the next token looks back, the running state: each unit once, in host memory."""
    storage = build()
    toy = ToyModel(storage)
    row = admitted(storage, 13, 9)
    toy.request_of_row[row] = 1
    next_reads(storage, toy, row, 8, 5, 1)
    (backup,) = storage.retract_to_host([row])
    assert {name: pages.tolist() for name, pages in backup.pages.items()} == {
        "window-5": [5, 6],  # tokens 10 to 13
        "full": [0, 1, 2, 3, 4, 5, 6],
    }
    units = {"state": 1, "window-5": 2, "full": 7}
    assert {band.name: backup.unit_count(band.name) for band in storage.layout.bands} == units
    assert backup.byte_count == 32 + sum(band.unit_bytes * units[band.name] for band in storage.layout.bands)
    assert set(storage.resident_now().values()) == {0}
    (again,) = restored(storage, backup)
    assert storage.resident_now() == units
    assert storage.statistics().chain.owed_units == 0, "the copy fills what came without zeroing"
    toy.request_of_row = {again: 1}
    next_reads(storage, toy, again, 1, 1)


@pytest.mark.requirement("K2", "K5")
def test_a_backup_is_a_value_that_may_be_restored_again() -> None:
    """Two rows of one backup are two requests that have come equally far; neither writes where the other reads."""
    storage = build()
    toy = ToyModel(storage)
    row = admitted(storage, 7, 4)
    toy.request_of_row[row] = 1
    next_reads(storage, toy, row, 7, 1)
    (backup,) = storage.retract_to_host([row])
    rows = restored(storage, backup, backup)
    assert len(set(rows)) == 2
    for one in rows:
        toy.request_of_row[one] = 1
    for one in rows:
        next_reads(storage, toy, one, 1)
        toy.request_of_row[one] = 1
    storage.release(rows)
    storage.verify_idle()


@pytest.mark.requirement("K2", "K7")
def test_a_prompt_that_was_written_in_part_goes_on_where_it_was() -> None:
    """The newest request is retracted first, and is often still prefilling."""
    storage = build()
    toy = ToyModel(storage)
    row = admitted(storage, 21, 4)
    toy.request_of_row[row] = 1
    next_reads(storage, toy, row, 8)
    (backup,) = storage.retract_to_host([row])
    (again,) = restored(storage, backup)
    toy.request_of_row = {again: 1}
    assert storage.requests.chunk_limits[again] == 8
    assert storage.next_chunk_tokens(again, 99) == 8
    next_reads(storage, toy, again, 8, 5, 1, 1, 1)
    storage.release([again])
    storage.verify_idle()


@pytest.mark.requirement("K2", "K7")
def test_chunks_of_a_row_that_shared_end_on_the_grid_when_it_no_longer_does() -> None:
    """Its prompt is not through, and other rows' checkpoints lie where they did."""
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER, checkpoint_interval=4)
    plan = plan_of(windows=(5,), full=True, state=False, page_tokens=2)
    storage = build(policy=policy, plan=plan)
    (row,) = np.asarray(storage.admit([15], [3], prompts=[list(range(15))])).tolist()
    ran(storage, row, 4)
    (backup,) = storage.retract_to_host([row])
    (again,) = restored(storage, backup)
    assert [storage.next_chunk_tokens(again, most) for most in (99, 7, 4, 3)] == [8, 4, 4, 0]
    ran(storage, again, 8)
    assert storage.next_chunk_tokens(again, 99) == 3, "the prompt's last"
    ran(storage, again, 3, 1)
    storage.verify_idle()


@pytest.mark.requirement("K1", "K7")
def test_a_checkpoint_may_be_noted_of_every_row_though_hits_of_some_are_the_trees() -> None:
    """A scheduler that notes them all must not be stuck with a row that shares prefixes, nor with one that did and came back."""
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER, checkpoint_interval=4)
    plan = plan_of(windows=(5,), full=True, state=False, page_tokens=2)
    storages = [build(policy=policy, plan=plan) for _ in range(2)]
    resident: list[list[dict[str, int]]] = []
    for storage, notes in zip(storages, (False, True), strict=True):
        resident.append([])
        (row,) = np.asarray(storage.admit([24], [6], prompts=[list(range(24))])).tolist()
        for place, count in enumerate([8, 8, 8, 1, 1, 1, 1, 1]):
            if place == 1:
                (backup,) = storage.retract_to_host([row])
                (row,) = restored(storage, backup)
            step = in_flight(storage, row, count)
            storage.forward_processed(step)
            if notes:
                storage.checkpoints_taken([row], [int(storage.requests.recorded[row]) // 4 * 4])
            storage.advance(step)
            resident[-1].append(storage.resident_now())
        with pytest.raises(StorageError, match=r"grid of 4 tokens.* no earlier than \[0\]"):
            storage.checkpoints_taken([row], [6])
        storage.verify_idle()
    assert resident[0] == resident[1], "a note keeps nothing for such a row"


# ── prices and verdicts ──


@pytest.mark.requirement("K5", "S5")
@pytest.mark.parametrize("decoded", [0, 1, 5])
def test_a_backup_is_priced_as_what_arrives_whole(decoded: int) -> None:
    """All of its output is promised, as to a request whose prompt another process has computed (ADR 3): no chunk of it is to come."""
    storage = build(overcommit=Overcommit(0.2))
    row = admitted(storage, 24, 10)
    ran(storage, row, 8, 8, 8, *[1] * decoded)
    (backup,) = storage.retract_to_host([row])
    restored(storage, backup)
    lengths = {"prompt_tokens": 24 + decoded, "output_tokens": 10 - decoded}
    demand = storage.sized.demand(**lengths, purpose=DemandPurpose.DECODE_PREALLOC)
    promised = storage.admitted_at_peak()
    assert tuple(promised[band.name] for band in storage.layout.bands) == demand.units
    assert demand.units < storage.sized.demand(**lengths).units


@pytest.mark.requirement("K5", "K6")
def test_prompts_that_are_restored_together_go_on_in_the_shortest_of_their_chunks() -> None:
    """Each is promised what it needs in the chunks that it had: longer ones may need more."""
    storage = build(6_600)
    limits, backups = [], []
    for prompt, output in ((20, 12), (16, 2)):
        row = admitted(storage, prompt, output)
        ran(storage, row, 2)
        (backup,) = storage.retract_to_host([row])
        limits.append(int(backup.chunk_limit))
        backups.append(backup)
    shorter = attrs.evolve(backups[0], chunk_limit=4)  # as one is that has gone on in shorter ones
    for pair in ((shorter, backups[1]), (backups[1], shorter)):
        rows = restored(storage, *pair)
        assert storage.requests.chunk_limits[rows].tolist() == [4, 4]
        demands = [
            storage.sized.demand(
                prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens, chunk_tokens=4
            ).units
            for one in pair
        ]
        assert list(storage.admitted_at_peak().values()) == [
            sum(units) for units in zip(*demands, strict=True)
        ]
        storage.release(rows)
    assert limits == [8, 8]


@pytest.mark.requirement("K5", "K6")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_admitted_can_be_restored_wherever_it_is_retracted(data: st.DataObject) -> None:
    """In an arena that holds nothing else a backup is never turned away: its request was admitted for all that it asks."""
    grid = data.draw(st.sampled_from([None, 4]))
    policy = ServingPolicy(
        overlap=data.draw(st.booleans()),
        chunk_reads=data.draw(st.sampled_from(ChunkReads)),
        strategy=CheckpointStrategy.NONE if grid is None else CheckpointStrategy.EXTRA_BUFFER,
        checkpoint_interval=grid,
    )
    try:
        storage = build_kv_storage(
            plan_of(**data.draw(st.sampled_from(MODELS)), page_tokens=data.draw(st.sampled_from([1, 2, 4]))),
            budget_bytes=SCRATCH_BYTES + data.draw(st.integers(3_000, 9_000)),
            max_running_requests=2,
            max_context_tokens=64,
            chunk_tokens=CHUNK_TOKENS,
            policy=policy,
        )
    except SizingError:
        return
    prompt, output = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    rows = storage.admit([prompt], [output])
    if isinstance(rows, AdmissionRefusal):
        return
    (row,) = rows.tolist()
    while storage.requests.lengths[row] < prompt + output - 1:
        if data.draw(st.booleans()):
            (backup,) = storage.retract_to_host([row])
            (row,) = restored(storage, backup)
        end = int(storage.requests.lengths[row])
        count = storage.next_chunk_tokens(row, 99) if end < prompt else 1
        step = storage.prepare_step([row], [count])
        assert isinstance(step, PreparedStep), str(step)
        storage.launch_forward(step).resolve()
        storage.record_forward(step)
        storage.forward_processed(step)
        if grid is not None and (end + count) // grid > end // grid:
            storage.checkpoints_taken([row], [(end + count) // grid * grid])
        storage.advance(step)
        storage.verify_idle()


@pytest.mark.requirement("K5")
def test_a_restore_that_is_refused_leaves_the_backup_and_everything_else_as_they_were() -> None:
    """It waits like an arrival, with figures, for what is in service; once that is over it comes back."""
    storage = build(6_600)
    row = admitted(storage, 20, 12)
    ran(storage, row, 8)
    (backup,) = storage.retract_to_host([row])
    others = []
    while not isinstance(rows := storage.admit([20], [12]), AdmissionRefusal):
        others += rows.tolist()
    before = storage.statistics()
    refusal = storage.restore([backup])
    assert isinstance(refusal, AdmissionRefusal)
    assert refusal.waits_for[0] is WillFree.REQUESTS
    assert not refusal.is_final
    assert "beside what is promised" in str(refusal)
    after = storage.statistics()
    assert after.chain == before.chain
    assert after.backups == before.backups
    assert after.admission.waits["requests in service"] == before.admission.waits["requests in service"] + 1
    storage.release(others)
    (again,) = restored(storage, backup)
    ran(storage, again, 8, 4, 1)


@pytest.mark.requirement("K5")
def test_a_prompt_goes_on_in_shorter_chunks_where_nothing_will_free_longer_ones() -> None:
    """Beside units that a failed transfer keeps: they may never come back, and its request was promised an end. In the longest that fit, as
    whoever arrives there: each forward costs.
    """
    found = []
    for kept in range(15):
        storage = tiny_storage(tiny_plan(window=2), units=30, chunk_tokens=8, context_tokens=20)
        row = admitted(storage, 14, 3)
        ran(storage, row, 4)
        (backup,) = storage.retract_to_host([row])
        taken = storage.chain.take(pages=kept)
        assert isinstance(taken, Taken)
        if kept:
            storage.chain.uses.fix("a failed transfer", {"full": taken.pages})
            storage.chain.free_pages("window-2", taken.pages)
            storage.chain.free_pages("full", taken.pages)
        rows = storage.restore([backup])
        if isinstance(rows, AdmissionRefusal):
            assert rows.is_final
            assert str(rows).endswith("nothing is going to free any")
            found.append(0)
        else:
            found.append(int(storage.requests.chunk_limits[rows[0]]))
    assert sorted(set(found), reverse=True) == list(range(8, -1, -1)), found
    assert found == sorted(found, reverse=True)


@pytest.mark.requirement("K5")
def test_backups_that_do_not_fit_together_say_how_many_do() -> None:
    """Nothing is going to free anything, so all of them together would wait for ever."""
    storage = build(6_600)
    row = admitted(storage, 20, 12)
    ran(storage, row, 8)
    (backup,) = storage.retract_to_host([row])
    refusal = storage.restore([backup] * 3)
    assert isinstance(refusal, AdmissionRefusal)
    assert not refusal.waits_for
    assert refusal.first_that_fit == 2
    refusal = storage.restore([backup] * 5)
    assert isinstance(refusal, AdmissionRefusal)
    assert "though the first 2 would do: they need as many rows, of which there are 4" in str(refusal)
    assert refusal.first_that_fit == 2, "there are rows for four, and memory for two"
    restored(storage, *[backup] * 2)


@pytest.mark.requirement("K5")
@pytest.mark.parametrize("budget_bytes", [6_000, 6_600, 9_000, 14_000])
@pytest.mark.parametrize("is_idle", [True, False])
def test_as_many_backups_are_restored_as_their_refusal_names(is_idle: bool, budget_bytes: int) -> None:
    """Rows are short, or memory, or both; and what no empty arena holds together does not wait until it is empty."""
    storage = build(budget_bytes)
    row = admitted(storage, 20, 12)
    ran(storage, row, 8)
    (backup,) = storage.retract_to_host([row])
    other = None if is_idle else admitted(storage, 2, 2)
    named = set()
    for count in range(2, 7):
        answer = storage.restore([backup] * count)
        if not isinstance(answer, AdmissionRefusal):
            storage.release(answer)
            continue
        if answer.first_that_fit is None:
            assert answer.waits_for, "for what is in service"
            continue
        assert not answer.waits_for
        assert f"the first {answer.first_that_fit} would do" in str(answer)
        named.add(answer.first_that_fit)
    assert len(named) == 1, "the same first ones, of however many"
    if other is not None:
        storage.release([other])
    (most,) = named
    assert most < 5
    rows = restored(storage, *[backup] * most)
    storage.release(rows)
    refusal = storage.restore([backup] * (most + 1))
    assert isinstance(refusal, AdmissionRefusal)
    assert refusal.first_that_fit == most
    storage.verify_idle()


@pytest.mark.requirement("K5")
def test_a_restored_request_is_promised_all_and_is_not_retracted_again() -> None:
    """Else two requests would push each other out for ever."""
    storage = build(overcommit=Overcommit(0.1))
    row = admitted(storage, 4, 20)
    ran(storage, row, 4)
    share = storage.admitted_at_peak()["full"]
    (backup,) = storage.retract_to_host([row])
    (again,) = restored(storage, backup)
    assert storage.admitted_at_peak()["full"] == 12 > share
    ran(storage, again, *[1] * 19)
    assert storage.statistics().admission.further_shares == 0
    assert storage.requests.lengths[again] == storage.requests.limits[again] == 23


# ── when copies are over ──


@pytest.mark.requirement("H1", "L4", "C10")
def test_a_copy_is_over_once_a_forward_that_was_launched_behind_it_is_processed() -> None:
    """That is the same on every rank. The forward that ran when it was submitted says nothing of it."""
    storage, device = modelled()
    row, other = admitted(storage, 4, 9), admitted(storage, 4, 9)
    first = in_flight(storage, row, 4)
    (backup,) = storage.retract_to_host([row])
    second = in_flight(storage, other, 4)
    assert storage.chain.uses.has_host_copies
    done(storage, first)
    assert storage.statistics().backups.copies_in_flight == 1
    assert device.schedule_stream.wait_count
    third = in_flight(storage, other, 1)
    done(storage, second)
    assert storage.statistics().backups.copies_in_flight == 0
    assert not storage.chain.uses.has_host_copies
    done(storage, third)
    assert backup.written_tokens == 4


@pytest.mark.requirement("H1", "L4")
def test_a_copy_whose_first_launch_was_given_up_is_over_with_the_next() -> None:
    """Else it would be open until the storage is idle, and its units, and whoever waits for a host copy, with it."""
    storage = build()
    row, other = admitted(storage, 4, 9), admitted(storage, 4, 9)
    ran(storage, row, 4)
    storage.retract_to_host([row])
    step = storage.prepare_step([other], [4])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.abandon(step)
    assert storage.statistics().backups.copies_in_flight == 1
    ran(storage, other, 4)
    assert storage.statistics().backups.copies_in_flight == 0


@pytest.mark.requirement("H1", "H2")
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("name", ["forward_stream", "schedule_stream"])
def test_a_copy_comes_behind_what_both_streams_were_told_before(name: str, restores: bool) -> None:
    """A move may have yet to bring the units there, a zeroing of their former owner's to go over them, a forward to write them."""
    storage, device = modelled()
    row = admitted(storage, 4, 9)
    done(storage, in_flight(storage, row, 4))
    backups = storage.retract_to_host([row]) if restores else ()
    told: list[str] = []
    device.queue_work(getattr(device, name), lambda: told.append(name))
    if restores:
        restored(storage, *backups)
    else:
        storage.retract_to_host([row])
    assert not told, "nobody has waited"
    device.wait_on_host(device.record_event(device.copy_stream))
    assert told == [name]


@pytest.mark.requirement("H1", "K5")
def test_with_nothing_in_service_no_request_waits_for_a_copy_that_nothing_would_end() -> None:
    """A request that fits in no arena with its chunks would wait for ever, or the backup's own request would."""
    storage = build(6_600)
    row = admitted(storage, 20, 12)
    ran(storage, row, 8)
    (backup,) = storage.retract_to_host([row])
    assert storage.statistics().backups.copies_in_flight == 1
    refusal = storage.restore([backup] * 3)
    assert isinstance(refusal, AdmissionRefusal)
    assert not refusal.waits_for
    assert storage.statistics().backups.copies_in_flight == 0
    (again,) = restored(storage, backup)
    storage.retract([again])
    assert storage.statistics().backups.copies_in_flight == 1
    refusal = storage.admit([20] * 3, [12] * 3)
    assert isinstance(refusal, AdmissionRefusal)
    assert not refusal.waits_for


# ── what is refused, and what fails ──


@pytest.mark.requirement("K1", "K2")
def test_what_cannot_be_backed_up_whole_is_refused_with_nothing_changed() -> None:
    """An open step's pages would be lost, or a state that nobody has; the row is as it was, and can still be retracted without a backup."""
    storage = build()
    row, other = admitted(storage, 8, 4), admitted(storage, 4, 4)
    step = storage.prepare_step([row], [8])
    assert isinstance(step, PreparedStep)
    before = storage.statistics()
    with pytest.raises(
        StorageError, match=rf"rows \[{row}\]: a step of theirs was neither recorded nor abandoned"
    ):
        storage.retract_to_host([other, row])
    with pytest.raises(StorageError, match=r"cannot back up rows \[3\]: not in use"):
        storage.retract_to_host([other, 3])
    with pytest.raises(StorageError, match=r"named twice"):
        storage.retract_to_host([other, other])
    assert storage.statistics() == before
    storage.launch_forward(step)
    storage.abandon(step, may_have_run=True)
    before = storage.statistics()
    with pytest.raises(StorageError, match=rf"rows \[{row}\]: .*may have changed their states"):
        storage.retract_to_host([other, row])
    assert storage.statistics() == before
    storage.retract([row])
    storage.retract_to_host([other])
    storage.verify_idle()


@pytest.mark.requirement("K1", "K2")
@pytest.mark.parametrize("has_state", [False, True])
def test_a_row_whose_row_state_an_aborted_launch_may_have_advanced_is_not_whole(has_state: bool) -> None:
    """With states or without: a backup would count a token that never was, and go on from it."""
    storage = build(plan=plan_of(windows=(), full=True, state=has_state, page_tokens=2))
    row = admitted(storage, 6, 6)
    ran(storage, row, 6, 1, chosen=41)
    step = storage.prepare_step([row], [1])
    assert isinstance(step, PreparedStep)
    storage.row_state.advance(storage.launch_forward(step).resolve().rows, 1, torch.tensor([7]))
    storage.abandon(step, may_have_run=True)
    assert row_state(storage, row) == (8, 7, 3), "of seven tokens, two of them chosen"
    with pytest.raises(StorageError, match=rf"rows \[{row}\]: .*may have changed their states"):
        storage.retract_to_host([row])
    with pytest.raises(StorageError, match=rf"rows \[{row}\]: .*may have changed their states"):
        storage.prepare_step([row], [1])
    storage.retract([row])
    storage.verify_idle()


@pytest.mark.requirement("K1", "K2")
def test_a_restored_row_whose_first_launch_is_lost_still_has_its_backup() -> None:
    """What that launch has left in its units is not what it came from; nor is a row lost for it that has had a forward since."""
    storage = build()
    toy = ToyModel(storage)
    row = admitted(storage, 7, 6)
    toy.request_of_row[row] = 1
    next_reads(storage, toy, row, 7, 1)
    (backup,) = storage.retract_to_host([row])
    (again,) = restored(storage, backup)
    step = storage.prepare_step([again], [1])
    assert isinstance(step, PreparedStep)
    ids = storage.launch_forward(step).resolve()
    storage.row_state.advance(ids.rows, 1, torch.tensor([99]))
    state = storage.layout.band("state")
    slot = storage.chain.physical_units("state", storage.requests.state_slots[again : again + 1].copy())
    first = state.origin_bytes + int(slot[0]) * state.unit_bytes
    storage.device.arena.bytes[first : first + state.unit_bytes] = 0x5A
    storage.abandon(step, may_have_run=True)
    with pytest.raises(StorageError, match="may have changed their states"):
        storage.prepare_step([again], [1])
    (same,) = storage.retract_to_host([again])
    assert same is backup
    (again,) = restored(storage, same)
    toy.request_of_row = {again: 1}
    next_reads(storage, toy, again, 1, 1)
    step = storage.prepare_step([again], [1])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.abandon(step, may_have_run=True)
    with pytest.raises(StorageError, match="may have changed their states"):
        storage.retract_to_host([again])
    storage.retract([again])
    storage.verify_idle()


@pytest.mark.requirement("K1", "K2")
def test_a_restored_row_whose_only_launch_is_lost_has_its_backup_whatever_others_run() -> None:
    """Their forwards are not its own: what it came from is still whole, and it would otherwise compute everything again."""
    storage = build()
    row, other = admitted(storage, 4, 6), admitted(storage, 4, 6)
    ran(storage, row, 4, chosen=41)
    ran(storage, other, 4, chosen=51)
    (backup,) = storage.retract_to_host([row])
    (again,) = restored(storage, backup)
    ran(storage, other, 1, chosen=52)
    step = storage.prepare_step([again], [1])
    assert isinstance(step, PreparedStep)
    storage.row_state.advance(storage.launch_forward(step).resolve().rows, 1, torch.tensor([99]))
    storage.abandon(step, may_have_run=True)
    ran(storage, other, 1, chosen=53)
    (same,) = storage.retract_to_host([again])
    assert same is backup
    (again,) = restored(storage, same)
    ran(storage, again, 1, chosen=42)
    assert row_state(storage, again) == (5, 42, 2)
    (newer,) = storage.retract_to_host([again])
    assert newer is not backup
    assert newer.written_tokens == 5


@pytest.mark.requirement("K2")
def test_a_step_keeps_a_backup_no_longer_than_it_may_be_given_back() -> None:
    """Pinned memory is scarce, and a scheduler may keep its steps: behind the record of its forward, a backup is its owner's alone."""
    storage = build()
    row = admitted(storage, 4, 9)
    ran(storage, row, 4)
    (backup,) = storage.retract_to_host([row])
    (again,) = restored(storage, backup)
    kept = weakref.ref(backup)
    del backup
    assert kept() is not None, "no forward has gone on from it"
    step = in_flight(storage, again, 1)
    gc.collect()
    assert kept() is None
    done(storage, step)


@pytest.mark.requirement("K2")
def test_a_row_handed_on_answers_with_nobody_elses_backup() -> None:
    """Its former owner was restored and went before any forward: what that one came from is not what this one comes from."""
    storage = build()
    row = admitted(storage, 4, 9)
    ran(storage, row, 4, chosen=41)
    (backup,) = storage.retract_to_host([row])
    (again,) = restored(storage, backup)
    storage.release([again])
    newcomer = admitted(storage, 3, 3)
    assert newcomer == again
    (found,) = storage.retract_to_host([newcomer])
    assert found is not backup
    assert (found.prompt_tokens, found.written_tokens) == (3, 0)
    (newcomer,) = restored(storage, found)
    ran(storage, newcomer, 3, chosen=7)
    assert row_state(storage, newcomer) == (3, 7, 1)
    storage.release([newcomer])
    storage.verify_idle()


@pytest.mark.requirement("K2")
def test_a_backup_of_another_storage_is_refused() -> None:
    """Its pages may have other sizes, its bands other bytes; and its copies are ordered by another device's streams."""
    storage, stranger = build(), build()
    row = admitted(stranger, 4, 4)
    ran(stranger, row, 4)
    (backup,) = stranger.retract_to_host([row])
    with pytest.raises(StorageError, match=r"1 of 1 backups: they are of another storage"):
        storage.restore([backup])
    restored(stranger, backup)


class FailingDevice(CPUDevice):
    """Host copies that fail from one on."""

    fails_at: int | None = None

    def _copy(self) -> None:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                raise RuntimeError("the copy engine has fallen off the bus")

    def copy_to_host(
        self, stream: Stream, grid: UnitGrid, units: IntArray, target: HostMemory, first_byte: int
    ) -> None:
        self._copy()
        super().copy_to_host(stream, grid, units, target, first_byte)

    def copy_from_host(
        self, stream: Stream, source: HostMemory, first_byte: int, grid: UnitGrid, units: IntArray
    ) -> None:
        self._copy()
        super().copy_from_host(stream, source, first_byte, grid, units)

    def allocate_host(self, byte_count: int) -> HostMemory:
        self._copy()
        return super().allocate_host(byte_count)


@pytest.mark.requirement("K2", "K11", "H1", "H2")
@pytest.mark.parametrize("fails_at", range(4))
def test_a_copy_that_fails_leaves_nothing_held_and_nothing_lost(fails_at: int) -> None:
    """Neither the row that was to be retracted nor the backup that was to be restored; each is tried again."""
    storage = build(make_device=FailingDevice)
    device = storage.device
    assert isinstance(device, FailingDevice)
    toy = ToyModel(storage)
    row = admitted(storage, 7, 5)
    toy.request_of_row[row] = 1
    next_reads(storage, toy, row, 7)
    before = storage.statistics()
    device.fails_at = fails_at
    with pytest.raises(RuntimeError, match="fallen off the bus") as failed:
        storage.retract_to_host([row])
    assert isinstance(failed.value, HostMemoryError) == (fails_at == 0), (
        "a caller may do without memory, not without copies"
    )
    device.fails_at = None
    assert storage.statistics() == before
    next_reads(storage, toy, row, 1)
    (backup,) = storage.retract_to_host([row])
    before = storage.statistics()
    device.fails_at = min(fails_at, 2)
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        storage.restore([backup])
    device.fails_at = None
    after = storage.statistics()
    assert after.rows_in_use == after.chain.live_bytes == after.chain.owed_units == 0
    assert after.admitted_at_peak == before.admitted_at_peak
    storage.verify_idle()
    (again,) = restored(storage, backup)
    toy.request_of_row = {again: 1}
    next_reads(storage, toy, again, 1, 1)
    storage.release([again])
    storage.verify_idle()


class DyingDevice(ModelledTensorDevice):
    """Fails at the n-th event that it is asked for, and if it dies then, at all behind it."""

    fails_at: int | None = None
    dies = False

    def record_event(self, stream: Stream) -> Event:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at == -1 or (self.dies and self.fails_at < 0):
                raise RuntimeError("the device has fallen off the bus")
        return super().record_event(stream)


@pytest.mark.requirement("K2", "K11", "H1", "H2")
@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.parametrize("dies", [False, True])
def test_whatever_event_fails_nothing_is_held_and_nothing_lost(dies: bool, has_units: bool) -> None:
    """One that stands behind all the copies, or in the device's last breath: rows, promises and units are as they were, so that the call
    can be made again.
    """
    plan = plan_of(windows=(5,), full=True, state=has_units, page_tokens=2)
    storage = build(policy=OVERLAP, make_device=DyingDevice, plan=plan)
    device = storage.device
    assert isinstance(device, DyingDevice)
    rows = [admitted(storage, 4, 9), admitted(storage, 4, 5)]
    # Without one, a request without states has nothing but its row state.
    for row in rows if has_units else ():
        done(storage, in_flight(storage, row, 4, chosen=41))

    def books() -> object:
        found, live = storage.statistics(), storage.requests.live_rows().tolist()
        chain = found.chain.live_bytes, found.chain.owed_units
        # Where nothing runs, a call ends what copies there are, whatever becomes of it.
        copied = attrs.evolve(found.backups, copies_in_flight=0)
        return live, chain, found.admitted_at_peak, storage.resident_now(), copied

    def first_success(call: Callable[[], Any]) -> tuple[int, Any]:
        for fails_at in range(9):
            before = books()
            device.fails_at, device.dies = fails_at, dies
            try:
                answer = call()
            except RuntimeError as error:
                assert "fallen off the bus" in str(error)  # noqa: PT017  # whether it raises is what is asked
                assert books() == before
            else:
                return fails_at, answer
            finally:
                device.fails_at = None
        raise AssertionError("it never succeeds")

    failures, backups = first_success(lambda: storage.retract_to_host(rows))
    assert failures == 3, "of both streams, and behind the copies"
    failures, again = first_success(lambda: storage.restore(backups))
    assert failures >= 3
    assert again.tolist() == sorted(rows)
    assert dies or device.model.races == ()
    count = 1 if has_units else 4
    for row in again.tolist():
        done(storage, in_flight(storage, row, count, chosen=42))
        assert row_state(storage, row) == ((5, 42, 2) if has_units else (4, 42, 1))
    storage.release(again)
    storage.verify_idle()


@pytest.mark.requirement("K2")
def test_a_scheduler_may_do_with_rows_and_backups_what_it_likes() -> None:
    """They are copied before the device comes to them: sorting the one and emptying the other swaps no two requests' tokens."""
    storage, device = modelled()
    rows = [admitted(storage, 4, 9), admitted(storage, 4, 9)]
    for row, chosen in zip(rows, (11, 22), strict=True):
        done(storage, in_flight(storage, row, 4, chosen=chosen))
    backups = list(storage.retract_to_host(rows))
    again = storage.restore(backups)
    assert not isinstance(again, AdmissionRefusal)
    first, second = again.tolist()
    again[:] = again[::-1].copy()
    backups.clear()
    device.wait_on_host(device.record_event(device.copy_stream))
    assert row_state(storage, first) == (4, 11, 1)
    assert row_state(storage, second) == (4, 22, 1)


@pytest.mark.requirement("H1", "H2", "V2")
def test_what_was_queued_of_a_failed_copy_is_not_overtaken() -> None:
    """The units are free again, and its first bands may be copied yet: whoever writes there next comes behind."""

    class Failing(ModelledTensorDevice):
        fails = False

        def copy_from_host(
            self, stream: Stream, source: HostMemory, first_byte: int, grid: UnitGrid, units: IntArray
        ) -> None:
            super().copy_from_host(stream, source, first_byte, grid, units)
            if self.fails:
                raise RuntimeError("the copy engine has fallen off the bus")

        def copy_to_host(
            self, stream: Stream, grid: UnitGrid, units: IntArray, target: HostMemory, first_byte: int
        ) -> None:
            super().copy_to_host(stream, grid, units, target, first_byte)
            if self.fails:
                raise RuntimeError("the copy engine has fallen off the bus")

    storage = build(policy=OVERLAP, make_device=Failing)
    device = storage.device
    assert isinstance(device, Failing)
    row = admitted(storage, 4, 9)
    done(storage, in_flight(storage, row, 4))
    device.fails = True
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        storage.retract_to_host([row])
    device.fails = False
    slot = storage.requests.state_slots[row : row + 1].copy()
    storage.release([row])
    row = admitted(storage, 4, 9)
    assert (storage.requests.state_slots[row] == slot).all(), "zeroed while the failed backup reads it"
    done(storage, in_flight(storage, row, 4))
    (backup,) = storage.retract_to_host([row])
    device.fails = True
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        storage.restore([backup])
    device.fails = False
    row = admitted(storage, 4, 9)
    assert (storage.requests.state_slots[row] == slot).all(), "zeroed while the failed restoring writes it"
    done(storage, in_flight(storage, row, 4))
    assert device.model.races == ()


# ── what is told ──


@pytest.mark.requirement("K1")
def test_backups_are_counted_and_logged() -> None:
    """Host memory and copies cost something: whoever tunes an overcommitting server looks here."""
    storage = build()
    row = admitted(storage, 6, 4)
    ran(storage, row, 6)
    with capture_logs() as logs:
        (backup,) = storage.retract_to_host([row])
        (again,) = restored(storage, backup)
    events = [
        {key: entry[key] for key in ("event", "rows", "bytes") if key in entry}
        for entry in logs
        if entry["event"].startswith("storage.")
    ]
    size = backup.byte_count
    assert events == [
        {"event": "storage.backed_up", "rows": [row], "bytes": size},
        {"event": "storage.retracted", "rows": [row]},
        {"event": "storage.restored", "rows": [again], "bytes": size},
    ]
    statistics = storage.statistics()
    assert statistics.admission.retracted_requests == 1
    assert statistics.backups.backed_up_requests == statistics.backups.restored_requests == 1
    assert statistics.backups.backed_up_bytes == statistics.backups.restored_bytes == size


@pytest.mark.requirement("K4", "H1")
def test_reads_that_end_early_are_not_what_a_backup_waits_for() -> None:
    """A backend may say that it reads no table any more: its layers still write the pages that are to be copied."""
    storage, device = modelled()
    row = admitted(storage, 4, 9)
    step = storage.prepare_step([row], [4])
    assert isinstance(step, PreparedStep)
    unresolved = storage.launch_forward(step)
    device.submit("metadata", run=lambda: storage.row_state.advance(unresolved.resolve().rows, 4, None))
    ends = SharedReadEnds(device, ["pages"])
    ends.declare("pages")
    band = storage.layout.band("full")
    grid = UnitGrid(band.origin_bytes, band.unit_bytes)
    pages = storage.chain.physical_units("full", storage.requests.pages[row, :2].astype(np.int64))
    spans = device.spans(grid, pages)

    def write() -> None:
        for span in spans:
            span.buffer.bytes[span.start_byte : span.end_byte] = 5

    device.submit("layers", writes=spans, run=write)
    storage.record_forward(step, ends)
    (backup,) = storage.retract_to_host([row])
    device.wait_on_host(device.record_event(device.copy_stream))
    assert (backup.memory.bytes[-2 * band.unit_bytes :] == 5).all()
