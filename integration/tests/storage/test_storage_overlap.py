"""What overlap asks of the storage: two steps of a row open at once, priced, in turn; and what it refuses or checks around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtide.arena import SCRATCH_BYTES, CPUDevice, KVArena
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.ledger import CheckLevel, InvariantError
from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    MHAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    plan_kv_storage,
)
from kvtide.sizing import ServingPolicy
from kvtide.storage import (
    AdmissionRefusal,
    ForwardIds,
    KVStorage,
    PreparedStep,
    SharedReadEnds,
    StorageError,
    StorageSettings,
    build_kv_storage,
)

CHUNK_TOKENS = 8
OVERLAP = ServingPolicy(overlap=True)


def small_plan(page_tokens: int = 2) -> KVStoragePlan:
    state = StateGeometry((TensorDecl("s", (12,), DType.FLOAT32),))
    return plan_kv_storage(
        [
            KVLayerDecl(0, (KVPart(MHAGeometry(1, 3, 5, DType.FLOAT32), FullLifetime()),)),
            KVLayerDecl(1, (KVPart(MHAGeometry(1, 2, 2, DType.FLOAT32), WindowLifetime(5)),)),
            KVLayerDecl(2, (KVPart(state, StateLifetime()),)),
        ],
        page_tokens=page_tokens,
    )


def build(policy: ServingPolicy = OVERLAP, arena_bytes: int = 6_000, **more: object) -> KVStorage:
    return build_kv_storage(
        small_plan(),
        budget_bytes=SCRATCH_BYTES + arena_bytes,
        max_running_requests=6,
        max_context_tokens=64,
        chunk_tokens=CHUNK_TOKENS,
        policy=policy,
        **more,  # type: ignore[arg-type]  # as a test gives them
    )


def admitted(storage: KVStorage, prompt: int, output: int) -> int:
    rows = storage.admit([prompt], [output])
    assert not isinstance(rows, AdmissionRefusal)
    return int(rows[0])


def prepared(storage: KVStorage, row: int, count: int) -> PreparedStep:
    step = storage.prepare_step([row], [count])
    assert isinstance(step, PreparedStep)
    return step


def in_flight(storage: KVStorage, row: int, count: int) -> PreparedStep:
    step = prepared(storage, row, count)
    storage.launch_forward(step).resolve()
    storage.record_forward(step)
    return step


def done(storage: KVStorage, step: PreparedStep) -> None:
    storage.forward_processed(step)
    storage.advance(step)


@pytest.mark.requirement("K1", "K4")
def test_a_rows_next_step_is_prepared_while_its_last_forward_runs() -> None:
    """And begins where that one ends: what is in flight counts as written."""
    storage = build()
    row = admitted(storage, 12, 6)
    first = in_flight(storage, row, 8)
    second = in_flight(storage, row, 4)
    assert (first.starts[0], second.starts[0]) == (0, 8)
    assert (storage.requests.lengths[row], storage.requests.prepared[row]) == (0, 12)
    with pytest.raises(StorageError, match=rf"rows \[{row}\]: 2 of their steps, the most that may be open"):
        storage.prepare_step([row], [1])
    done(storage, first)
    third = in_flight(storage, row, 1)
    assert (storage.requests.lengths[row], third.starts[0]) == (8, 12)
    done(storage, second)
    done(storage, third)
    storage.verify_idle()


@pytest.mark.requirement("K1", "S5")
def test_without_overlap_a_row_has_one_step_open() -> None:
    """Its peak was priced so: a second forward in flight would hold pages that nobody was promised."""
    storage = build(ServingPolicy())
    row = admitted(storage, 12, 6)
    in_flight(storage, row, 8)
    with pytest.raises(StorageError, match="1 of their steps, the most that may be open"):
        storage.prepare_step([row], [4])


@pytest.mark.requirement("K1")
def test_steps_of_a_row_are_advanced_over_in_turn() -> None:
    """Lengths would go back, and window pages that the later forward still needs would be freed."""
    storage = build()
    row = admitted(storage, 12, 6)
    first, second = in_flight(storage, row, 8), in_flight(storage, row, 4)
    storage.forward_processed(first)
    storage.forward_processed(second)
    with pytest.raises(StorageError, match=rf"rows \[{row}\]: an earlier one of theirs comes first"):
        storage.advance(second)
    storage.advance(first)
    storage.advance(second)
    storage.verify_idle()


@pytest.mark.requirement("K1", "A5")
def test_a_launch_aborted_behind_a_running_forward_takes_back_its_tokens_alone() -> None:
    """The forward in flight stays as it is; the aborted tokens are prepared again."""
    storage = build()
    row = admitted(storage, 12, 6)
    first = in_flight(storage, row, 8)
    aborted = storage.prepare_step([row], [4])
    assert isinstance(aborted, PreparedStep)
    storage.launch_forward(aborted)
    storage.abandon(aborted)
    assert storage.requests.prepared[row] == 8
    again = in_flight(storage, row, 4)
    assert again.starts[0] == 8
    done(storage, first)
    done(storage, again)
    storage.verify_idle()
    assert storage.statistics().aborted_launches == 1
    assert storage.statistics().launches == 3


@pytest.mark.requirement("A5", "K1")
@pytest.mark.parametrize("launched", [False, True])
def test_pages_that_an_abandoned_step_was_to_fill_owe_nothing_and_come_zeroed_to_the_next(
    launched: bool,
) -> None:
    """The next step may be shorter, and its kernels load them whole."""
    storage = build(writes_whole_pages=True)
    row = admitted(storage, 12, 6)
    storage.device.arena.bytes[storage.layout.prefix_bytes :] = 0xFF
    step = prepared(storage, row, 8)
    if launched:
        storage.launch_forward(step)
    storage.abandon(step)
    assert storage.chain.statistics().owed_units == 0
    shorter = prepared(storage, row, 5)
    for layer in (0, 1):
        view = storage.routed_cache.attention(layer)
        assert view is not None
        pages = torch.from_numpy(
            storage.chain.physical_units(view.band, storage.requests.pages[row, 2:3].astype(np.int64))
        )
        assert (pages > 0).all()
        assert all((plane[pages] == 0).all() for plane in view.planes.values()), (
            "the page that the step ends inside"
        )
    storage.abandon(shorter)


@pytest.mark.requirement("K1", "K7", "A5")
@pytest.mark.parametrize("launched", [False, True])
def test_a_step_is_prepared_once_the_one_before_is_recorded_or_abandoned(launched: bool) -> None:
    """Else a row could have a gap of tokens that nobody wrote, its older step given up or launched later; and the older forward would
    load pages that the younger has yet to fill.
    """
    storage = build(writes_whole_pages=True)
    row, other = admitted(storage, 12, 6), admitted(storage, 4, 6)
    first = prepared(storage, row, 4)
    before = storage.statistics()
    with pytest.raises(
        StorageError, match=rf"rows \[{row}\]: the one before was neither recorded nor abandoned"
    ):
        storage.prepare_step([row, other], [4, 4])
    assert storage.statistics() == before
    beside = prepared(storage, other, 4)
    if launched:
        storage.launch_forward(first)
    storage.abandon(first)
    assert storage.requests.prepared[row] == storage.requests.page_counts[row] == 0
    storage.launch_forward(beside)
    storage.record_forward(beside)
    done(storage, beside)
    first, second = in_flight(storage, row, 4), prepared(storage, row, 4)
    done(storage, first)
    storage.abandon(second)
    done(storage, in_flight(storage, row, 8))
    assert storage.requests.lengths[row] == 12
    storage.verify_idle()


@pytest.mark.requirement("K2")
def test_a_row_is_reset_by_the_next_forward_that_runs_whoever_is_in_it() -> None:
    """Also after an aborted launch, which may have reset nothing; and once only, or it would forget its own tokens."""
    storage = build()
    row = admitted(storage, 4, 6)
    storage.row_state.lengths[row] = 99
    aborted = storage.prepare_step([row], [4])
    assert isinstance(aborted, PreparedStep)
    storage.launch_forward(aborted)
    storage.abandon(aborted)
    assert storage.row_state.lengths[row] == 99
    other = admitted(storage, 4, 6)
    first = in_flight(storage, other, 4)
    assert storage.row_state.lengths[[row, other]].tolist() == [0, 0]
    rows = torch.tensor([other])
    storage.row_state.advance(rows, 4, torch.tensor([7]))
    second = in_flight(storage, other, 1)
    assert storage.row_state.lengths[other] == 4
    assert storage.row_state.last_tokens[other] == 7
    assert storage.row_state.drawn_counts[other] == 1
    done(storage, first)
    done(storage, second)


@pytest.mark.requirement("K1", "K11")
def test_a_request_that_ends_under_its_next_forward_leaves_that_forward_its_pages() -> None:
    """They pend; the row serves another request at once, which that forward's step does not touch."""
    storage = build()
    row = admitted(storage, 8, 6)
    first = in_flight(storage, row, 8)
    second = in_flight(storage, row, 1)
    done(storage, first)
    storage.release([row])
    pending = {band.name: band.pending_units for band in storage.statistics().chain.bands}
    assert pending["full"] == 5
    assert pending["state"] == 1
    assert admitted(storage, 8, 6) == row
    done(storage, second)
    assert storage.requests.lengths[row] == 0
    assert all(band.pending_units == 0 for band in storage.statistics().chain.bands)
    storage.verify_idle()


@pytest.mark.requirement("K5", "S5")
def test_what_is_admitted_for_overlap_is_served_with_two_forwards_in_flight() -> None:
    """An arena filled to the last promise: every request goes on with a forward in flight, and no take is refused."""
    storage = build(arena_bytes=9_000)
    rows: list[int] = []
    while not isinstance(refusal := storage.admit([20], [12]), AdmissionRefusal):
        rows += refusal.tolist()
    assert len(rows) > 1
    counts = [8, 8, 4, *[1] * 11]
    flying: list[PreparedStep] = []
    for count in counts:
        step = storage.prepare_step(rows, [count] * len(rows))
        assert isinstance(step, PreparedStep)
        storage.launch_forward(step).resolve()
        storage.record_forward(step)
        flying.append(step)
        if len(flying) > 1:
            done(storage, flying.pop(0))
    done(storage, flying.pop())
    storage.release(rows)
    storage.verify_idle()


@pytest.mark.requirement("K1", "S5")
def test_a_policy_that_the_storage_does_not_serve_is_refused() -> None:
    """Requests would be priced for a life that they do not lead."""
    with pytest.raises(StorageError, match="3 draft tokens a step"):
        build(ServingPolicy(draft_tokens=3))


@pytest.mark.requirement("K4")
def test_an_asynchronous_device_without_streams_is_refused() -> None:
    """Its events would count as reached while the work before them still runs."""
    with pytest.raises(StorageError, match=r"cannot run CPUDevice over memory of 'meta'"):
        build(memory="meta")


class OneStream(CPUDevice):
    """Forwards and the allocator's work in one queue."""

    def __init__(self, arena: KVArena) -> None:
        super().__init__(arena)
        self.forward_stream = self.schedule_stream


@pytest.mark.requirement("K4")
def test_a_device_with_one_stream_is_refused() -> None:
    with pytest.raises(StorageError, match="its schedule stream is its forward stream"):
        build(make_device=OneStream)


@pytest.mark.requirement("K4", "K2")
def test_a_state_slot_is_the_forwards_own_until_its_end_and_the_next_requests_behind_it() -> None:
    """A request ends under its last forward; its slot's id is gone, or another's, before that forward stores its state.

    A backend that looked the slot up again there would write elsewhere; the next request's first read, of the same slot, is zero.
    """
    storage = build(make_device=ModelledTensorDevice)
    device = storage.device
    assert isinstance(device, ModelledTensorDevice)
    view = storage.routed_cache.state(2)
    assert view is not None
    plane = view.planes["s"]
    found: dict[str, ForwardIds] = {}
    read: dict[str, float] = {}

    def queued(name: str, step: PreparedStep, value: float) -> torch.Tensor:
        """A forward that loads its state, and stores `value`; the virtual slots that it was launched with."""
        unresolved = storage.launch_forward(step)

        def resolve() -> None:
            found[name] = unresolved.resolve()

        def load() -> None:
            slots = found[name].state_slots
            assert slots is not None
            read[name] = float(slots.gather(plane).max())

        def store() -> None:
            slots = found[name].state_slots
            assert slots is not None
            slots.scatter(plane, torch.full((1, 12), value))

        device.submit(f"{name} metadata", run=resolve)
        ends = SharedReadEnds(device, ["state"])
        ends.declare("state")
        device.submit(f"{name} load", run=load)
        device.submit(f"{name} store", run=store)
        storage.record_forward(step, ends)
        return torch.from_numpy(unresolved.state_slots)

    row = admitted(storage, 4, 6)
    first = prepared(storage, row, 4)
    queued("first", first, 1.0)
    second = prepared(storage, row, 1)
    virtual = queued("second", second, 2.0)
    device.wait_on_host(first.done_event)
    done(storage, first)
    storage.release([row])
    device.upload(device.schedule_stream)
    device.model.run_until(device.record_event(device.schedule_stream))
    assert "second" in found
    assert "second" not in read, "the slot's id is gone while the former request's forward runs"
    slots = found["second"].state_slots
    assert slots is not None
    assert device.tables["ids:state"][virtual].tolist() == [-1] != slots.slots.tolist()
    assert admitted(storage, 4, 6) == row
    third = prepared(storage, row, 4)
    queued("third", third, 3.0)
    device.wait_on_host(third.done_event)
    assert read == {"first": 0.0, "second": 1.0, "third": 0.0}
    done(storage, second)
    done(storage, third)
    storage.verify_idle()


# --- at idle ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("L8", "K11")
@pytest.mark.parametrize("name", ["rows", "ids:state", "ids:full", "ids:window-5"])
def test_a_mirror_that_is_not_what_the_host_has_is_found_at_idle(name: str) -> None:
    """A lost mark or a stray write would be a wrong token some day; changes that wait for the next upload are none."""
    storage = build(check_level=CheckLevel.STRICT)
    row = admitted(storage, 8, 6)
    done(storage, in_flight(storage, row, 8))
    storage.verify_idle()
    entry = 0 if name == "rows" else 1
    storage.device.tables[name][entry] += 1
    with pytest.raises(InvariantError, match=rf"mirror\.equals_host.*mirror '{name}' differs in 1 entries"):
        storage.verify_idle()


@pytest.mark.requirement("L8")
def test_mirrors_are_compared_only_if_asked() -> None:
    """The comparison makes the host wait for the device."""
    storage = build()
    storage.device.tables["rows"][0] += 1
    storage.verify_idle()


@pytest.mark.requirement("K11")
def test_a_free_row_that_holds_something_is_found_at_idle() -> None:
    """Its next request would begin with another's length."""
    storage = build()
    row = admitted(storage, 8, 6)
    storage.release([row])
    storage.requests.lengths[row] = 3
    with pytest.raises(InvariantError, match=rf"storage\.row_state.*free rows \[{row}\] hold something"):
        storage.verify_idle()


@pytest.mark.requirement("C7", "K4")
def test_an_opportunistic_flush_closes_holes_at_idle_and_says_how_many_moved() -> None:
    """So that the next take of a neighbour grows into one gap."""
    storage = build(arena_bytes=8_000)
    rows = [admitted(storage, 8, 2) for _ in range(4)]
    for row in rows:
        done(storage, in_flight(storage, row, 8))
    storage.release(rows[:2])
    moved = storage.flush_opportunistic()
    assert moved > 0
    assert storage.statistics().flushed_units == moved
    assert all(
        band.hole_units == 0 for band in storage.statistics().chain.bands if band.name in {"full", "state"}
    )
    assert storage.flush_opportunistic() == 0
    storage.verify_idle()


def test_statistics_say_what_is_held_and_promised() -> None:
    storage = build()
    row = admitted(storage, 8, 6)
    statistics = storage.statistics()
    assert (statistics.rows_in_use, statistics.free_rows) == (1, 5)
    assert statistics.admitted_at_peak == dict(
        zip(
            ("state", "window-5", "full"),
            storage.sized.demand(prompt_tokens=8, output_tokens=6).units,
            strict=True,
        )
    )
    step = in_flight(storage, row, 8)
    assert storage.statistics().forwards_in_flight == 1
    done(storage, step)
    assert np.sum([band.live_units for band in storage.statistics().chain.bands]) > 0


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_come_from_the_environment_that_is_given() -> None:
    """Read once by a program, passed down as values: nothing else looks at the environment."""
    assert StorageSettings.from_environment({}) == StorageSettings(check_level=CheckLevel.OFF)
    strict = StorageSettings.from_environment({"KVTIDE_CHECK_LEVEL": "Strict"})
    assert strict == StorageSettings(check_level=CheckLevel.STRICT)
    with pytest.raises(
        StorageError, match="KVTIDE_CHECK_LEVEL='loud' is no check level: use off, warn, strict"
    ):
        StorageSettings.from_environment({"KVTIDE_CHECK_LEVEL": "loud"})
