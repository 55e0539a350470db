"""What windows bind and give up: tails of chunks, the retention floor, segment frees (K7, S5, L8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.arena import SCRATCH_BYTES, gather_tokens
from kvtide.ledger import InvariantError
from kvtide.plan import (
    ChunkLifetime,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    Lifetime,
    MHAGeometry,
    SubPool,
    WindowLifetime,
    plan_kv_storage,
)
from kvtide.sizing import CheckpointStrategy, ChunkReads, ServingPolicy, SizingError, resident_demand
from kvtide.storage import (
    AdmissionRefusal,
    KVStorage,
    PreparedStep,
    StepState,
    StorageError,
    build_kv_storage,
)

from .test_storage import CHUNK_TOKENS, MODELS, ToyModel, plan_of, poison_free_bytes
from .tiny import tiny_plan, tiny_storage


def first_kept(pool: SubPool, at: int) -> int:
    """First token that a query at position `at` reads; the dumbest way to say it."""
    if pool.window_tokens is not None:
        return max(0, at - pool.window_tokens + 1)
    return 0 if pool.chunk_tokens is None else at // pool.chunk_tokens * pool.chunk_tokens


class ActivationsModel(ToyModel):
    """Reads a prompt chunk's own tokens elsewhere, and from pages only what was there before it."""

    def check_reads(self, step: PreparedStep, pool: SubPool, layer: int, table: torch.Tensor) -> None:
        storage = self.storage
        view = storage.routed_cache.attention(layer)
        assert view is not None
        page_tokens = storage.plan.page_tokens
        for place, row in enumerate(step.rows.tolist()):
            start, count = int(step.starts[place]), int(step.counts[place])
            end, is_chunk = start + count, start < storage.requests.prompts[row]
            at = torch.arange(first_kept(pool, start), start if is_chunk else end)
            slots = table[place, at // page_tokens] * page_tokens + at % page_tokens
            expected = torch.tensor([self.entry(row, position, layer) for position in at.tolist()])
            for plane in view.planes.values():
                assert (gather_tokens(plane, slots).flatten(1) == expected[:, None]).all()
                assert torch.isfinite(plane[table[place]].flatten(1)).all()
            if is_chunk and pool.window_tokens is not None:
                first_new = -(-start // page_tokens)
                behind = first_kept(pool, end) // page_tokens
                assert (table[place, first_new:behind] == 0).all(), "what no later token reads is in no page"


@pytest.mark.requirement("K7", "S5", "K3", "A5")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_chunks_read_in_activations_leave_their_tails_in_pages(data: st.DataObject) -> None:
    """Later tokens find what they read, windows never hold a chunk whole, and no admitted request is refused its step."""
    plan = plan_of(**data.draw(st.sampled_from(MODELS)), page_tokens=data.draw(st.sampled_from([1, 2, 4])))
    try:
        storage = build_kv_storage(
            plan,
            budget_bytes=SCRATCH_BYTES + data.draw(st.integers(5_000, 14_000)),
            max_running_requests=6,
            max_context_tokens=64,
            chunk_tokens=CHUNK_TOKENS,
            policy=ServingPolicy(chunk_reads=ChunkReads.ACTIVATIONS),
            writes_whole_pages=data.draw(st.booleans()),
        )
    except SizingError:
        return
    toy = ActivationsModel(storage)
    requests = storage.requests
    for request in range(1, data.draw(st.integers(3, 25))):
        rows = storage.admit([data.draw(st.integers(1, 40))], [data.draw(st.integers(1, 20))])
        if not isinstance(rows, AdmissionRefusal):
            toy.request_of_row[int(rows[0])] = request
        live = requests.live_rows()
        chosen = [row for row in live.tolist() if data.draw(st.booleans())]
        left = {row: int(requests.prompts[row] - requests.prepared[row]) for row in chosen}
        counts = [
            data.draw(st.integers(1, min(left[row], int(requests.chunk_limits[row])))) if left[row] > 0 else 1
            for row in chosen
        ]
        if chosen:
            step = storage.prepare_step(chosen, counts)
            assert isinstance(step, PreparedStep), f"{step}"
            poison_free_bytes(storage)
            toy.forward(step)
            storage.forward_processed(step)
            storage.advance(step)
        over = live[(requests.lengths[live] == requests.limits[live])]
        if len(over):
            storage.release(over)
        storage.verify_idle()
    storage.release(requests.live_rows())
    storage.verify_idle()


@pytest.mark.requirement("S5", "K7")
def test_in_activations_a_long_prompt_holds_a_window_no_more_than_its_tails() -> None:
    """By hand: a window of 4, chunks of 8. In pages the window holds 3 + 8 tokens, in activations 3 + 3: five units go to others."""
    peaks = {}
    for reads in ChunkReads:
        policy = ServingPolicy(chunk_reads=reads)
        storage = tiny_storage(
            tiny_plan(window=4), units=40, chunk_tokens=8, context_tokens=17, policy=policy
        )
        rows = storage.admit([16], [1])
        assert not isinstance(rows, AdmissionRefusal)
        resident = []
        for _ in range(2):
            step = storage.prepare_step(rows, [8])
            assert isinstance(step, PreparedStep)
            resident.append(storage.resident_now())
            storage.launch_forward(step)
            storage.record_forward(step)
            storage.forward_processed(step)
            storage.advance(step)
        peaks[reads] = (storage.admitted_at_peak()["window-4"], [each["window-4"] for each in resident])
        assert [each["full"] for each in resident] == [8, 16]
    assert peaks == {ChunkReads.PAGES: (11, [8, 11]), ChunkReads.ACTIVATIONS: (6, [3, 6])}


def on_grid(reads: ChunkReads = ChunkReads.PAGES) -> KVStorage:
    """A window of 3 and checkpoints every four tokens, of states that this arena does not hold: those of another stage."""
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER, checkpoint_interval=4, chunk_reads=reads)
    return tiny_storage(tiny_plan(window=3), units=40, chunk_tokens=8, context_tokens=32, policy=policy)


def run(storage: KVStorage, row: int, tokens: int, *, checkpoint: bool = True) -> None:
    """One forward, and the checkpoint that it reaches."""
    step = storage.prepare_step([row], [tokens])
    assert isinstance(step, PreparedStep), f"{step}"
    storage.launch_forward(step)
    storage.record_forward(step)
    storage.forward_processed(step)
    end = int(step.starts[0]) + tokens
    if checkpoint and end // 4 > int(step.starts[0]) // 4:
        storage.checkpoints_taken([row], [end // 4 * 4])
    storage.advance(step)


def held(storage: KVStorage) -> int:
    return storage.resident_now()["window-3"]


@pytest.mark.requirement("K7", "S5")
def test_windows_retire_no_further_than_a_hit_on_the_latest_checkpoint_reads() -> None:
    """A hit lands on the checkpoint, not on the row's end: without its window there the checkpoint is worth nothing."""
    storage = on_grid()
    rows = storage.admit([10], [8])
    assert not isinstance(rows, AdmissionRefusal)
    row = int(rows[0])
    run(storage, row, 8)
    assert held(storage) == 2, "of [6, 8)"
    run(storage, row, 2)
    assert held(storage) == 4, "of [6, 10): the last checkpoint is at 8"
    run(storage, row, 1)
    assert held(storage) == 5
    run(storage, row, 1)
    assert held(storage) == 2, "the checkpoint at 12 was taken"
    storage.verify_idle()


@pytest.mark.requirement("K7")
def test_prefill_retires_only_as_a_checkpoint_is_taken() -> None:
    """Until the tree has the next one, hits land on the one before. The row holds what it must for as long as that takes."""
    storage = on_grid()
    rows = storage.admit([12], [1])
    assert not isinstance(rows, AdmissionRefusal)
    row = int(rows[0])
    run(storage, row, 4, checkpoint=False)
    assert held(storage) == 4, "a hit at 0 reads nothing, yet nothing says that the next will be taken"
    run(storage, row, 4)
    assert held(storage) == 2
    run(storage, row, 4)
    assert held(storage) == 2
    storage.verify_idle()


@pytest.mark.requirement("K7", "S5")
def test_the_tail_of_a_chunk_reaches_back_to_what_a_hit_on_its_checkpoint_reads() -> None:
    """Not only to what the next token reads: the checkpoint at 12, within the prompt's last chunk, needs 10 and 11."""
    storage = on_grid(ChunkReads.ACTIVATIONS)
    rows = storage.admit([15], [1])
    assert not isinstance(rows, AdmissionRefusal)
    row = int(rows[0])
    run(storage, row, 8)
    assert held(storage) == 2
    run(storage, row, 7)
    virtual = storage.requests.pages[row, :15].astype(np.int64)
    is_bound = storage.chain.physical_units("window-3", virtual) > 0
    assert np.flatnonzero(is_bound).tolist() == [10, 11, 12, 13, 14]
    storage.verify_idle()


@pytest.mark.requirement("K7", "S5")
def test_a_token_that_is_decoded_beside_a_chunk_is_in_pages() -> None:
    """Its own attention reads it there, were the window one token long and the chunk in the same forward read elsewhere."""
    policy = ServingPolicy(chunk_reads=ChunkReads.ACTIVATIONS)
    storage = tiny_storage(tiny_plan(window=1), units=20, chunk_tokens=8, policy=policy)
    rows = storage.admit([2, 6], [3, 1])
    assert not isinstance(rows, AdmissionRefusal)
    held_by_row = []
    for row, count in ((rows[:1], [2]), (rows, [1, 6])):
        step = storage.prepare_step(row, count)
        assert isinstance(step, PreparedStep)
        held_by_row.append(storage._units.counts[0, rows].tolist())
        storage.launch_forward(step)
        storage.record_forward(step)
        storage.forward_processed(step)
        storage.advance(step)
    assert held_by_row == [[0, 0], [1, 0]]
    storage.verify_idle()


@pytest.mark.requirement("S5", "K7")
@pytest.mark.parametrize("page_tokens", [1, 2, 4])
@pytest.mark.parametrize(
    "lifetime", [WindowLifetime(1), WindowLifetime(2), WindowLifetime(5), ChunkLifetime(4), ChunkLifetime(12)]
)
@pytest.mark.parametrize("reads", ChunkReads)
def test_what_a_row_holds_between_forwards_is_what_is_priced(
    page_tokens: int, lifetime: Lifetime, reads: ChunkReads
) -> None:
    """The page that the next token goes into is held, also where a window of one token reads nothing that lies there: else a row
    holds a page more than it was promised, or its next token is lost.
    """
    part = MHAGeometry(1, 2, 2, DType.FLOAT32)
    plan = plan_kv_storage(
        [KVLayerDecl(0, (KVPart(part, FullLifetime()),)), KVLayerDecl(1, (KVPart(part, lifetime),))],
        page_tokens=page_tokens,
    )
    policy = ServingPolicy(chunk_reads=reads)
    for first in range(1, 12):
        storage = build_kv_storage(
            plan,
            budget_bytes=SCRATCH_BYTES + 9_000,
            max_running_requests=2,
            max_context_tokens=40,
            chunk_tokens=11,
            policy=policy,
        )
        rows = storage.admit([23], [1])
        assert not isinstance(rows, AdmissionRefusal)
        for count in (first, 11, 23 - 11 - first):
            if count:
                step = storage.prepare_step(rows, [count])
                assert isinstance(step, PreparedStep)
                storage.launch_forward(step)
                storage.record_forward(step)
                storage.forward_processed(step)
                storage.advance(step)
                written = int(storage.requests.lengths[rows[0]])
                expected = resident_demand(plan, written_tokens=written, policy=policy).units
                assert tuple(storage.resident_now().values()) == expected, f"behind {written} tokens"
                storage.verify_idle()


@pytest.mark.requirement("K7")
def test_no_checkpoint_is_noted_where_a_forward_may_still_be_given_up() -> None:
    """Abandoned, it would leave a floor where the row never was, and the true checkpoint before it could not be noted any more."""
    storage = on_grid()
    rows = storage.admit([16], [4])
    assert not isinstance(rows, AdmissionRefusal)
    row = int(rows[0])
    run(storage, row, 4)
    step = storage.prepare_step(rows, [8])
    assert isinstance(step, PreparedStep)
    with pytest.raises(StorageError, match=r"no further than recorded forwards reach, \[4\]"):
        storage.checkpoints_taken(rows, [12])
    storage.abandon(step)
    run(storage, row, 4)
    assert held(storage) == 2, "of [6, 8): the checkpoint at 8 was taken"


@pytest.mark.requirement("K7")
def test_chunks_but_the_last_of_a_prompt_end_on_the_grid() -> None:
    """A chunk that ends elsewhere reaches no checkpoint, and its windows would be kept for one that is further away than priced."""
    storage = on_grid()
    rows = storage.admit([10], [1])
    assert not isinstance(rows, AdmissionRefusal)
    row = int(rows[0])
    for wrong in (1, 3, 6, 7):
        with pytest.raises(StorageError, match="ends on the grid of 4 tokens"):
            storage.prepare_step([row], [wrong])
    run(storage, row, 8)
    run(storage, row, 2)
    storage.verify_idle()


@pytest.mark.requirement("K7")
@pytest.mark.parametrize("wrong", [2, 12, 0])
def test_a_checkpoint_that_cannot_be_is_refused(wrong: int) -> None:
    """Off the grid, ahead of every forward, or behind the last: windows would be retired that a hit reads."""
    storage = on_grid()
    rows = storage.admit([10], [8])
    assert not isinstance(rows, AdmissionRefusal)
    run(storage, int(rows[0]), 8)
    with pytest.raises(StorageError, match=rf"rows \[0\] at \[{wrong}\] tokens: they lie on the grid of 4"):
        storage.checkpoints_taken(rows, [wrong])
    with pytest.raises(StorageError, match="1 rows at 2 lengths"):
        storage.checkpoints_taken(rows, [8, 8])
    plain = tiny_storage(tiny_plan(window=3), units=40)
    rows = plain.admit([10], [1])
    with pytest.raises(StorageError, match="the policy keeps none on a grid"):
        plain.checkpoints_taken(rows, [4])  # type: ignore[arg-type]  # it was admitted


@pytest.mark.requirement("K5", "K7", "L8")
def test_a_checkpoint_that_nobody_notes_is_named_where_it_costs_a_take() -> None:
    """Its windows are kept for it, further than priced. It is the likeliest reason that an admitted request finds no room."""
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER, checkpoint_interval=4)
    storage = tiny_storage(tiny_plan(window=3), units=30, chunk_tokens=8, context_tokens=32, policy=policy)
    rows = storage.admit([20], [1])
    assert not isinstance(rows, AdmissionRefusal)

    def runs_to_its_end() -> None:
        for _ in range(5):
            run(storage, int(rows[0]), 4, checkpoint=False)

    with pytest.raises(InvariantError, match=r"storage\.admission_guarantee.*not noted \(checkpoints_taken"):
        runs_to_its_end()


@pytest.mark.requirement("K5", "K7", "S5")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_with_checkpoints_no_take_of_an_admitted_request_is_refused(data: st.DataObject) -> None:
    """The retention floor is in the price: with every checkpoint taken as its forward is advanced over, all that is admitted runs to
    its end, in either policy of reading chunks.
    """
    policy = ServingPolicy(
        strategy=CheckpointStrategy.EXTRA_BUFFER,
        checkpoint_interval=4,
        chunk_reads=data.draw(st.sampled_from(ChunkReads)),
    )
    storage = tiny_storage(
        tiny_plan(window=data.draw(st.integers(1, 6))),
        units=data.draw(st.integers(8, 40)),
        chunk_tokens=data.draw(st.integers(4, 9)),
        context_tokens=32,
        policy=policy,
    )
    requests = storage.requests
    for _ in range(data.draw(st.integers(1, 40))):
        storage.admit([data.draw(st.integers(1, 20))], [data.draw(st.integers(1, 10))])
        for row in requests.live_rows().tolist():
            left, limit = int(requests.prompts[row] - requests.lengths[row]), int(requests.chunk_limits[row])
            ends = [
                n for n in range(1, min(left, limit) + 1) if n == left or (requests.lengths[row] + n) % 4 == 0
            ]
            if data.draw(st.booleans()):
                run(storage, row, data.draw(st.sampled_from(ends)) if left > 0 else 1)
                if requests.lengths[row] == requests.limits[row]:
                    storage.release([row])
        storage.verify_idle()


def lost_window_page(storage: KVStorage, row: int) -> None:
    """A page that someone frees behind the storage's back."""
    last = storage.requests.page_counts[row] - 1
    storage.chain.free_pages("window-3", storage.requests.pages[row, [last]].astype(np.int64))


def lost_count(storage: KVStorage, row: int) -> None:
    """A page of the window that the row no longer knows it has."""
    storage._units._first[0, row] += 1
    storage._units.counts[0, row] -= 1


@pytest.mark.requirement("L8", "K7")
@pytest.mark.parametrize(
    ("fault", "invariant"),
    [
        (lost_window_page, "chain.window_segment_bound"),
        (lost_count, "chain.window_segment_released"),
    ],
)
@pytest.mark.parametrize("reads", ChunkReads)
def test_a_segment_that_does_not_hold_what_it_gives_up_is_found_before_anything_changes(
    fault: Callable[[KVStorage, int], None], invariant: str, reads: ChunkReads
) -> None:
    """A free of what is not there, or of full attention under a window, would hand bytes out that somebody still reads."""
    storage = tiny_storage(tiny_plan(window=3), units=20, policy=ServingPolicy(chunk_reads=reads))
    rows = storage.admit([4], [2])
    assert not isinstance(rows, AdmissionRefusal)
    step = storage.prepare_step(rows, [4])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.record_forward(step)
    storage.forward_processed(step)
    storage.advance(step)
    fault(storage, int(rows[0]))
    before = storage.chain.statistics()
    with pytest.raises(InvariantError, match=invariant.replace(".", r"\.")):
        storage.release(rows)
    assert storage.chain.statistics() == before
    assert storage.requests.live_rows().tolist() == rows.tolist()


@pytest.mark.requirement("L8")
def test_a_window_that_retires_what_it_does_not_bind_is_found_before_anything_changes() -> None:
    """In the middle of a request's life, where nothing else would notice."""
    storage = tiny_storage(tiny_plan(window=3), units=20)
    rows = storage.admit([4], [4])
    assert not isinstance(rows, AdmissionRefusal)
    for tokens, lose in ((4, True), (1, False), (1, False)):
        step = storage.prepare_step(rows, [tokens])
        assert isinstance(step, PreparedStep)
        storage.launch_forward(step)
        storage.record_forward(step)
        storage.forward_processed(step)
        if storage.requests.prepared[rows[0]] == 6:
            before = (
                storage.statistics(),
                storage.requests.lengths.tolist(),
                storage.requests.open_steps.tolist(),
            )
            with pytest.raises(InvariantError, match=r"chain\.window_segment_bound"):
                storage.advance(step)
            assert step.state is StepState.PROCESSED
            assert before == (
                storage.statistics(),
                storage.requests.lengths.tolist(),
                storage.requests.open_steps.tolist(),
            )
            return
        storage.advance(step)
        if lose:
            lost_window_page(storage, int(rows[0]))
    pytest.fail("the page was retired unseen")
