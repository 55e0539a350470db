"""Checkpoints that never break a promise: what each strategy holds when, and what becomes of one that finds no slot (rows K7, K9)."""

from __future__ import annotations

import random
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
import pytest

from kvtide.chain import Taken
from kvtide.device import IntArray
from kvtide.ledger import Access, InvariantError, NetworkTransfer
from kvtide.plan import FullLifetime, WindowLifetime
from kvtide.sizing import CheckpointStrategy, ServingPolicy
from kvtide.storage import AdmissionRefusal, KVStorage, PreparedStep, StorageError, TakeRefusal

from .served import PAGE, plan_of
from .sharing import CHUNK, SharingWorld, shared_storage
from .test_sharing import PLANS, STRATEGIES, arena_bytes

GRID = 2 * PAGE
STATEFUL = plan_of(FullLifetime(), WindowLifetime(5), has_state=True)


def admitted(storage: KVStorage, prompt: list[int], output: int) -> int:
    rows = storage.admit([len(prompt)], [output], prompts=[prompt])
    assert not isinstance(rows, AdmissionRefusal), str(rows)
    return int(rows[0])


def recorded(storage: KVStorage, row: int, count: int) -> PreparedStep:
    step = storage.prepare_step([row], [count])
    assert isinstance(step, PreparedStep), str(step)
    storage.launch_forward(step)
    storage.record_forward(step)
    return step


def advanced(storage: KVStorage, step: PreparedStep, chosen: int = -1) -> None:
    storage.forward_processed(step)
    storage.advance(step, [chosen] * len(step.rows))


def slots(storage: KVStorage) -> tuple[int, int]:
    """State slots of rows, and of the tree."""
    sharing = storage.statistics().sharing
    assert sharing is not None
    return storage.resident_now()["state"], sharing.held_units["state"]


def state_bytes(storage: KVStorage, slot: int) -> npt.NDArray[np.uint8]:
    """Of a virtual state slot, to look at or to write as a forward would."""
    band = storage.layout.band("state")
    physical = int(storage.chain.physical_units("state", np.array([slot]))[0])
    start = band.origin_bytes + physical * band.unit_bytes
    arena: npt.NDArray[np.uint8] = storage.device.arena.bytes.numpy()
    return arena[start : start + band.unit_bytes]


def state_of(storage: KVStorage, row: int) -> npt.NDArray[np.uint8]:
    """The running state of a row."""
    return state_bytes(storage, int(storage.requests.state_slots[row]))


def kept_state(storage: KVStorage, prompt: list[int]) -> npt.NDArray[np.uint8]:
    """The checkpoint that the longest hit of a prompt ends at."""
    assert storage._sharing is not None
    return state_bytes(storage, storage._sharing.tree.match(prompt).node.state)


@pytest.mark.requirement("K7", "K8", "S5")
def test_what_each_strategy_holds_before_while_and_after_a_checkpoint() -> None:
    """The glossary's figures, which admission prices: rows' slots, and the tree's, at rest, with one on its way, behind it."""
    held = {}
    for strategy, overlap in STRATEGIES:
        storage = shared_storage(STATEFUL, 1 << 14, strategy, overlap=overlap)
        row = admitted(storage, list(range(10)), 4)
        at_rest = slots(storage)
        step = recorded(storage, row, 8)
        on_its_way = slots(storage)
        advanced(storage, step)
        held[strategy, overlap] = (at_rest, on_its_way, slots(storage))
        assert storage.statistics().chain.owed_units == 0, "a whole state is copied onto each"
        storage.release([row])
        storage.verify_idle()
    assert held == {
        (CheckpointStrategy.NO_BUFFER, False): ((1, 0), (1, 0), (1, 1)),
        (CheckpointStrategy.EXTRA_BUFFER, False): ((2, 0), (2, 0), (2, 1)),
        (CheckpointStrategy.EXTRA_BUFFER, True): ((3, 0), (3, 0), (3, 1)),
        (CheckpointStrategy.EXTRA_BUFFER_LAZY, True): ((2, 0), (3, 0), (2, 1)),
    }


@pytest.mark.requirement("K7", "K8")
@pytest.mark.parametrize(
    ("strategy", "overlap"), STRATEGIES, ids=lambda value: getattr(value, "value", value)
)
def test_a_row_whose_checkpoint_the_tree_had_holds_what_it_does_at_rest(
    strategy: CheckpointStrategy, overlap: bool
) -> None:
    """Two compute one prompt at once: the second keeps its slot, and gives up the one that it took beside it."""
    storage = shared_storage(STATEFUL, 1 << 14, strategy, overlap=overlap)
    prompt = list(range(10))
    rows = storage.admit([10, 10], [4, 4], prompts=[prompt, prompt])
    assert not isinstance(rows, AdmissionRefusal)
    at_rest, _ = slots(storage)
    for row in rows.tolist():
        advanced(storage, recorded(storage, row, 8))
    assert slots(storage) == (at_rest, 1)
    storage.release(rows)
    storage.verify_idle()


@pytest.mark.requirement("K7", "K8")
def test_chunks_are_cut_where_a_checkpoint_serves_most() -> None:
    """On the last point of the grid that they reach, a prompt's last chunk apart; and where the prompt parts from what is known."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    row = admitted(storage, list(range(23)), 1)
    chunks = []
    while count := storage.next_chunk_tokens(row, CHUNK - 1):
        chunks.append(count)
        advanced(storage, recorded(storage, row, count))
    assert chunks == [4, 4, 4, 4, 4, 3]
    storage.release([row])
    # Nine tokens are shared; of the checkpoints the first lies at eight, and goes.
    assert storage._sharing is not None
    storage._sharing.evict_until(lambda units: units["state"] >= 5)
    row = admitted(storage, [*range(9), *range(100, 120)], 1)
    assert storage.requests.cached_tokens[row] == 0
    assert storage.next_chunk_tokens(row, CHUNK) == 8
    storage.release([row])
    with_longer_chunks = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.NO_BUFFER, overlap=False)
    row = admitted(with_longer_chunks, list(range(6)), 1)
    advanced(with_longer_chunks, recorded(with_longer_chunks, row, 6))
    with_longer_chunks.release([row])
    row = admitted(with_longer_chunks, [0, 1, 2, 3, 9, 9, 9, 9, 9], 1)
    assert with_longer_chunks.next_chunk_tokens(row, CHUNK) == 4, "the state at six is of another suffix"


@pytest.mark.requirement("K7", "K8")
def test_a_window_that_was_retired_past_a_shared_prefix_is_kept_where_the_next_prompt_parts() -> None:
    """Long chunks retire windows at once to their ends: of a system prompt nothing would ever be hit, though all of its pages are there."""
    plan = plan_of(FullLifetime(), WindowLifetime(5))
    storage = shared_storage(plan, 1 << 14, CheckpointStrategy.NO_BUFFER, overlap=False)
    cached, chunks = [], []
    for own in range(3):
        row = admitted(storage, [*range(6), *[100 + own] * 7], 1)
        cached.append(int(storage.requests.cached_tokens[row]))
        chunks.append(storage.next_chunk_tokens(row, CHUNK))
        while count := storage.next_chunk_tokens(row, CHUNK):
            advanced(storage, recorded(storage, row, count))
        storage.release([row])
    assert cached == [0, 0, 6]
    assert chunks == [8, 6, 7]
    storage.verify_idle()


@pytest.mark.requirement("K7", "K9")
def test_a_row_with_both_checkpoints_on_their_way_takes_no_slot_that_it_was_not_priced_for() -> None:
    """Two forwards in flight end on the grid: nothing is at hand for a third, which cannot be due before one of them is the tree's."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER_LAZY, overlap=True)
    row = admitted(storage, list(range(14)), 4)
    first, second = recorded(storage, row, 4), recorded(storage, row, 4)
    assert slots(storage) == (3, 0)
    advanced(storage, first)
    third = recorded(storage, row, 4)
    assert slots(storage) == (3, 1)
    advanced(storage, second)
    advanced(storage, third)
    assert slots(storage) == (2, 3)
    storage.release([row])
    storage.verify_idle()


@pytest.mark.requirement("K1", "K9")
def test_each_row_that_gets_no_replacement_is_counted() -> None:
    """They share one take; whoever tunes an arena reads how many checkpoints are at risk, not how many takes fell short."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    rows = [admitted(storage, [mark] * 6, 2) for mark in range(3)]
    step = storage.prepare_step(rows, [4] * 3)
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.record_forward(step)
    take, asked = storage._takes.try_slots, list[int]()

    def one_is_left(count: int) -> IntArray | None:
        asked.append(count)
        return take(count) if asked == [3, 1] else None

    storage._takes.try_slots = one_is_left  # type: ignore[method-assign]  # what fixed units would do
    advanced(storage, step)
    sharing = storage.statistics().sharing
    assert sharing is not None
    assert asked == [3, 1, 1]
    assert dict(sharing.stalled_checkpoints) == {"no replacement slot": 2}
    assert slots(storage) == (4, 3)
    storage.release(rows)
    storage.verify_idle()


@pytest.mark.requirement("K8", "K9")
def test_a_checkpoint_that_is_evicted_for_another_is_served_beside_it() -> None:
    """One row comes to what the tree has, the other's slot is made room for with just that: nobody forgoes what it was promised."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.NO_BUFFER, overlap=False)
    known, new = list(range(5)), list(range(20, 25))
    rows = [admitted(storage, known, 2), admitted(storage, known, 2), admitted(storage, new, 2)]
    advanced(storage, recorded(storage, rows[0], 4))
    storage.release(rows[:1])
    for mark, row in enumerate(rows):
        state_of(storage, row)[:] = 50 + mark
    take, asked = storage._takes.try_slots, list[int]()

    def evicting(count: int) -> IntArray | None:
        assert storage._sharing is not None
        if not asked:
            storage._sharing.evict_until(lambda units: units["state"] >= 1)
        asked.append(count)
        return take(count)

    storage._takes.try_slots = evicting  # type: ignore[method-assign]  # what a full arena would do
    step = storage.prepare_step(rows[1:], [4, 4])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.record_forward(step)
    advanced(storage, step)
    assert asked == [1, 1]
    assert set(kept_state(storage, known).tolist()) == {51}
    assert set(kept_state(storage, new).tolist()) == {52}
    assert slots(storage) == (2, 2)
    storage.release(rows[1:])
    storage.verify_idle()


@pytest.mark.requirement("K7", "K9")
def test_what_one_row_gives_up_another_has_for_its_replacement() -> None:
    """Of two rows in one step the first has a slot too many, the second none: where nothing is free, they need no other."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER_LAZY, overlap=True)
    known = list(range(6))
    rows = [admitted(storage, known, 2), admitted(storage, known, 2), admitted(storage, [9] * 6, 2)]
    advanced(storage, recorded(storage, rows[0], 4))
    take, free, left = storage._takes.try_slots, storage.chain.free_state_slots, 1

    def taking(count: int) -> IntArray | None:
        nonlocal left
        if count > left:
            return None
        left -= count
        return take(count)

    def freeing(slots: IntArray) -> None:
        nonlocal left
        left += len(slots)
        free(slots)

    storage._takes.try_slots = taking  # type: ignore[method-assign]  # what fixed units would do
    storage.chain.free_state_slots = freeing  # type: ignore[method-assign]
    step = storage.prepare_step(rows[1:], [4, 4])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.record_forward(step)
    assert left == 0, "the first row has a second one"
    advanced(storage, step)
    sharing = storage.statistics().sharing
    assert sharing is not None
    assert not any(sharing.stalled_checkpoints.values())
    assert slots(storage) == (6, 2)
    storage.release(rows)
    storage.verify_idle()


@pytest.mark.requirement("H1", "K2", "K8")
def test_rows_that_share_pages_are_backed_up_in_one_call() -> None:
    """Both copies read the same units of the tree, which are under one use, and it ends for all of them."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    first = admitted(storage, list(range(10)), 4)
    advanced(storage, recorded(storage, first, 8))
    second = admitted(storage, [*range(8), 50], 4)
    assert storage.requests.cached_tokens[second] == 8
    assert (storage.requests.pages[first, :4] == storage.requests.pages[second, :4]).all()
    backups = storage.retract_to_host([first, second])
    assert [backup.written_tokens for backup in backups] == [8, 8]
    rows = storage.restore(backups)
    assert not isinstance(rows, AdmissionRefusal)
    storage.release(rows)
    storage.verify_idle()


@pytest.mark.requirement("K1", "K8", "K9")
@pytest.mark.parametrize("at_hand", [3, 1, 0])
def test_rows_that_come_to_one_checkpoint_take_one_slot_for_it(at_hand: int) -> None:
    """Without buffers each slot is taken for the tree: what it would not keep evicts nothing, and is no reason to forgo another's."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.NO_BUFFER, overlap=False)
    one, other, known = list(range(5)), list(range(20, 25)), list(range(40, 45))
    pair = storage.admit([5, 5], [2, 2], prompts=[known, known])
    assert not isinstance(pair, AdmissionRefusal), str(pair)
    advanced(storage, recorded(storage, int(pair[0]), 4))
    storage.release(pair[:1])
    rows = [int(pair[1]), *(admitted(storage, prompt, 2) for prompt in (one, one, other))]
    for mark, row in enumerate(rows):
        state_of(storage, row)[:] = 50 + mark
    asked, take, left = list[int](), storage._takes.try_slots, at_hand

    def taking(count: int) -> IntArray | None:
        nonlocal left
        asked.append(count)
        if count > left:
            return None
        left -= count
        return take(count)

    storage._takes.try_slots = taking  # type: ignore[method-assign]  # what fixed units would do
    step = storage.prepare_step(rows, [4] * 4)
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.record_forward(step)
    advanced(storage, step, 7)
    new = min(at_hand, 2)
    assert asked == {3: [2], 1: [2, 1], 0: [2, 1]}[at_hand]
    assert slots(storage) == (4, 1 + new)
    sharing = storage.statistics().sharing
    assert sharing is not None
    assert sharing.stalled_checkpoints.get("no tracking slot", 0) == {3: 0, 1: 1, 0: 3}[at_hand]
    # Whoever was served names the tree's pages, and has given its own back.
    assert sharing.held_units["full"] == 2 * (1 + new)
    assert storage._sharing is not None
    assert storage.requests.pages[rows[0], 0] == storage._sharing.tree.match(known).node.pages[0]
    assert (storage.requests.pages[rows[1], 0] == storage.requests.pages[rows[2], 0]) == (at_hand > 0)
    if at_hand:
        assert set(kept_state(storage, one).tolist()) == {51}
    if at_hand > 1:
        assert set(kept_state(storage, other).tolist()) == {53}
    storage.release(rows)
    storage.verify_idle()


@pytest.mark.requirement("K9")
@pytest.mark.parametrize("state_slots_needed", ["by requests", "by the tree"])
def test_a_chunk_that_meets_the_grid_finds_a_slot_though_all_are_taken(state_slots_needed: str) -> None:
    """Two slots a row are promised, so requests never hold them all; and the tree's are evicted, locked prefixes or not."""
    strategy = CheckpointStrategy.EXTRA_BUFFER_LAZY
    storage = shared_storage(STATEFUL, arena_bytes(STATEFUL, strategy, True), strategy, overlap=True)
    first = admitted(storage, list(range(16)), 4)
    for _ in range(2):
        advanced(storage, recorded(storage, first, 8))
    rows = [first]
    if state_slots_needed == "by requests":
        rows.append(admitted(storage, list(range(50, 66)), 4))
    else:
        rows.append(admitted(storage, [*range(16), 99], 4))
        assert storage.requests.cached_tokens[rows[1]] == 16
    while True:
        more = storage.admit([8], [1], prompts=[list(range(200, 208))])
        if isinstance(more, AdmissionRefusal):
            break
        rows.append(int(more[0]))
    for row in rows[1:]:
        while count := storage.next_chunk_tokens(row, CHUNK):
            advanced(storage, recorded(storage, row, count), 7)
    for token in range(3):
        advanced(storage, recorded(storage, first, 1), token)
    sharing = storage.statistics().sharing
    assert sharing is not None
    assert not any(sharing.stalled_checkpoints.values())
    storage.release(rows)
    storage.verify_idle()


@pytest.mark.requirement("K9", "K7")
@pytest.mark.parametrize(
    ("strategy", "overlap"), STRATEGIES[1:], ids=lambda value: getattr(value, "value", value)
)
@pytest.mark.parametrize("plan_name", ["full, two windows, state", "a window and state"])
def test_a_row_holds_no_more_than_it_was_priced_for_when_checkpoints_stall(
    plan_name: str, strategy: CheckpointStrategy, overlap: bool
) -> None:
    """Both stalls, at random, on an arena that has no room to spare: no tracking slot when one is due, no replacement when the tree takes it.

    `check_books` compares what each row holds with its promise after every step, and no later take may be refused.
    """
    plan, stalls = PLANS[plan_name], set[str]()
    for seed in range(2):
        storage = shared_storage(plan, arena_bytes(plan, strategy, overlap), strategy, overlap=overlap)
        draw, take = random.Random(seed), storage._takes.try_slots

        def stalling(count: int, draw: random.Random = draw, take=take) -> IntArray | None:  # type: ignore[no-untyped-def]
            return None if draw.random() < 0.6 else take(count)

        storage._takes.try_slots = stalling  # type: ignore[method-assign]  # what fixed units would do
        world = SharingWorld(storage, seed)
        world.run(80)
        assert not world.refused_steps
        sharing = storage.statistics().sharing
        assert sharing is not None
        stalls |= {reason for reason, count in sharing.stalled_checkpoints.items() if count}
    assert stalls == {"no tracking slot", "no replacement slot"}


@pytest.mark.requirement("K8", "K9")
@pytest.mark.parametrize(
    ("strategy", "overlap"), STRATEGIES, ids=lambda value: getattr(value, "value", value)
)
def test_requests_that_are_admitted_together_start_from_one_checkpoint(
    strategy: CheckpointStrategy, overlap: bool
) -> None:
    """A burst behind one system prompt: each gets its own copy, and the checkpoint is nobody's need behind the call that copied it."""
    storage = shared_storage(STATEFUL, 1 << 14, strategy, overlap=overlap)
    prompt = list(range(9))
    row = admitted(storage, prompt, 1)
    advanced(storage, recorded(storage, row, 8))
    state_of(storage, row)[:] = 77
    kept_state(storage, prompt)[:] = 8
    rows = storage.admit([9, 9, 9], [1, 1, 1], prompts=[prompt, prompt, [*prompt[:8], 50]])
    assert not isinstance(rows, AdmissionRefusal), str(rows)
    assert storage.requests.cached_tokens[rows].tolist() == [8, 8, 8]
    assert [set(state_of(storage, each).tolist()) for each in rows.tolist()] == [{8}] * 3
    assert storage._sharing is not None
    assert storage._sharing.tree.statistics().needed_units["state"] == 0
    storage.release([row, *rows])
    storage.verify_idle()


@pytest.mark.requirement("K8")
def test_a_request_that_was_retracted_finds_what_it_had_computed() -> None:
    """Its memory goes, as far as it is needed; what is not stays in the tree until then."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    prompt = list(range(12))
    row = admitted(storage, prompt, 8)
    advanced(storage, recorded(storage, row, 8))
    advanced(storage, recorded(storage, row, 4), 50)
    for token in (51, 52, 53, 54):
        advanced(storage, recorded(storage, row, 1), token)
    storage.retract([row])
    row = admitted(storage, [*prompt, 50, 51, 52, 53, 54], 3)
    assert storage.requests.cached_tokens[row] == 16
    storage.release([row])
    storage.verify_idle()


@pytest.mark.requirement("K8")
def test_what_the_storage_was_not_told_is_not_handed_over() -> None:
    """A scheduler that keeps its tokens to itself shares prompts, and nothing behind them is taken for something else."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    row = admitted(storage, list(range(8)), 10)
    advanced(storage, recorded(storage, row, 8))
    for _ in range(8):
        step = recorded(storage, row, 1)
        storage.forward_processed(step)
        storage.advance(step)
    assert slots(storage) == (2, 1)
    storage.release([row])
    row = admitted(storage, [*range(8), *[0] * 8, 1], 1)
    assert storage.requests.cached_tokens[row] == 8
    storage.release([row])
    storage.verify_idle()


@pytest.mark.requirement("K8", "S5")
def test_a_stage_without_states_restores_what_the_others_can() -> None:
    """Its own memory would do for a hit at any page; the states that another stage holds lie on the grid."""
    plan = plan_of(FullLifetime(), WindowLifetime(5))
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER, checkpoint_interval=GRID)
    storage = shared_storage(plan, 1 << 14, policy.strategy, overlap=False, policy=policy)
    row = admitted(storage, list(range(14)), 1)
    while count := storage.next_chunk_tokens(row, CHUNK):
        advanced(storage, recorded(storage, row, count))
    storage.release([row])
    row = admitted(storage, list(range(11)), 1)
    assert storage.requests.cached_tokens[row] == 8
    storage.release([row])
    storage.verify_idle()


def test_prompts_that_do_not_go_together_are_refused() -> None:
    """Before anything is locked."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    with pytest.raises(StorageError, match=r"prompts of \[3\] tokens as \[4\]"):
        storage.admit([4], [1], prompts=[[1, 2, 3]])
    with pytest.raises(StorageError, match="1 prompts by 2 extra keys"):
        storage.admit([3], [1], prompts=[[1, 2, 3]], extra_keys=["a", "b"])
    with pytest.raises(StorageError, match="without the prompts' tokens"):
        storage.admit([3], [1], extra_keys=["a"])
    rows = storage.admit([3], [1])
    assert not isinstance(rows, AdmissionRefusal)
    assert not storage.requests.cached_tokens[rows].any()
    storage.release(rows)
    storage.verify_idle()


@pytest.mark.requirement("K5", "K8", "L4")
@pytest.mark.parametrize(
    ("band", "begins"),
    [
        ("full", "before"),
        ("window-5", "before"),
        ("full", "after"),
        ("window-5", "after"),
        ("state", "after"),
    ],
)
def test_what_a_send_reads_cannot_be_evicted_until_it_is_over(band: str, begins: str) -> None:
    """Begun while it was a request's, or once it was the tree's; all that the node holds stays in the books, and comes free behind it."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.NO_BUFFER, overlap=False)
    row = admitted(storage, list(range(8)), 1)
    step = recorded(storage, row, 8)
    units, send = storage.requests.pages[row, 3:4].astype(np.int64), NetworkTransfer("send", Access.READ)
    if begins == "before":
        storage.chain.uses.begin(send, {band: units})
        # Somebody asks while the tree has nothing of it.
        storage.statistics()
    advanced(storage, step)
    storage.release([row])
    if begins == "after":
        assert storage._sharing is not None
        slot = storage._sharing.tree.match(list(range(8))).node.state
        storage.chain.uses.begin(send, {band: np.array([slot]) if band == "state" else units})
    sharing = storage.statistics().sharing
    assert sharing is not None
    kept = {name: sharing.held_units[name] - sharing.evictable_units[name] for name in sharing.held_units}
    assert kept["full"] == 4, "no leaf goes without what it holds"
    assert kept[band] >= 1
    assert kept["state"] == (band == "state")
    storage.verify_idle()
    evict_all(storage)
    sharing = storage.statistics().sharing
    assert sharing is not None
    assert sharing.held_units == kept
    storage.chain.uses.end(send)
    assert_nothing_is_needed(storage)
    evict_all(storage)
    assert not any(band.live_units for band in storage.chain.statistics().bands)


def evict_all(storage: KVStorage) -> None:
    """All that could go."""
    assert storage._sharing is not None
    evictable = storage._sharing.evictable_units()
    storage._sharing.evict_until(lambda units: all(units[name] >= evictable[name] for name in evictable))


def no_buffer_row_of_four_tokens(*, is_told: bool = True) -> tuple[KVStorage, int]:
    """A row that keeps its state in its running slot alone, which would go over at its end; the fifth token is told, or kept."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.NO_BUFFER, overlap=False)
    row = admitted(storage, [0, 1, 2], 8)
    advanced(storage, recorded(storage, row, 3), 3)
    state_of(storage, row)[:] = 4
    advanced(storage, recorded(storage, row, 1), 4 if is_told else -1)
    return storage, row


def state_given(storage: KVStorage, prompt: list[int]) -> tuple[int, int]:
    """What a new request is given of a prompt: the length that its state is said to have seen, and the one that it has."""
    row = admitted(storage, prompt, 1)
    return int(storage.requests.cached_tokens[row]), int(state_of(storage, row)[0])


@pytest.mark.requirement("K7", "K8")
def test_a_running_slot_goes_over_at_the_end_of_its_request() -> None:
    """What the next three tests take away."""
    storage, row = no_buffer_row_of_four_tokens()
    storage.release([row])
    assert state_given(storage, [0, 1, 2, 3, 9]) == (4, 4)


@pytest.mark.requirement("K7", "K8")
def test_a_state_that_a_queued_forward_advances_is_not_handed_over() -> None:
    """A client goes while its forward runs: the slot will hold the state of five tokens, whatever the host has counted."""
    storage, row = no_buffer_row_of_four_tokens()
    state_of(storage, row)[:] = 5
    step = recorded(storage, row, 1)
    storage.release([row])
    assert state_given(storage, [0, 1, 2, 3, 9]) == (0, 0)
    storage.forward_processed(step)


@pytest.mark.requirement("K7", "K8")
def test_a_state_of_more_tokens_than_were_told_is_not_handed_over() -> None:
    """The scheduler has kept the fifth token to itself; the state has seen it."""
    storage, row = no_buffer_row_of_four_tokens(is_told=False)
    state_of(storage, row)[:] = 5
    advanced(storage, recorded(storage, row, 1))
    storage.release([row])
    assert state_given(storage, [0, 1, 2, 3, 9]) == (0, 0)


@pytest.mark.requirement("K7", "K8", "K11")
@pytest.mark.parametrize(
    ("strategy", "overlap"), STRATEGIES, ids=lambda value: getattr(value, "value", value)
)
def test_a_state_whose_copy_failed_is_nobodys_checkpoint(
    strategy: CheckpointStrategy, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler may go on behind the error: the slot holds whatever it held, and would stand for a prefix; it is in the books, and the
    next checkpoint goes over.
    """
    storage = shared_storage(STATEFUL, 1 << 14, strategy, overlap=overlap)
    row = admitted(storage, list(range(10)), 4)
    step = storage.prepare_step([row], [4])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)

    def fail(*_: object) -> None:
        raise RuntimeError("the device has fallen off the bus")

    copies_when_recorded = strategy is not CheckpointStrategy.NO_BUFFER
    if not copies_when_recorded:
        storage.record_forward(step)
    with monkeypatch.context() as patch:
        patch.setattr(storage.chain, "copy_state_slots", fail)
        with pytest.raises(RuntimeError, match="fallen off the bus"):
            storage.record_forward(step) if copies_when_recorded else advanced(storage, step)
    if copies_when_recorded:
        advanced(storage, step)
    assert slots(storage)[1] == 0
    state_of(storage, row)[:] = 8
    advanced(storage, recorded(storage, row, 4))
    assert slots(storage)[1] == 1
    assert set(kept_state(storage, list(range(8))).tolist()) == {8}
    live = {band.name: band.live_units for band in storage.chain.statistics().bands}
    assert live["state"] == sum(slots(storage))
    storage.release([row])
    storage.verify_idle()


def launched(storage: KVStorage, rows: list[int], count: int, *states: int) -> PreparedStep:
    """A forward of these rows, which fills their running states, and is not recorded yet."""
    step = storage.prepare_step(rows, [count] * len(rows))
    assert isinstance(step, PreparedStep), str(step)
    storage.launch_forward(step)
    for row, state in zip(rows, states, strict=True):
        state_of(storage, row)[:] = state
    return step


def failing(*_: object, **__: object) -> None:
    raise RuntimeError("the device has fallen off the bus")


@pytest.mark.requirement("K7", "K8", "K11")
def test_of_two_checkpoints_on_their_way_the_one_whose_copy_failed_is_forgone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The earlier one is whole and goes over; in its stead the later one's slot would stand for a prefix with anybody's bytes."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER_LAZY, overlap=True)
    prompt = list(range(10))
    row = admitted(storage, prompt, 3)
    first = launched(storage, [row], 4, 44)
    storage.record_forward(first)
    second = launched(storage, [row], 4, 88)
    with monkeypatch.context() as patch:
        patch.setattr(storage.chain, "copy_state_slots", failing)
        with pytest.raises(RuntimeError, match="fallen off the bus"):
            storage.record_forward(second)
    advanced(storage, first)
    advanced(storage, second)
    storage.release([row])
    assert state_given(storage, prompt) == (4, 44)


@pytest.mark.requirement("K7", "K8", "K11")
def test_a_failed_copy_takes_nothing_from_a_row_that_was_to_copy_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was forgone for want of a slot, and has an earlier checkpoint on its way, whose copy has long been queued."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER_LAZY, overlap=True)
    prompt = list(range(10))
    with monkeypatch.context() as patch:
        patch.setattr(storage._takes, "try_slots", lambda _: None)  # what fixed units would do
        row = admitted(storage, prompt, 3)
        first = launched(storage, [row], 4, 44)
        storage.record_forward(first)
        other = admitted(storage, [90] * 10, 3)
        both = launched(storage, [row, other], 4, 88, 99)
        patch.setattr(storage.chain, "copy_state_slots", failing)
        with pytest.raises(RuntimeError, match="fallen off the bus"):
            storage.record_forward(both)
    advanced(storage, first)
    advanced(storage, both)
    storage.release([row, other])
    assert state_given(storage, prompt) == (4, 44)


@pytest.mark.requirement("K7", "K8", "K11")
def test_a_checkpoint_is_copied_before_the_slot_of_the_next_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second slot of a row may be what fails: a slot that is on its way by then, and has nothing in it, would be served."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER_LAZY, overlap=True)
    prompt = list(range(10))
    row = admitted(storage, prompt, 3)
    step = launched(storage, [row], 4, 44)
    with monkeypatch.context() as patch:
        patch.setattr(storage._takes, "try_slots", failing)
        with pytest.raises(RuntimeError, match="fallen off the bus"):
            storage.record_forward(step)
    live = {band.name: band.live_units for band in storage.chain.statistics().bands}
    assert live["state"] == sum(slots(storage))
    advanced(storage, step)
    storage.release([row])
    assert state_given(storage, prompt) == (4, 44)


@pytest.mark.requirement("K7", "K8")
def test_rows_come_to_one_checkpoint_from_wherever_their_hits_end() -> None:
    """One began before the tree knew the prefix, one behind a hit: it is one checkpoint, with one slot. Another extra key's is another."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.NO_BUFFER, overlap=False)
    prompt = list(range(11))
    rows = storage.admit([11, 11], [3, 3], prompts=[prompt, prompt], extra_keys=[None, "x"])
    assert not isinstance(rows, AdmissionRefusal), str(rows)
    first = admitted(storage, prompt[:5], 1)
    step = launched(storage, [first], 4, 33)
    storage.record_forward(step)
    advanced(storage, step)
    storage.release([first])
    hit = admitted(storage, prompt, 3)
    assert storage.requests.cached_tokens[hit] == 4
    step = storage.prepare_step([*rows, hit], [8, 8, 4])
    assert isinstance(step, PreparedStep), str(step)
    storage.launch_forward(step)
    for row, state in zip([*rows.tolist(), hit], (51, 52, 53), strict=True):
        state_of(storage, row)[:] = state
    storage.record_forward(step)
    asked, take = list[int](), storage._takes.try_slots

    def taking(count: int) -> IntArray | None:
        asked.append(count)
        return take(count)

    storage._takes.try_slots = taking  # type: ignore[method-assign]
    advanced(storage, step, 7)
    assert asked == [2]
    assert set(kept_state(storage, prompt[:8]).tolist()) == {51}
    assert slots(storage) == (3, 3)
    storage.release([*rows, hit])
    storage.verify_idle()


@pytest.mark.requirement("K8", "K11")
def test_slots_for_checkpoints_are_nobodys_where_others_cannot_be_taken() -> None:
    """The first take is served and evicts what another row comes to, and the take for that one fails: the first is freed."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.NO_BUFFER, overlap=False)
    known, new = list(range(5)), list(range(20, 25))
    rows = [admitted(storage, known, 2), admitted(storage, known, 2), admitted(storage, new, 2)]
    advanced(storage, recorded(storage, rows[0], 4))
    storage.release(rows[:1])
    step = storage.prepare_step(rows[1:], [4, 4])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.record_forward(step)
    take, asked = storage._takes.try_slots, list[int]()

    def evicting_once(count: int) -> IntArray | None:
        asked.append(count)
        if len(asked) > 1:
            failing()
        assert storage._sharing is not None
        storage._sharing.evict_until(lambda units: units["state"] >= 1)
        return take(count)

    storage._takes.try_slots = evicting_once  # type: ignore[method-assign]  # what a full arena would do
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        advanced(storage, step)
    assert asked == [1, 1]
    live = {band.name: band.live_units for band in storage.chain.statistics().bands}
    assert live["state"] == sum(slots(storage))
    storage.release(rows[1:])
    storage.verify_idle()


@pytest.mark.requirement("K8", "K11")
def test_a_slot_that_the_tree_would_not_have_is_freed_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked, and had none there: whatever is wrong, no row has the slot in its books, and nobody else would free it."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.NO_BUFFER, overlap=False)
    row = admitted(storage, list(range(5)), 2)
    step = recorded(storage, row, 4)
    assert storage._sharing is not None
    with monkeypatch.context() as patch:
        patch.setattr(storage._sharing._pages, "hand_over", lambda *_: False)
        with pytest.raises(AssertionError, match="the tree has it by now, or has not"):
            advanced(storage, step)
    live = {band.name: band.live_units for band in storage.chain.statistics().bands}
    assert live["state"] == sum(slots(storage)) == 1
    storage.release([row])
    storage.verify_idle()


@pytest.mark.requirement("K1", "K7", "K8")
@pytest.mark.parametrize("may_have_run", [False, True])
def test_a_state_behind_an_aborted_launch_is_not_handed_over(may_have_run: bool) -> None:
    """Some of its layers may be queued, and only the one who queued them can know."""
    storage, row = no_buffer_row_of_four_tokens()
    step = storage.prepare_step([row], [1])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    state_of(storage, row)[:] = 5
    storage.abandon(step, may_have_run=may_have_run)
    storage.release([row])
    assert state_given(storage, [0, 1, 2, 3, 9]) == (0, 0)


@pytest.mark.requirement("K1", "K7", "K8")
def test_a_launch_that_changed_nothing_is_tried_again_and_its_state_goes_over() -> None:
    """The caller vouches for it; and once a forward is recorded the state is known again."""
    storage, row = no_buffer_row_of_four_tokens()
    for _ in range(2):
        step = storage.prepare_step([row], [1])
        assert isinstance(step, PreparedStep)
        storage.launch_forward(step)
        storage.abandon(step)
    for token in (5, 6):
        state_of(storage, row)[:] = token
        advanced(storage, recorded(storage, row, 1), token)
    storage.release([row])
    assert state_given(storage, [0, 1, 2, 3, 4, 5, 9]) == (6, 6)


@pytest.mark.requirement("K1", "K7", "K8")
@pytest.mark.parametrize("shares", [True, False])
def test_a_row_whose_state_an_aborted_launch_may_have_changed_computes_nothing_from_it(shares: bool) -> None:
    """Out of memory behind its first layers: tried again, it would count its tokens twice, and at the grid others would hit that."""
    strategy = CheckpointStrategy.EXTRA_BUFFER if shares else CheckpointStrategy.NONE
    storage = shared_storage(STATEFUL, 1 << 14, strategy, overlap=True)
    prompt = list(range(12))
    rows = storage.admit([12], [2], prompts=[prompt]) if shares else storage.admit([12], [2])
    assert not isinstance(rows, AdmissionRefusal)
    row = int(rows[0])
    state_of(storage, row)[:] = 8
    first = recorded(storage, row, 8)
    step = storage.prepare_step([row], [4])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    state_of(storage, row)[:] = 12
    storage.abandon(step, may_have_run=True)
    with pytest.raises(StorageError, match=rf"rows \[{row}\]: the forward of an aborted launch.*retract"):
        storage.prepare_step([row], [4])
    advanced(storage, first)
    storage.retract([row])
    assert state_given(storage, prompt) == ((8, 8) if shares else (0, 0))
    again = int(storage.requests.live_rows()[0])
    advanced(storage, recorded(storage, again, 4 if shares else 8))
    storage.verify_idle()


@pytest.mark.requirement("K1")
def test_a_launch_that_has_written_nothing_but_entries_is_tried_again() -> None:
    """Whatever was written of its tokens is written once more. What a model without states may leave changed is the row state."""
    storage = shared_storage(plan_of(FullLifetime()), 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    row = admitted(storage, list(range(9)), 1)
    for may_have_run in (False, True):
        step = storage.prepare_step([row], [8])
        assert isinstance(step, PreparedStep)
        storage.launch_forward(step)
        storage.abandon(step, may_have_run=may_have_run)
    with pytest.raises(StorageError, match=rf"rows \[{row}\]: the forward of an aborted launch.*retract"):
        storage.prepare_step([row], [8])
    storage.release([row])
    row = admitted(storage, list(range(9)), 1)
    step = storage.prepare_step([row], [8])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step)
    storage.abandon(step)
    advanced(storage, recorded(storage, row, 8))
    storage.release([row])
    assert int(storage.requests.cached_tokens[admitted(storage, list(range(9)), 1)]) == 8


@pytest.mark.requirement("K5", "K8", "K11")
@pytest.mark.parametrize(
    ("prompts", "outputs", "keys", "text"),
    [
        ([list(range(9))], [0], None, "output_tokens must be a positive integer"),
        ([list(range(9)), []], [1, 1], None, "prompt_tokens must be a positive integer"),
        ([list(range(9))] * 2, [1, 1], [None, ["x"]], "extra key"),
    ],
)
def test_an_admission_that_is_called_wrongly_keeps_nothing(
    prompts: list[list[int]], outputs: list[int], keys: list[Hashable] | None, text: str
) -> None:
    """One caller's mistake would lock a hit for ever, and in the end nobody could be admitted."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    row = admitted(storage, list(range(9)), 1)
    advanced(storage, recorded(storage, row, 8))
    storage.release([row])
    with pytest.raises(StorageError, match=text):
        storage.admit([len(prompt) for prompt in prompts], outputs, prompts=prompts, extra_keys=keys)
    assert_nothing_is_needed(storage)


@pytest.mark.requirement("K5", "K8", "K11")
@pytest.mark.parametrize("verb", ["take", "copy_state_slots"])
def test_an_admission_that_fails_half_way_keeps_nothing(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises behind the lock, the lock, the slots and the rows go with it."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    row = admitted(storage, list(range(9)), 1)
    advanced(storage, recorded(storage, row, 8))
    storage.release([row])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device has gone")

    with monkeypatch.context() as patch:
        patch.setattr(storage.chain, verb, fail)
        with pytest.raises(RuntimeError, match="has gone"):
            storage.admit([9], [1], prompts=[list(range(9))])
    assert_nothing_is_needed(storage)


def assert_nothing_is_needed(storage: KVStorage) -> None:
    sharing = storage.statistics().sharing
    assert sharing is not None
    assert sharing.evictable_units == sharing.held_units
    assert storage.statistics().rows_in_use == 0
    storage.verify_idle()


@pytest.mark.requirement("K8", "K11")
@pytest.mark.parametrize("is_hit", [False, True])
def test_a_lock_that_nobody_has_is_found_at_idle(is_hit: bool) -> None:
    """The books agree with it, and so does every count of units; only who is to end it is missing."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
    row = admitted(storage, list(range(9)), 1)
    advanced(storage, recorded(storage, row, 8))
    storage.release([row])
    storage.verify_idle()
    assert storage._sharing is not None
    storage._sharing.lock([np.arange(9 if is_hit else 0)], [None])
    with pytest.raises(InvariantError, match=r"tree\.locks"):
        storage.verify_idle()


@pytest.mark.requirement("K8", "K9")
def test_a_state_never_stands_for_the_checkpoint_before_it_that_was_forgone() -> None:
    """The later state is on its way when the earlier forward is advanced over: it must wait for its own."""
    storage = shared_storage(STATEFUL, 1 << 14, CheckpointStrategy.EXTRA_BUFFER_LAZY, overlap=True)
    prompt = list(range(32))
    row = admitted(storage, prompt, 1)
    take = storage._takes.try_slots
    storage._takes.try_slots = lambda _: None  # type: ignore[method-assign]  # what fixed units would do
    advanced(storage, recorded(storage, row, 8))
    forgone = recorded(storage, row, 8)
    storage._takes.try_slots = take  # type: ignore[method-assign]
    later = recorded(storage, row, 8)
    advanced(storage, forgone)
    assert slots(storage) == (3, 1)
    advanced(storage, later)
    assert slots(storage) == (2, 2)
    storage.release([row])
    for length, cached in ((17, 8), (25, 24)):
        row = admitted(storage, prompt[:length], 1)
        assert storage.requests.cached_tokens[row] == cached
        storage.release([row])
    sharing = storage.statistics().sharing
    assert sharing is not None
    assert sharing.stalled_checkpoints == {"no replacement slot": 1, "no tracking slot": 1}


@pytest.mark.requirement("K5", "K8")
@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside others"])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_hit_is_passed_over_only_where_its_checkpoint_is_in_the_way(has_state: bool, others: bool) -> None:
    """The tail of its window is part of its promise, so with a hit a request fits wherever it does without. A checkpoint is needed until it
    is copied: its request is admitted without rather than turned away, and rather than waiting for others.
    """
    plan = plan_of(FullLifetime(), WindowLifetime(13), has_state=has_state)
    strategy = CheckpointStrategy.NO_BUFFER
    room = arena_bytes(plan, strategy, overlap=False)
    storage = shared_storage(plan, room, strategy, overlap=False)
    prompt, had = list(range(19)), list[tuple[int, int | None]]()
    row = admitted(storage, [*prompt, 90], 10)
    for count in (8, 8, 2, 2):
        advanced(storage, recorded(storage, row, count))
    storage.release([row])
    if others:
        admitted(storage, [77], 2)
    sharing = storage._sharing
    assert sharing is not None
    while True:
        known = sharing.tree.match(prompt).hit_pages * PAGE
        rows = storage.admit([30], [4], prompts=[[*prompt, *range(40, 51)]])
        if isinstance(rows, AdmissionRefusal):
            assert rows.is_final != others
            break
        had.append((known, int(storage.requests.cached_tokens[rows[0]])))
        storage.release(rows)
        # Somebody's: neither a row's nor the tree's.
        if isinstance(storage.chain.take(pages=1), TakeRefusal):
            sharing.evict_until(lambda units: units["full"] >= 1)
            storage.chain.take(pages=1)
    assert had[0] == (18, 18)
    assert had[-1][0] == 18, "it was there to the end"
    assert ((18, 0) in had) == has_state


@pytest.mark.requirement("K8")
@pytest.mark.parametrize("is_admitted", [False, True], ids=["refused", "admitted"])
def test_a_hit_counts_as_used_if_its_request_is_admitted(is_admitted: bool) -> None:
    """What admission is asked for again and again would else look more wanted than what is used; and what is used must look so."""
    plan, strategy = plan_of(FullLifetime()), CheckpointStrategy.NO_BUFFER
    storage = shared_storage(plan, arena_bytes(plan, strategy, overlap=False), strategy, overlap=False)
    for own in (10, 50):
        row = admitted(storage, list(range(own, own + 9)), 1)
        for count in (8, 1):
            advanced(storage, recorded(storage, row, count))
        storage.release([row])
    prompt = [*range(10, 18), 1, 1, 1]
    held = [] if is_admitted else [admitted(storage, [number] * 20, 20) for number in (1, 2)]
    rows = storage.admit([11], [9], prompts=[prompt])
    assert isinstance(rows, AdmissionRefusal) != is_admitted
    if not isinstance(rows, AdmissionRefusal):
        held += rows.tolist()
    storage.release(held)
    sharing = storage._sharing
    assert sharing is not None
    sharing.evict_until(lambda units: units["full"] >= 4)
    known = {own: sharing.tree.match(list(range(own, own + 8))).hit_pages for own in (10, 50)}
    assert known == ({10: 4, 50: 0} if is_admitted else {10: 0, 50: 4})


def with_a_known_prefix(page_count: int, lost: int, *, is_sent: bool) -> KVStorage:
    """So many pages of full attention. Eight are the tree's, of tokens 0 to 15; a send may read them for ever; `lost` are nobody's."""
    plan, strategy = plan_of(FullLifetime()), CheckpointStrategy.NO_BUFFER
    large = shared_storage(plan, 1 << 16, strategy, overlap=False)
    room = large.layout.prefix_bytes + page_count * plan.sub_pools[0].unit.unit_bytes
    storage = shared_storage(plan, room, strategy, overlap=False)
    row = admitted(storage, list(range(17)), 1)
    for count in (8, 8, 1):
        advanced(storage, recorded(storage, row, count))
    if is_sent:
        pages = storage.requests.pages[row, :8].astype(np.int64)
        storage.chain.uses.begin(NetworkTransfer("send", Access.READ), {"full": pages})
    storage.release([row])
    assert isinstance(storage.chain.take(pages=lost), Taken)
    return storage


@pytest.mark.requirement("K5", "K8")
@pytest.mark.parametrize("is_sent", [False, True])
def test_of_requests_together_none_is_turned_away_for_what_another_was_given(is_sent: bool) -> None:
    """The first fits alone: only without the second one's hit, or, where a send keeps the prefix, only with its own."""
    known = list(range(16))
    if is_sent:
        storage, prompts = with_a_known_prefix(24, 2, is_sent=True), [[*known, 20], [90] * 5]
    else:
        storage, prompts = with_a_known_prefix(30, 3, is_sent=False), [[91] * 17, [*known, 20]]
    outputs = [23, 2]
    refusal = storage.admit([len(prompt) for prompt in prompts], outputs, prompts=prompts)
    assert isinstance(refusal, AdmissionRefusal)
    assert not refusal.is_final
    assert not refusal.waits_for
    assert refusal.first_that_fit == 1
    rows = storage.admit([len(prompts[0])], outputs[:1], prompts=prompts[:1])
    assert not isinstance(rows, AdmissionRefusal), str(rows)


def named_and_not_bound(storage: KVStorage, row: int) -> list[int]:
    """Pages that a row names and that no band binds: their ids are the chain's to hand out again."""
    pages = storage.requests.pages[row]
    named = pages[pages > 0].astype(np.int64)
    bound = [storage.chain.physical_units(band.name, named) > 0 for band in storage.layout.bands]
    return named[~np.logical_or.reduce(bound)].tolist()


@pytest.mark.requirement("K2", "K8")
def test_a_row_names_no_page_whose_id_may_be_another_s() -> None:
    """Without full attention the tree lets go of a page with its id: no column may name it once its row needs it no more, be it that the
    row began with it, computed it and handed it over, or moved on.
    """
    plan, prompt = plan_of(WindowLifetime(7), WindowLifetime(3)), list(range(24))
    for evicts in (True, False):
        storage = shared_storage(plan, 1 << 14, CheckpointStrategy.EXTRA_BUFFER, overlap=False)
        row = admitted(storage, prompt, 8)
        for length in range(4, 25, 4):
            advanced(storage, recorded(storage, row, 4), 24 if length == 24 else -1)
            if evicts:
                evict_all(storage)
                assert not named_and_not_bound(storage, row)
        storage.release([row])
        assert not storage.requests.pages[row].any()
        storage.verify_idle()
    row = admitted(storage, [*prompt[:20], 0, 0], 8)
    assert storage.requests.cached_tokens[row] == 20
    evict_all(storage)
    assert not named_and_not_bound(storage, row)
    for token in range(-1, 6):
        advanced(storage, recorded(storage, row, 2 if token < 0 else 1), token + 1)
        evict_all(storage)
        assert not named_and_not_bound(storage, row)
    storage.release([row])
    # Computed again in longer chunks, and given up for what the tree has of it.
    first, second = (admitted(storage, [50, *prompt], 8) for _ in range(2))
    for _ in range(6):
        advanced(storage, recorded(storage, first, 4))
    for _ in range(3):
        advanced(storage, recorded(storage, second, 8))
        evict_all(storage)
        assert not named_and_not_bound(storage, second)
