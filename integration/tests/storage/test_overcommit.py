"""Overcommit: less is promised, more is admitted, and whoever is retracted still finishes (K5)."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvtide.arena import SCRATCH_BYTES
from kvtide.chain import Taken
from kvtide.sizing import CheckpointStrategy, ChunkReads, ServingPolicy, SizingError
from kvtide.storage import (
    AdmissionRefusal,
    KVStorage,
    Overcommit,
    PreparedStep,
    PromiseRefusal,
    RowBackup,
    StorageError,
    build_kv_storage,
)

from .test_storage import CHUNK_TOKENS, MODELS, plan_of
from .tiny import tiny_plan, tiny_storage


@attrs.define(eq=False)
class Job:
    """A request as its scheduler knows it."""

    prompt: int
    output: int
    """Limit."""
    ends_at: int
    """Tokens after which it stops by itself."""
    generated: int = 0
    row: int | None = None
    retracted: int = 0
    backup: RowBackup | None = None


class Scheduler:
    """Serves jobs over a storage that overcommits: who is refused a share makes the newest overcommitted rows leave."""

    def __init__(self, storage: KVStorage, jobs: list[Job], *, restores: bool = False) -> None:
        self.storage = storage
        self.restores = restores
        """Whether who leaves comes back with its memory, and not to compute it again."""
        self.waiting = list(jobs)
        self.running: list[Job] = []

    def admit(self) -> None:
        while self.waiting:
            job = self.waiting[0]
            rows = (
                self.storage.restore([job.backup])
                if job.backup is not None
                else self.storage.admit(
                    [job.prompt + job.generated], [job.output - job.generated], whole=job.retracted > 0
                )
            )
            if isinstance(rows, AdmissionRefusal):
                assert not rows.is_final, f"it was served at its arrival: {rows}"
                assert self.running, "nothing waits while nothing will free"
                return
            job.row = int(rows[0])
            self.running.append(self.waiting.pop(0))

    def step(self, job: Job) -> None:
        """One forward of one job, whoever must leave for it."""
        requests = self.storage.requests
        assert job.row is not None
        left = int(requests.prompts[job.row] - requests.prepared[job.row])
        count = min(left, int(requests.chunk_limits[job.row])) if left > 0 else 1
        while isinstance(step := self.storage.prepare_step([job.row], [count]), PromiseRefusal):
            assert step.rows == (job.row,)
            assert len(self.running) > 1, "what is left alone always fits"
            self.retract(step.overcommitted[0])
            if job.row is None:
                return
        assert isinstance(step, PreparedStep), f"{step}"
        self.storage.launch_forward(step)
        self.storage.record_forward(step)
        self.storage.forward_processed(step)
        self.storage.advance(step)
        if requests.lengths[job.row] >= requests.prompts[job.row]:
            job.generated += 1
        if job.generated == min(job.ends_at, job.output):
            self.storage.release([job.row])
            self.running.remove(job)

    def retract(self, row: int) -> None:
        job = next(job for job in self.running if job.row == row)
        if self.restores:
            (job.backup,) = self.storage.retract_to_host([row])
        else:
            self.storage.retract([row])
        job.row = None
        job.retracted += 1
        self.running.remove(job)
        self.waiting.insert(0, job)


@pytest.mark.requirement("K5", "K11")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_request_finishes_and_none_is_retracted_twice(data: st.DataObject) -> None:
    """A retraction storm, each newcomer pushing out the last, computes for ever and serves nobody. Here a retracted request comes
    back with its whole output promised, so there are no more retractions than requests: to compute again, or as it was.
    """
    plan = plan_of(**data.draw(st.sampled_from(MODELS)), page_tokens=data.draw(st.sampled_from([1, 4])))
    policy = ServingPolicy(
        overlap=data.draw(st.booleans()), chunk_reads=data.draw(st.sampled_from(ChunkReads))
    )
    try:
        storage = build_kv_storage(
            plan,
            budget_bytes=SCRATCH_BYTES + data.draw(st.integers(3_000, 9_000)),
            max_running_requests=6,
            max_context_tokens=64,
            chunk_tokens=CHUNK_TOKENS,
            policy=policy,
            overcommit=Overcommit(data.draw(st.sampled_from([0.1, 0.25, 0.5, 1]))),
        )
    except SizingError:
        return
    jobs = []
    for _ in range(data.draw(st.integers(1, 8))):
        prompt, output = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 30))
        output = min(output, storage.max_new_tokens_for_memory(prompt))
        if output:
            assert storage.arrival_refusal(prompt, output) is None
            jobs.append(Job(prompt, output, ends_at=data.draw(st.integers(1, output))))
    scheduler = Scheduler(storage, jobs, restores=data.draw(st.booleans()))
    for _ in range(8 * 60 * 4):
        scheduler.admit()
        if not scheduler.running:
            break
        scheduler.step(data.draw(st.sampled_from(scheduler.running)))
        storage.verify_idle()
    assert not scheduler.waiting
    assert not scheduler.running
    assert all(job.retracted <= 1 for job in jobs)
    statistics = storage.statistics().admission
    assert statistics.retracted_requests == sum(job.retracted for job in jobs) <= len(jobs)
    assert set(storage.resident_now().values()) <= {0}


def served(overcommit: Overcommit | None, ends_at: int) -> tuple[int, int]:
    """Requests of a prompt of 2 and an output limit of 10, all of which end at `ends_at`: most in service at once, retractions."""
    storage = tiny_storage(tiny_plan(), units=24, rows=8, overcommit=overcommit)
    scheduler = Scheduler(storage, [Job(2, 10, ends_at) for _ in range(8)])
    most = 0
    while scheduler.running or scheduler.waiting:
        scheduler.admit()
        most = max(most, len(scheduler.running))
        for job in list(scheduler.running):
            if job in scheduler.running:
                scheduler.step(job)
    return most, storage.statistics().admission.retracted_requests


@pytest.mark.requirement("K5")
def test_overcommit_serves_more_at_once_and_pays_only_where_outputs_run_long() -> None:
    """That is the trade: guaranteed admission promises 11 pages each, so two fit; a third of the output is 6, so four do."""
    assert served(None, ends_at=3) == (2, 0)
    assert served(Overcommit(0.34), ends_at=3) == (4, 0)
    assert served(None, ends_at=10) == (2, 0)
    most, retracted = served(Overcommit(0.34), ends_at=10)
    assert most == 4
    assert 0 < retracted <= 8


@pytest.mark.requirement("K5")
def test_a_share_that_finds_no_room_is_refused_with_nothing_changed_and_names_who_could_leave() -> None:
    """The scheduler picks; what it needs to know is who was promised less than all, and who came last."""
    storage = tiny_storage(tiny_plan(), units=12, rows=4, overcommit=Overcommit(0.5))
    whole = storage.admit([1], [2], whole=True)
    first = storage.admit([1], [4])
    second = storage.admit([1], [4])
    third = storage.admit([1], [8])
    rows = [int(np.asarray(each)[0]) for each in (whole, first, second, third)]
    assert storage.admitted_at_peak() == {"full": 2 + 2 + 2 + 4}
    scheduler = Scheduler(storage, [])
    scheduler.running = [Job(1, 4, 4, row=row) for row in rows]
    for job in scheduler.running[1:]:
        scheduler.step(job)
        scheduler.step(job)
    before = storage.statistics()
    assert isinstance(storage.prepare_step([rows[1]], [1]), PreparedStep), "two are left, and it asks for two"
    refusal = storage.prepare_step([rows[0], rows[2]], [1, 1])
    assert isinstance(refusal, PromiseRefusal)
    assert refusal.rows == (rows[2],)
    assert refusal.overcommitted == (rows[3], rows[2])
    assert str(refusal).startswith(
        f"rows [{rows[2]}] have reached the output that they were promised, and 'full' 2 more do not fit beside what is promised: "
    )
    assert storage.statistics().chain.live_bytes == before.chain.live_bytes + 16, "of the step before"
    assert storage.statistics().admission.further_shares == 1
    assert storage.requests.prepared[rows[2]] == 2
    assert isinstance(storage.prepare_step([rows[0]], [1]), PreparedStep)


@pytest.mark.requirement("K5", "K6")
def test_the_clip_leaves_room_to_recompute_in_chunks() -> None:
    """A request that fits token by token, and would be retracted for good because its second prefill needs more, is no longer than the
    clip says. With checkpoints and overlap a chunk is an interval and two of them are in flight.
    """
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER, checkpoint_interval=4, overlap=True)
    storages = [
        tiny_storage(
            tiny_plan(window=2),
            units=26,
            chunk_tokens=8,
            context_tokens=40,
            policy=policy,
            overcommit=overcommit,
        )
        for overcommit in (None, Overcommit(0.5))
    ]
    guaranteed, overcommitting = (storage.max_new_tokens_for_memory(1) for storage in storages)
    # One token before the checkpoint, then five of decoding or two intervals of four.
    assert (guaranteed, overcommitting) == (20, 17)
    assert storages[0].arrival_refusal(1, guaranteed) is None
    assert storages[1].arrival_refusal(1, overcommitting + 1) is not None
    assert storages[1].arrival_refusal(overcommitting, 1) is None, "all of it prompt"


@pytest.mark.requirement("K5")
@pytest.mark.parametrize("share", [0, -0.5, 1.5, math.nan, True, "0.5", None])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    """A share of nothing would promise nothing, of more than all more than the request may hold."""
    with pytest.raises(StorageError, match="above 0 and at most 1"):
        Overcommit(share)


@pytest.mark.requirement("K5")
@given(hundredths=st.integers(1, 100), output=st.integers(1, 10_000))
def test_a_share_is_what_it_is_written_as(hundredths: int, output: int) -> None:
    """0.07 of 100 tokens are 7: eight would be a float's rounding error, and another promise than was asked for."""
    assert Overcommit(hundredths / 100).promised_output(output, 1) == -(-hundredths * output // 100)


@pytest.mark.requirement("K5")
def test_a_request_whose_whole_output_never_fits_is_not_admitted_for_a_share_of_it() -> None:
    """It would run to the end of its memory, be retracted, and find no place ever after."""
    storage = tiny_storage(tiny_plan(), units=8, overcommit=Overcommit(0.25))
    refusal = storage.admit([1], [9])
    assert isinstance(refusal, AdmissionRefusal)
    assert refusal.is_final
    assert not isinstance(storage.admit([1], [8]), AdmissionRefusal)


@pytest.mark.requirement("K5")
def test_the_newest_is_whoever_came_last_whatever_its_row_and_every_share_is_counted() -> None:
    """Rows are handed out again: by their numbers, a request that has run for long would be retracted for a newcomer."""
    storage = tiny_storage(tiny_plan(), units=12, rows=3, overcommit=Overcommit(0.5))
    rows = [int(np.asarray(storage.admit([1], [8]))[0]) for _ in range(3)]
    assert rows == [0, 1, 2]
    storage.release([0])
    assert np.asarray(storage.admit([1], [4])).tolist() == [0]
    scheduler = Scheduler(storage, [])
    scheduler.running = [Job(1, 8, 8, row=row) for row in (1, 2)]
    for job in scheduler.running * 4:
        scheduler.step(job)
    refusal = storage.prepare_step([1, 2], [1, 1])
    assert isinstance(refusal, PromiseRefusal)
    assert refusal.rows == (1, 2)
    assert refusal.overcommitted == (0, 2, 1)
    storage.retract([0])
    storage.retract([2])
    assert isinstance(storage.prepare_step([1], [1]), PreparedStep)
    assert storage.statistics().admission.further_shares == 1
    assert storage.statistics().admission.retracted_requests == 2
    both = tiny_storage(tiny_plan(), units=16, rows=2, overcommit=Overcommit(0.25))
    pair = np.asarray(both.admit([1, 1], [8, 8]))
    for _ in range(3):
        step = both.prepare_step(pair, [1, 1])
        assert isinstance(step, PreparedStep)
        both.launch_forward(step)
        both.record_forward(step)
        both.forward_processed(step)
        both.advance(step)
    assert both.statistics().admission.further_shares == 2


@pytest.mark.requirement("K5", "T6")
def test_a_request_left_alone_waits_for_a_share_that_a_failed_transfer_keeps() -> None:
    """Quarantined units are nobody's to promise: the refusal says where they are, and the share comes once they are let go."""
    storage = tiny_storage(tiny_plan(), units=10, overcommit=Overcommit(0.25))
    job = Job(2, 8, 8, row=int(np.asarray(storage.admit([2], [8]))[0]))
    taken = storage.chain.take(pages=3)
    assert isinstance(taken, Taken)
    storage.chain.uses.fix("a failed transfer", {"full": taken.pages})
    storage.chain.free_pages("full", taken.pages)
    scheduler = Scheduler(storage, [])
    scheduler.running = [job]
    assert job.row is not None
    for _ in range(6):
        scheduler.step(job)
    refusal = storage.prepare_step([job.row], [1])
    assert isinstance(refusal, PromiseRefusal)
    assert refusal.overcommitted == (job.row,)
    assert str(refusal).endswith(
        "; fixed, quarantined or under a transfer, and nobody's, are 'full' 3; 0 other requests are in service"
    )
    storage.chain.uses.unfix("a failed transfer")
    while job in scheduler.running:
        scheduler.step(job)
    storage.verify_idle()


@pytest.mark.requirement("K5")
def test_a_share_refused_beside_others_does_not_say_that_nothing_will_free() -> None:
    """The reason is logged too: a retraction that nobody can explain looks like a fault."""
    storage = tiny_storage(tiny_plan(), units=8, rows=4, overcommit=Overcommit(0.5))
    rows = [int(np.asarray(storage.admit([1], [8]))[0]) for _ in range(2)]
    scheduler = Scheduler(storage, [])
    scheduler.running = [Job(1, 8, 8, row=row) for row in rows]
    for _ in range(4):
        scheduler.step(scheduler.running[0])
    with capture_logs() as logs:
        refusal = storage.prepare_step([rows[0]], [1])
    assert isinstance(refusal, PromiseRefusal)
    assert str(refusal) == (
        f"rows [{rows[0]}] have reached the output that they were promised, and 'full' 4 more do not fit beside what is promised: "
        "admitted at peak are 'full' 8, of which resident now 'full' 4; 1 other requests are in service"
    )
    assert [(entry["event"], entry["reason"]) for entry in logs] == [
        ("admission.share_refused", str(refusal))
    ]


@pytest.mark.requirement("K5")
@given(output=st.integers(1, 200), reached=st.integers(1, 200), share=st.floats(0.001, 1))
def test_shares_are_whole_and_reach_what_is_asked(output: int, reached: int, share: float) -> None:
    """Fewer would be refused again at once, more would overcommit less than the policy says."""
    reached = min(reached, output)
    policy = Overcommit(share)
    promised = policy.promised_output(output, reached)
    one = policy.promised_output(output, 1)
    assert reached <= promised <= output
    assert promised == output or promised % one == 0
    assert promised - one < reached
