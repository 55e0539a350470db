"""`KVStorage` as a scheduler drives it, on real bytes: what a row wrote is what a row reads, whatever moved meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.arena import SCRATCH_BYTES, gather_tokens, write_tokens
from kvtide.ledger import InvariantError
from kvtide.plan import (
    ChunkLifetime,
    CompressedGeometry,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    Lifetime,
    MHAGeometry,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    SubPool,
    TensorDecl,
    WindowLifetime,
    plan_kv_storage,
)
from kvtide.sizing import SizingError
from kvtide.storage import (
    AdmissionRefusal,
    KVStorage,
    PreparedStep,
    SharedReadEnds,
    StepState,
    StorageError,
    build_kv_storage,
)

CHUNK_TOKENS = 8


def plan_of(
    *, windows: tuple[int, ...], full: bool, state: bool, page_tokens: int, chunks: tuple[int, ...] = ()
) -> KVStoragePlan:
    lifetimes: list[Lifetime] = [WindowLifetime(window) for window in windows]
    lifetimes += [ChunkLifetime(chunk) for chunk in chunks]
    lifetimes += [FullLifetime()] if full else []
    layers = []
    for layer, lifetime in enumerate(lifetimes):
        geometry = MHAGeometry(1 + layer % 2, 3, 5, DType.FLOAT32)
        layers.append(KVLayerDecl(layer, (KVPart(geometry, lifetime),)))
    if state:
        tensors = (TensorDecl("conv", (7,), DType.BFLOAT16), TensorDecl("recurrent", (3, 5), DType.FLOAT32))
        layers.append(KVLayerDecl(len(layers), (KVPart(StateGeometry(tensors), StateLifetime()),)))
    return plan_kv_storage(layers, page_tokens=page_tokens)


def build(plan: KVStoragePlan, arena_bytes: int = 12_000, rows: int = 6) -> KVStorage:
    return build_kv_storage(
        plan,
        budget_bytes=SCRATCH_BYTES + arena_bytes,
        max_running_requests=rows,
        max_context_tokens=64,
        chunk_tokens=CHUNK_TOKENS,
    )


def poison_free_bytes(storage: KVStorage) -> None:
    """Fill every byte that no live unit and no sink holds with 0xFF, a NaN in every float type."""
    layout = storage.layout
    free = np.ones(layout.arena_bytes, np.bool_)
    free[: layout.prefix_bytes] = False
    for band in layout.bands:
        for unit in storage.chain.live_units(band.name).tolist():
            free[band.start_byte(unit) : band.start_byte(unit + 1)] = False
    storage.device.arena.bytes[torch.from_numpy(free)] = 0xFF


class ToyModel:
    """Writes a number of its own for every request, token, layer and plane, and reads back what it may still read."""

    def __init__(self, storage: KVStorage) -> None:
        self.storage = storage
        self.request_of_row: dict[int, int] = {}

    def entry(self, row: int, position: int, layer: int) -> float:
        return float(self.request_of_row[row] * 1000 + position * 7 + layer)

    def forward(self, step: PreparedStep) -> None:
        storage = self.storage
        ids = storage.launch_forward(step).resolve()
        tokens = [
            (int(row), int(start) + n)
            for row, start, count in zip(step.rows, step.starts, step.counts, strict=True)
            for n in range(count)
        ]
        for pool in storage.plan.token_sub_pools:
            for layer in pool.layers:
                view = storage.routed_cache.attention(layer)
                assert view is not None
                assert view.band == pool.name
                for plane in view.planes.values():
                    entries = torch.tensor([self.entry(row, at, layer) for row, at in tokens])
                    shape = (len(tokens), *plane.shape[2:])
                    values = entries.view(-1, *[1] * (len(shape) - 1)).expand(shape)
                    write_tokens(plane, ids.write_slots[pool.name], values)
                self.check_reads(step, pool, layer, ids.page_tables[pool.name])
        if ids.state_slots is not None:
            self.advance_state(step, ids.state_slots.slots)
        storage.record_forward(step)

    def check_reads(self, step: PreparedStep, pool: SubPool, layer: int, table: torch.Tensor) -> None:
        view = self.storage.routed_cache.attention(layer)
        assert view is not None
        for place, row in enumerate(step.rows.tolist()):
            end = int(step.starts[place] + step.counts[place])
            start = int(step.starts[place])
            first = 0 if pool.window_tokens is None else max(0, start - pool.window_tokens + 1)
            first = first if pool.chunk_tokens is None else start - start % pool.chunk_tokens
            at = torch.arange(first, end)
            page_tokens = self.storage.plan.page_tokens
            slots = table[place, at // page_tokens] * page_tokens + at % page_tokens
            expected = torch.tensor([self.entry(row, position, layer) for position in at.tolist()])
            for name, plane in view.planes.items():
                read = gather_tokens(plane, slots).flatten(1)
                assert (read == expected[:, None]).all(), f"{pool.name} layer {layer} {name} row {row}"
            held = -(-end // page_tokens)
            assert (table[place, held:] == 0).all(), "beyond the row a table reads as the sink"
            behind = first // page_tokens
            whole = plane[table[place]].flatten(1)
            assert torch.isfinite(whole).all(), "a page loaded whole holds a former tenant's bytes"
            assert (table[place, :behind] == 0).all(), "behind the window a table reads as the sink"

    def advance_state(self, step: PreparedStep, slots: torch.Tensor) -> None:
        layer = len(self.storage.plan.token_sub_pools)
        view = self.storage.routed_cache.state(layer)
        assert view is not None
        for row, start, count, slot in zip(step.rows, step.starts, step.counts, slots.tolist(), strict=True):
            for plane in view.planes.values():
                assert (plane[slot] == float(start)).all(), f"state of row {row}"
                plane[slot] = float(start + count)


MODELS = [
    {"windows": (), "full": True, "state": False},
    {"windows": (), "full": True, "state": True},
    {"windows": (5,), "full": True, "state": False},
    {"windows": (16, 5), "full": True, "state": True},
    {"windows": (16, 5), "full": False, "state": True},
    {"windows": (), "full": False, "state": True},
    {"windows": (), "chunks": (12,), "full": True, "state": False},
    {"windows": (8,), "chunks": (8,), "full": False, "state": True},
    {"windows": (), "chunks": (12,), "full": False, "state": False},
]


@pytest.mark.requirement("K1", "K2", "K3", "K5", "K7", "C1", "A2", "A5", "A8")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_read_what_they_wrote_and_an_admitted_request_is_never_refused(data: st.DataObject) -> None:
    """Any schedule: rows come and go, chunks of any length, bands take each other's bytes, freed bytes turn to NaN."""
    model = data.draw(st.sampled_from(MODELS))
    plan = plan_of(**model, page_tokens=data.draw(st.sampled_from([1, 2, 4])))
    storage = build(plan, data.draw(st.integers(9_000, 16_000)))
    toy = ToyModel(storage)
    left: dict[int, list[int]] = {}
    for request in range(1, data.draw(st.integers(3, 30))):
        prompt, output = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))
        rows = storage.admit([prompt], [output])
        if not isinstance(rows, AdmissionRefusal):
            toy.request_of_row[int(rows[0])] = request
            left[int(rows[0])] = [prompt, output - 1]
        chosen = [row for row in left if data.draw(st.booleans())]
        if not chosen:
            continue
        counts = [
            data.draw(st.integers(1, min(CHUNK_TOKENS, left[row][0]))) if left[row][0] else 1
            for row in chosen
        ]
        step = storage.prepare_step(chosen, counts)
        assert isinstance(step, PreparedStep), f"an admitted request was refused: {step}"
        poison_free_bytes(storage)
        toy.forward(step)
        storage.forward_processed(step)
        storage.advance(step)
        for row, count in zip(chosen, counts, strict=True):
            part = 0 if left[row][0] else 1
            left[row][part] -= count
        done = [row for row in chosen if left[row] == [0, 0] or data.draw(st.integers(0, 9)) == 0]
        if done:
            storage.release(done)
            for row in done:
                del left[row]
        storage.verify_idle()
    if left:
        storage.release(list(left))
    storage.verify_idle()
    assert all(band.live_units == 0 for band in storage.chain.statistics().bands)


@pytest.mark.requirement("K5")
def test_admission_fills_the_arena_and_refuses_the_next_with_figures() -> None:
    """A refusal that waits names what is promised; one that is final says that waiting is for ever."""
    storage = build(plan_of(windows=(5,), full=True, state=True, page_tokens=4), 10_000, rows=40)
    admitted = 0
    while not isinstance(refusal := storage.admit([20], [10]), AdmissionRefusal):
        admitted += 1
    assert admitted > 1
    assert not refusal.is_final
    assert "beside what is promised" in str(refusal)
    empty = build(plan_of(windows=(5,), full=True, state=True, page_tokens=4), 3_000)
    final = empty.admit([60], [4])
    assert isinstance(final, AdmissionRefusal)
    assert final.is_final
    assert "not even alone" in str(final)
    too_long = empty.admit([60], [6])
    assert isinstance(too_long, AdmissionRefusal)
    assert too_long.is_final
    assert "a request of 66 tokens, output included, is longer than the 64" in str(too_long)


@pytest.mark.requirement("K5", "K1")
def test_a_batch_is_admitted_whole_or_not_at_all() -> None:
    """Half a batch admitted would leave the caller to guess which half."""
    storage = build(plan_of(windows=(), full=True, state=True, page_tokens=4), rows=2)
    refusal = storage.admit([4, 4, 4], [4, 4, 4])
    assert isinstance(refusal, AdmissionRefusal)
    assert (refusal.is_final, refusal.first_that_fit) == (False, 2)
    assert "though the first 2 would do: they need as many rows, of which there are 2" in str(refusal)
    assert len(storage.requests.live_rows()) == 0
    storage.verify_idle()
    assert not isinstance(storage.admit([4, 4], [4, 4]), AdmissionRefusal)


def ready() -> tuple[KVStorage, int]:
    storage = build(plan_of(windows=(5,), full=True, state=True, page_tokens=4))
    rows = storage.admit([12], [4])
    assert not isinstance(rows, AdmissionRefusal)
    return storage, int(rows[0])


@pytest.mark.requirement("K1")
@pytest.mark.parametrize(
    ("rows", "counts", "text"),
    [
        ([0, 0], [1, 1], "a row is named twice"),
        ([1], [1], "rows [1]: not in use"),
        ([-1], [1], "rows [-1]: rows run from 0 to 5"),
        ([99], [1], "rows [99]: rows run from 0 to 5"),
        ([0], [0], "counts must lie between 1 and the chunk of 8"),
        ([0], [9], "counts must lie between 1 and the chunk of 8"),
        ([0], [1, 1], "one count a row"),
        ([], [], "a row at least"),
    ],
)
def test_a_wrong_step_is_refused_before_anything_changes(
    rows: list[int], counts: list[int], text: str
) -> None:
    """The scheduler's mistake must name itself, and the storage must go on as if it had not been made."""
    storage, _ = ready()
    before = storage.chain.statistics()
    with pytest.raises(StorageError) as caught:
        storage.prepare_step(rows, counts)
    assert text in str(caught.value)
    assert storage.chain.statistics() == before


@pytest.mark.requirement("K1", "K5")
def test_a_row_cannot_outgrow_what_it_was_admitted_for() -> None:
    """Admission promised its peak and no more; past the prompt that is one token a step."""
    storage, row = ready()
    for count in (8, 4):
        step = storage.prepare_step([row], [count])
        assert isinstance(step, PreparedStep)
        storage.launch_forward(step)
        storage.record_forward(step)
        with pytest.raises(StorageError, match="neither advanced over nor abandoned"):
            storage.prepare_step([row], [1])
        storage.forward_processed(step)
        storage.advance(step)
    with pytest.raises(StorageError, match="several tokens at once past the prompt"):
        storage.prepare_step([row], [2])
    for _ in range(3):
        step = storage.prepare_step([row], [1])
        assert isinstance(step, PreparedStep)
        storage.launch_forward(step)
        storage.record_forward(step)
        storage.forward_processed(step)
        storage.advance(step)
    with pytest.raises(StorageError, match=r"more tokens than they were admitted for \(\[15\]\)"):
        storage.prepare_step([row], [1])


def prepared(storage: KVStorage, row: int, count: int) -> PreparedStep:
    step = storage.prepare_step([row], [count])
    assert isinstance(step, PreparedStep)
    return step


VERBS = ("launch_forward", "record_forward", "forward_processed", "advance")


@pytest.mark.requirement("K1")
@pytest.mark.parametrize("done", range(len(VERBS) + 1))
@pytest.mark.parametrize("verb", [*VERBS, "abandon"])
def test_a_step_takes_its_verbs_in_order_and_each_once(done: int, verb: str) -> None:
    """Each verb is a promise to the allocator; one that is skipped or repeated must not pass silently."""
    storage, row = ready()
    step = prepared(storage, row, 4)
    for earlier in VERBS[:done]:
        getattr(storage, earlier)(step)
    state = step.state
    is_next = verb == "abandon" if done < 2 and verb == "abandon" else verb == (*VERBS, "")[done]
    if is_next:
        getattr(storage, verb)(step)
        assert step.state is not state
        return
    with pytest.raises(StorageError, match=f"a step of rows .*: it is {state.value}, and must be"):
        getattr(storage, verb)(step)
    assert step.state is state


@pytest.mark.requirement("K1", "L1")
def test_nothing_changes_hands_while_a_launch_is_open() -> None:
    """A verb that may free or take pages refuses then, whether or not this call would have touched one."""
    storage, row = ready()
    other = int(storage.admit([12], [4])[0])  # type: ignore[index]  # the arena holds both
    first = prepared(storage, row, 8)
    for verb in VERBS[:3]:
        getattr(storage, verb)(first)
    second = prepared(storage, other, 8)
    storage.launch_forward(second)
    for attempt in (
        lambda: storage.advance(first),
        lambda: storage.release([row]),
        lambda: storage.prepare_step([row], [1]),
    ):
        with pytest.raises(InvariantError, match=r"forward\.record_before_pages"):
            attempt()
    storage.record_forward(second)
    storage.advance(first)
    assert storage.requests.lengths[row] == 8
    storage.release([row])
    with pytest.raises(InvariantError, match=r"storage\.row_state.*rows in use \[1\]"):
        storage.verify_idle()
    storage.forward_processed(second)
    storage.advance(second)
    storage.verify_idle()


@pytest.mark.requirement("K1", "K2")
def test_a_step_does_not_touch_the_next_request_of_its_row() -> None:
    """A client aborts between two verbs, and the row is another's before the step is done with."""
    storage, row = ready()
    stale = prepared(storage, row, 8)
    storage.release([row])
    assert storage.admit([12], [4]).tolist() == [row]  # type: ignore[union-attr]  # the arena is empty
    with pytest.raises(StorageError, match=r"rows \[0\] were released since it was prepared"):
        storage.launch_forward(stale)
    fresh = prepared(storage, row, 4)
    storage.abandon(stale)
    assert storage.requests.prepared[row] == 4
    for verb in VERBS[:3]:
        getattr(storage, verb)(fresh)
    storage.release([row])
    assert storage.admit([12], [4]).tolist() == [row]  # type: ignore[union-attr]  # as above
    storage.advance(fresh)
    assert storage.requests.lengths[row] == 0
    storage.verify_idle()


@pytest.mark.requirement("L1")
def test_a_forward_is_processed_only_after_it_completed() -> None:
    """Whoever looks at a result before its event is looking at garbage, and frees pages under a running forward."""
    storage, row = ready()
    step = prepared(storage, row, 4)
    storage.launch_forward(step)
    storage.record_forward(step)
    storage.device.query_event = lambda event: False  # type: ignore[method-assign]  # a device that is still at it
    with pytest.raises(InvariantError, match=r"forward\.processed_after_completion"):
        storage.forward_processed(step)
    assert step.state is StepState.RECORDED


@pytest.mark.requirement("K1")
@pytest.mark.parametrize(
    ("prompts", "outputs", "text"),
    [
        ([3.7], [2], "prompt_tokens must be a list or array of whole numbers"),
        ([True], [2], "prompt_tokens must be a list or array of whole numbers"),
        (["5"], [2], "prompt_tokens must be a list or array of whole numbers"),
        ([[3]], [2], "prompt_tokens must be a list or array of whole numbers"),
        ([3], [2, 2], "cannot admit 1 prompts with 2 outputs"),
        ([4], [0], "cannot admit a request: output_tokens must be a positive integer"),
        ([-4], [1], "cannot admit a request: prompt_tokens must be a positive integer"),
        ([2**64], [1], "prompt_tokens must be a list or array of whole numbers"),
        ([2**63], [1], "prompt_tokens must fit in 64 bits"),
    ],
)
def test_lengths_that_are_no_lengths_are_refused(prompts: list[int], outputs: list[int], text: str) -> None:
    """Rounding a length would admit another request than the one that was asked about."""
    storage, _ = ready()
    with pytest.raises(StorageError) as caught:
        storage.admit(prompts, outputs)
    assert text in str(caught.value)
    storage.verify_idle()


@pytest.mark.requirement("K11")
@pytest.mark.parametrize("column", ["open_steps", "recorded", "prepared", "lengths"])
def test_a_row_whose_lengths_do_not_agree_is_found_at_idle(column: str) -> None:
    """Its next step would begin where nothing was written, or leave a gap."""
    storage, row = ready()
    getattr(storage.requests, column)[row] += 1
    with pytest.raises(InvariantError, match=rf"storage\.row_state.*rows in use \[{row}\]"):
        storage.verify_idle()


@pytest.mark.requirement("K1", "S5")
@pytest.mark.parametrize("over", [1, 2])
def test_a_chunk_does_not_reach_past_the_prompt(over: int) -> None:
    """Several tokens at once are priced in prefill, one at a time behind it."""
    storage, row = ready()
    done = prepared(storage, row, 8)
    for verb in VERBS:
        getattr(storage, verb)(done)
    with pytest.raises(StorageError, match="several tokens at once past the prompt"):
        storage.prepare_step([row], [4 + over])
    assert prepared(storage, row, 4).starts.tolist() == [8]


@pytest.mark.requirement("K1", "A5")
def test_an_abandoned_step_gives_back_what_it_took() -> None:
    """A forward that could not be queued (out of memory, say) is tried again, and perhaps with fewer tokens."""
    storage, row = ready()
    before = storage.resident_now()
    for tokens in (7, 3):
        for is_launched in (False, True):
            step = storage.prepare_step([row], [tokens])
            assert isinstance(step, PreparedStep)
            assert storage.resident_now() != before
            if is_launched:
                storage.launch_forward(step)
            storage.abandon(step)
            assert storage.resident_now() == before
            assert storage.requests.prepared[row] == storage.requests.page_counts[row] == 0
            assert not storage.requests.pages[row].any()
            storage.verify_idle()
    storage.release([row])
    storage.verify_idle()


@pytest.mark.requirement("L2", "K1")
def test_pages_released_under_a_forward_pend_until_it_is_processed() -> None:
    """The forward may still read them; they count as free all the same."""
    storage, row = ready()
    step = storage.prepare_step([row], [8])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.record_forward(step)
    storage.release([row])
    assert {band.name: band.pending_units for band in storage.chain.statistics().bands} == {
        "state": 1,
        "window-5": 2,
        "full": 2,
    }
    assert not isinstance(storage.admit([12], [4]), AdmissionRefusal)
    storage.forward_processed(step)
    assert all(band.pending_units == 0 for band in storage.chain.statistics().bands)


@pytest.mark.requirement("L6", "K4")
@pytest.mark.parametrize("declared", [False, True])
def test_the_barrier_of_a_launch_retires_what_it_waits_for(declared: bool) -> None:
    """The whole forward where a backend declares no read end; else all before it, and the forward itself stays a reader."""
    storage, row = ready()
    other = storage.admit([3], [4])
    assert not isinstance(other, AdmissionRefusal)
    forwards = []
    for rows, count in (([row], 8), (other, 3)):
        step = storage.prepare_step(rows, [count])
        assert isinstance(step, PreparedStep)
        storage.launch_forward(step)
        ends = SharedReadEnds(storage.device, ["full", "window-5"])
        ends.declare("window-5")
        assert ends.end is None
        if declared:
            ends.declare("full")
        storage.record_forward(step, ends)
        assert step.launch is not None
        forwards.append(step.launch.forward)
    assert storage._steps.retired_through == forwards[0 if declared else 1]
    assert storage._steps.in_flight_count == 2


@pytest.mark.requirement("K4")
def test_a_read_end_is_declared_once_by_a_backend_that_there_is() -> None:
    """A second declaration, earlier or later, would make one of the two a lie."""
    ends = SharedReadEnds(build(plan_of(windows=(), full=True, state=False, page_tokens=4)).device, ["full"])
    with pytest.raises(StorageError, match=r"read ends of \['state'\]"):
        ends.declare("full", "state")
    ends.declare("full")
    with pytest.raises(StorageError, match="each declares once"):
        ends.declare("full")


@pytest.mark.requirement("S1")
def test_what_is_allocated_is_what_was_budgeted() -> None:
    """The capacity printed at boot is what the server has: arena, mirrors and row state, to the byte."""
    storage = build(plan_of(windows=(5,), full=True, state=True, page_tokens=4))
    state = storage.row_state
    beside = [*storage.device.tables.values(), state.lengths, state.last_tokens, state.drawn_counts]
    tables = sum(table.numel() * table.element_size() for table in beside)
    arena = storage.device.arena.bytes.numel()
    assert arena + tables + SCRATCH_BYTES == storage.sized.used_bytes <= storage.sized.budget_bytes
    assert storage.sized.budget_bytes - storage.sized.used_bytes < 16 * 4 + 16


@pytest.mark.requirement("S2")
def test_a_budget_below_the_floor_is_refused_before_anything_is_allocated() -> None:
    """With every term and the missing bytes."""
    with pytest.raises(SizingError, match=r"missing \d+ bytes"):
        build(plan_of(windows=(5,), full=True, state=True, page_tokens=4), 500)


@pytest.mark.requirement("K11")
def test_a_promise_that_outlives_its_row_is_found_at_idle() -> None:
    """It would refuse requests for ever, with the arena empty."""
    storage, row = ready()
    storage.verify_idle()
    storage._admission.release = lambda rows: None  # type: ignore[method-assign]  # the fault
    storage.release([row])
    with pytest.raises(InvariantError, match=r"storage\.promise_leak"):
        storage.verify_idle()


@pytest.mark.requirement("K11")
def test_a_leak_is_found_at_idle() -> None:
    """A page that nobody holds is a slow death; it must be loud."""
    storage, _ = ready()
    storage.chain.take(pages=1)
    with pytest.raises(InvariantError, match=r"storage\.leak"):
        storage.verify_idle()


@pytest.mark.requirement("K11", "C11")
def test_bytes_that_have_two_owners_are_found_at_idle() -> None:
    """Each band counts its own units right, and still two of them write the same bytes: only the sum of spans tells."""
    storage, row = ready()
    step = storage.prepare_step([row], [4])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.record_forward(step)
    storage.forward_processed(step)
    storage.advance(step)
    storage.verify_idle()
    # The middle band is put where the one before it lies: no unit is lost, none is counted twice.
    window = storage.chain._bands["window-5"]
    first = window.layout.first_page
    window.pack_into(first, first + window.end_page - window.first_page)
    with pytest.raises(InvariantError, match=r"chain\.bytes_conserved"):
        storage.verify_idle()


@pytest.mark.requirement("K1", "P6", "P10")
@pytest.mark.parametrize(
    ("layers", "window_page_tokens", "text"),
    [
        (
            [
                KVLayerDecl(0, (KVPart(MHAGeometry(1, 3, 5, DType.FLOAT32), FullLifetime()),)),
                KVLayerDecl(1, (KVPart(MHAGeometry(1, 3, 5, DType.FLOAT32), WindowLifetime(8)),)),
            ],
            2,
            "cannot run pages of 2 tokens in band 'window-8' beside the owner's of 4: give every band one page size",
        ),
        (
            [
                KVLayerDecl(
                    3, (KVPart(CompressedGeometry(MLAGeometry(8, 0, DType.FLOAT32), 4), FullLifetime()),)
                )
            ],
            None,
            "cannot run the compressed chains of layers [3]: kernels write one entry a token",
        ),
        (
            [
                KVLayerDecl(0, (KVPart(MHAGeometry(1, 3, 5, DType.FLOAT32), ChunkLifetime(8)),)),
                KVLayerDecl(1, (KVPart(MHAGeometry(1, 3, 5, DType.FLOAT32), WindowLifetime(5)),)),
            ],
            None,
            "cannot run bands ['window-5'] with 'chunk-8' as their owner: a finished attention chunk gives up",
        ),
        (
            [
                KVLayerDecl(0, (KVPart(MHAGeometry(1, 3, 5, DType.FLOAT32), FullLifetime()),)),
                KVLayerDecl(1, (), shares_layer=0),
            ],
            None,
            "cannot run layers [1], which share other layers' entries: declare them without parts",
        ),
    ],
)
def test_what_can_be_planned_but_not_run_is_refused_before_anything_is_allocated(
    layers: list[KVLayerDecl], window_page_tokens: int | None, text: str
) -> None:
    """A plan that ran half would give wrong tokens; the text says what to do meanwhile."""
    plan = plan_kv_storage(layers, page_tokens=4, window_page_tokens=window_page_tokens)
    with pytest.raises(StorageError) as caught:
        build(plan, arena_bytes=2**60)
    assert str(caught.value).startswith(text)


@pytest.mark.requirement("S3")
def test_targets_limit_nothing_at_run_time() -> None:
    """A mix that nobody planned for is served as long as its bytes are there, whichever band takes them."""
    plan = plan_of(windows=(), full=True, state=True, page_tokens=4)
    storage = build_kv_storage(
        plan,
        budget_bytes=SCRATCH_BYTES + 28_000,
        max_running_requests=40,
        max_context_tokens=400,
        chunk_tokens=CHUNK_TOKENS,
        state_slots=1,
    )
    targets = {target.name: target.unit_count for target in storage.sized.targets}
    assert targets["state"] == 1
    rows = storage.admit([1] * 40, [1] * 40)
    assert not isinstance(rows, AdmissionRefusal)
    held = {band.name: band.live_units for band in storage.chain.statistics().bands}
    assert held["state"] == 40 > targets["state"]
    storage.release(rows)

    tight = build_kv_storage(
        plan,
        budget_bytes=SCRATCH_BYTES + 28_000,
        max_running_requests=40,
        max_context_tokens=400,
        chunk_tokens=CHUNK_TOKENS,
        state_slots=40,
    )
    tokens = {target.name: target.token_count for target in tight.sized.targets}["full"]
    assert tokens is not None
    assert not isinstance(tight.admit([tokens + 8], [1]), AdmissionRefusal)
