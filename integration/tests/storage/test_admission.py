"""Verdicts of the real storage: who is admitted with what, who waits for what, who is turned away (K5, K6, S5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvtide.chain import Taken
from kvtide.device import IntArray
from kvtide.ledger import Access, HostCopy, InvariantError
from kvtide.sizing import ChunkReads, ServingPolicy, SizingError
from kvtide.storage import (
    AdmissionRefusal,
    KVStorage,
    PreparedStep,
    StorageError,
    WillFree,
    build_kv_storage,
)
from kvtide.storage.prices import Hits

from .test_storage import CHUNK_TOKENS, MODELS, SCRATCH_BYTES, plan_of
from .tiny import tiny_plan, tiny_storage

POLICIES = [
    ServingPolicy(overlap=overlap, chunk_reads=reads) for overlap in (False, True) for reads in ChunkReads
]


def rows_of(verdict: IntArray | AdmissionRefusal) -> IntArray:
    assert not isinstance(verdict, AdmissionRefusal), f"{verdict}"
    return verdict


def refused(verdict: IntArray | AdmissionRefusal) -> AdmissionRefusal:
    assert isinstance(verdict, AdmissionRefusal)
    return verdict


def step(storage: KVStorage, row: int, tokens: int) -> None:
    """One forward over one row, to its end."""
    prepared = storage.prepare_step([row], [tokens])
    assert isinstance(prepared, PreparedStep), f"{prepared}"
    storage.launch_forward(prepared)
    storage.record_forward(prepared)
    storage.forward_processed(prepared)
    storage.advance(prepared)


@pytest.mark.requirement("K5", "S5", "K7", "K11")
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_take_of_an_admitted_request_is_refused(data: st.DataObject) -> None:
    """Whatever was admitted, in whatever order its chunks, decode steps, retirements and releases come, in whatever policy, beside
    units that a failed transfer holds: `verify_idle` asks after each whether all that is outstanding could be laid out.
    """
    plan = plan_of(**data.draw(st.sampled_from(MODELS)), page_tokens=data.draw(st.sampled_from([1, 2, 4])))
    policy = data.draw(st.sampled_from(POLICIES))
    try:
        storage = build_kv_storage(
            plan,
            budget_bytes=SCRATCH_BYTES + data.draw(st.integers(4_000, 14_000)),
            max_running_requests=6,
            max_context_tokens=64,
            chunk_tokens=CHUNK_TOKENS,
            policy=policy,
            writes_whole_pages=data.draw(st.booleans()),
        )
    except SizingError:
        return
    if data.draw(st.booleans()):
        quarantine(storage, data.draw(st.integers(1, 5)))
    open_steps: list[PreparedStep] = []
    for _ in range(data.draw(st.integers(5, 40))):
        live = storage.requests.live_rows()
        action = data.draw(st.sampled_from(["admit", "step", "step", "step", "process", "release"]))
        if action == "admit":
            storage.admit([data.draw(st.integers(1, 40))], [data.draw(st.integers(1, 20))])
        elif action == "step" and len(open_steps) < (2 if policy.overlap else 1):
            ready = live[storage.requests.prepared[live] < storage.requests.limits[live]]
            chosen = [row for row in ready.tolist() if data.draw(st.booleans())]
            counts = [
                data.draw(st.integers(1, most)) for row in chosen if (most := most_tokens(storage, row))
            ]
            if chosen:
                prepared = storage.prepare_step(chosen, counts)
                assert isinstance(prepared, PreparedStep), f"{prepared}"
                storage.launch_forward(prepared)
                storage.record_forward(prepared)
                open_steps.append(prepared)
        elif action == "process" and open_steps:
            storage.forward_processed(open_steps[0])
            storage.advance(open_steps.pop(0))
        elif action == "release" and len(live):
            storage.release([data.draw(st.sampled_from(live.tolist()))])
        if not open_steps:
            storage.verify_idle()
        else:
            storage._admission.verify(storage.requests.live_rows())


def most_tokens(storage: KVStorage, row: int) -> int:
    requests = storage.requests
    left = int(requests.prompts[row] - requests.prepared[row])
    return min(left, int(requests.chunk_limits[row])) if left > 0 else 1


def quarantine(storage: KVStorage, pages: int) -> None:
    """Leave pages behind that a failed transfer may still touch: fixed where they lie, and nobody's."""
    if not storage.plan.token_sub_pools:
        return
    rows = storage.admit([4 * pages], [1])
    if isinstance(rows, AdmissionRefusal):
        return
    row = int(rows[0])
    while storage.requests.prepared[row] < 4 * pages:
        step(storage, row, most_tokens(storage, row))
    name = storage.plan.token_sub_pools[0].name
    virtual = storage.requests.pages[row, : storage.requests.page_counts[row]].astype(np.int64)
    held = virtual[storage.chain.physical_units(name, virtual) > 0]
    if len(held):
        storage.chain.uses.fix("a failed transfer", {name: held})
    storage.release(rows)


@pytest.mark.requirement("K5")
def test_a_request_waits_for_those_in_service_and_keeps_its_chunks_long() -> None:
    """A request that shrank its chunks because another was there for a moment would keep them short for its whole prompt, and
    under that pressure every newcomer would: many short forwards, more held by each at once.
    """
    storage = tiny_storage(tiny_plan(window=4), units=19, chunk_tokens=8)
    first = rows_of(storage.admit([4], [1]))
    # Four of full attention and four of the window are promised: eleven are left, and in chunks of one 7 + 4 would do.
    least = storage.sized.demand(prompt_tokens=7, output_tokens=1, chunk_tokens=1).units
    longest = storage.sized.demand(prompt_tokens=7, output_tokens=1, chunk_tokens=8).units
    assert (sum(least), sum(longest)) == (11, 14)
    refusal = refused(storage.admit([7], [1]))
    assert refusal.waits_for == (WillFree.REQUESTS,)
    assert not refusal.is_final
    assert str(refusal).endswith("; waits for requests in service")
    step(storage, int(first[0]), 4)
    storage.release(first)
    second = rows_of(storage.admit([7], [1]))
    assert storage.requests.chunk_limits[second[0]] == 8
    assert storage.statistics().admission.waits == {
        "requests in service": 1,
        "a forward in flight": 0,
        "a host copy in flight": 0,
    }


@pytest.mark.requirement("K5")
def test_what_can_never_be_served_is_turned_away_at_once_though_every_row_is_taken() -> None:
    """Told to wait for a row it would hold up those behind it, only to be turned away at their head."""
    storage = tiny_storage(tiny_plan(), units=8, rows=1, chunk_tokens=8, context_tokens=40)
    rows_of(storage.admit([2], [1]))
    for prompt in (20, 50):
        refusal = refused(storage.admit([prompt], [1]))
        assert refusal.is_final
        assert not refusal.waits_for
        assert storage.arrival_refusal(prompt, 1) is not None
    assert refused(storage.admit([8], [1])).waits_for == (WillFree.REQUESTS,)


@pytest.mark.requirement("K5")
@pytest.mark.parametrize("in_service", [False, True])
@pytest.mark.parametrize(
    ("prompts", "turned_away", "first", "text"),
    [
        (
            [2, 2, 2, 2, 2],
            (),
            4,
            "5 requests are too many at once, though the first 4 would do: they need as many rows, of which ",
        ),
        (
            [4, 4, 4],
            (),
            2,
            "3 requests are too many at once, though the first 2 would do: 12 × 16 bytes of 'full' at peak, token by token, do not fit in 128 bytes, not even in an empty arena",
        ),
        (
            [2, 9, 1, 30],
            (1, 3),
            None,
            "of 4 requests, [1, 3] can never be admitted: 9 × 16 bytes of 'full' at peak",
        ),
    ],
)
def test_of_requests_asked_for_together_only_those_are_turned_away_that_could_never_be_served(
    in_service: bool, prompts: list[int], turned_away: tuple[int, ...], first: int | None, text: str
) -> None:
    """A scheduler that ends what is refused for good would lose the others; one that waits would wait for ever."""
    storage = tiny_storage(tiny_plan(), units=8, rows=4, chunk_tokens=8, context_tokens=20)
    if in_service:
        rows_of(storage.admit([1], [1]))
    refusal = refused(storage.admit(prompts, [1] * len(prompts)))
    assert (refusal.turned_away, refusal.first_that_fit) == (turned_away, first)
    assert refusal.is_final == bool(turned_away)
    assert not refusal.waits_for
    assert str(refusal).startswith(text)
    assert storage.statistics().admission.turned_away_requests == len(turned_away)
    if first is not None and not in_service:
        assert len(rows_of(storage.admit(prompts[:first], [1] * first))) == first


@pytest.mark.requirement("K5")
def test_requests_that_fit_one_by_one_beside_what_is_fixed_are_not_turned_away_together() -> None:
    """Nothing will free anything, and each would be admitted by itself."""
    storage = tiny_storage(tiny_plan(), units=8, chunk_tokens=8)
    quarantine(storage, 1)
    refusal = refused(storage.admit([3, 3], [1, 1]))
    assert (refusal.turned_away, refusal.first_that_fit, refusal.waits_for) == ((), 1, ())
    refusal = refused(storage.admit([1, 5], [1, 1]))
    assert (refusal.turned_away, refusal.first_that_fit) == ((1,), None)
    rows_of(storage.admit([3], [1]))


@pytest.mark.requirement("K5", "K11")
def test_a_refusal_names_each_unit_once_under_what_holds_it() -> None:
    """Promises, rows, a cache, quarantine: an operator adds them up, and sees what is missing and who has it."""
    storage = tiny_storage(tiny_plan(), units=16, chunk_tokens=8)
    taken = storage.chain.take(pages=3)
    assert isinstance(taken, Taken)
    storage.chain.uses.fix("a failed transfer", {"full": taken.pages})
    storage.chain.free_pages("full", taken.pages)
    cache = DumbCache(storage, pages=6)
    cache.locked = 2
    storage.use_cache(cache)
    row = int(rows_of(storage.admit([4], [1]))[0])
    step(storage, row, 1)
    assert str(refused(storage.admit([9], [1]))) == (
        "9 × 16 bytes of 'full' at peak do not fit in 256 bytes beside what is promised: admitted at peak are 'full' 4, of which "
        "resident now 'full' 1; a cache holds 'full' 6, of which it could evict 'full' 4; fixed, quarantined or under a transfer, and "
        "nobody's, are 'full' 3; waits for requests in service"
    )


@pytest.mark.requirement("K5", "K8")
def test_what_stands_for_no_hit_is_nobodys_to_change() -> None:
    """It is one value for all who ask: a count that one of them wrote there would be priced for every request after."""
    nothing = Hits.none(3, 2)
    assert Hits.none(3, 2) is nothing
    for units in (nothing.tails, nothing.checkpoints):
        with pytest.raises(ValueError, match="read-only"):
            units[0] = 1
        assert not units.any()


@pytest.mark.requirement("K5")
def test_a_want_of_rows_says_what_is_waited_for_as_a_want_of_memory_does() -> None:
    """Of requests that begin and of such that come back: a queue that stands beside free memory is looked into first."""
    storage = tiny_storage(tiny_plan(), units=16, rows=3)
    row = int(rows_of(storage.admit([1], [2]))[0])
    step(storage, row, 1)
    (backup,) = storage.retract_to_host([row])
    rows = rows_of(storage.admit([1, 1], [1, 1]))
    waits = "(free: 1 of 3); waits for requests in service"
    assert str(refused(storage.admit([1, 1], [1, 1]))) == f"2 requests need as many rows {waits}"
    assert str(refused(storage.restore([backup] * 2))) == f"2 backups need as many rows {waits}"
    rows_of(storage.admit([1], [1]))
    waits = "needs a row (free: 0 of 3); waits for requests in service"
    assert str(refused(storage.admit([1], [1]))) == f"a request {waits}"
    assert str(refused(storage.restore([backup]))) == f"a backup {waits}"
    storage.release(rows[:1])
    assert len(rows_of(storage.restore([backup]))) == 1


@pytest.mark.requirement("K1", "L1")
@pytest.mark.parametrize("state", [False, True])
def test_nobody_is_admitted_while_a_launch_is_open(state: bool) -> None:
    """With a state it would take a slot, and whether a verb is in order must not depend on the model."""
    storage = tiny_storage(tiny_plan(state=state), units=8)
    prepared = storage.prepare_step(rows_of(storage.admit([2], [1])), [2])
    assert isinstance(prepared, PreparedStep)
    storage.launch_forward(prepared)
    before = storage.statistics()
    with pytest.raises(InvariantError, match=r"forward\.record_before_pages"):
        storage.admit([1], [1])
    assert storage.statistics() == before


@pytest.mark.requirement("K5", "K6")
def test_a_prompt_whose_windows_fit_in_shorter_chunks_only_gets_those() -> None:
    """In chunks of eight it would wait for windows that it holds itself. Its chunks are the longest under which all of it fits, and
    it runs to its end in them.
    """
    storage = tiny_storage(tiny_plan(window=4), units=16, chunk_tokens=8)
    row = int(rows_of(storage.admit([10], [1]))[0])
    limit = int(storage.requests.chunk_limits[row])
    # Ten of full attention leave six for the window: three from before, and a chunk of three.
    assert limit == 3
    with pytest.raises(StorageError, match="counts must lie between 1 and the chunk of 3 tokens"):
        storage.prepare_step([row], [4])
    for tokens in (3, 3, 3, 1):
        step(storage, row, tokens)
    assert storage.resident_now() == {"window-4": 3, "full": 10}
    storage.verify_idle()


@pytest.mark.requirement("K5")
def test_chunks_that_no_empty_arena_would_make_longer_are_given_at_once() -> None:
    """Waiting for others would change nothing: alone, too, it would get chunks of one."""
    plan = tiny_plan(window=4, window_layers=3)
    storage = tiny_storage(plan, units=30, chunk_tokens=8, policy=ServingPolicy(overlap=True))
    other = rows_of(storage.admit([1], [1]))
    assert storage.requests.chunk_limits[other[0]] == 8
    # Eleven of full attention and, of the window, three from before and two chunks in flight, three units each: 26 of 30.
    row = rows_of(storage.admit([11], [1]))
    assert storage.requests.chunk_limits[row[0]] == 1
    storage.verify_idle()


@pytest.mark.requirement("K5", "K6")
def test_a_pool_one_page_short_turns_the_longest_request_away_at_once() -> None:
    """What boot promised and the pool does not hold by one page: the request may neither wait for ever nor fail half-way."""
    for units, admitted in ((9, True), (8, False)):
        storage = tiny_storage(tiny_plan(state=True), units=units, chunk_tokens=8)
        assert (storage.arrival_refusal(4, 5) is None) == admitted
        assert (storage.max_new_tokens_for_memory(4) >= 5) == admitted
        rows = storage.admit([4], [5])
        if admitted:
            row = int(rows_of(rows)[0])
            for tokens in (4, 1, 1, 1, 1):
                step(storage, row, tokens)
            assert storage.resident_now() == {"state": 1, "full": 8}
        else:
            assert refused(rows).is_final
            assert "not even alone" in str(rows)
            assert storage.statistics().admission.turned_away_requests == 1


@pytest.mark.requirement("K5")
def test_what_others_have_fixed_where_it_lies_is_no_reason_to_wait() -> None:
    """A quarantined page may stay for ever. Who fits around it is admitted, in shorter chunks if need be; who does not is turned away,
    though an empty arena would hold it.
    """
    storage = tiny_storage(tiny_plan(window=4), units=16, chunk_tokens=8)
    quarantine(storage, 1)
    withheld = {band.name: band.withheld_units for band in storage.chain.statistics().bands}
    assert withheld == {"window-4": 3, "full": 0}
    refusal = refused(storage.admit([12], [1]))
    assert refusal.is_final
    assert "nothing is going to free any" in str(refusal)
    assert storage.arrival_refusal(12, 1) is None, "an empty arena would hold it"
    row = rows_of(storage.admit([9], [1]))
    assert storage.requests.chunk_limits[row[0]] == 1, (
        "16 − 3 − 9 leave four: three from before and a chunk of one"
    )
    storage.chain.uses.unfix("a failed transfer")


@pytest.mark.requirement("K5")
def test_a_forward_or_a_host_copy_in_flight_is_waited_for() -> None:
    """Either keeps something until it is over, though no request is in service any more."""
    storage = tiny_storage(tiny_plan(), units=8, chunk_tokens=8, policy=ServingPolicy(overlap=True))
    rows = rows_of(storage.admit([8], [1]))
    prepared = storage.prepare_step(rows, [8])
    assert isinstance(prepared, PreparedStep)
    storage.launch_forward(prepared)
    storage.record_forward(prepared)
    pages = storage.requests.pages[rows[0], :2].astype(np.int64)
    storage.chain.uses.fix("a load", {"full": pages})
    copy = HostCopy("a backup", Access.READ, storage.device.record_event(storage.device.schedule_stream))
    storage.chain.uses.begin(copy, {"full": pages})
    storage.release(rows)
    assert refused(storage.admit([8], [1])).waits_for == (WillFree.FORWARD, WillFree.HOST_COPY)
    storage.forward_processed(prepared)
    storage.advance(prepared)
    assert refused(storage.admit([8], [1])).waits_for == (WillFree.HOST_COPY,)
    storage.chain.uses.end(copy)
    assert refused(storage.admit([8], [1])).is_final, "fixed pages alone promise nothing"
    storage.chain.uses.unfix("a load")
    rows_of(storage.admit([8], [1]))


class DumbCache:
    """A cache of state slots and pages that belong to nobody, which evicts them one by one, the oldest first."""

    def __init__(self, storage: KVStorage, pages: int, slots: int = 0) -> None:
        taken = storage.chain.take(pages=pages, state_slots=slots)
        self.chain = storage.chain
        self.pages = taken.pages.tolist()  # type: ignore[union-attr]  # there is room
        self.slots = taken.state_slots.tolist()  # type: ignore[union-attr]
        self.locked = 0
        self.walks = 0

    def held_units(self) -> Mapping[str, int]:
        return self._by_band(len(self.pages), len(self.slots))

    def evictable_units(self) -> Mapping[str, int]:
        return self._by_band(len(self.pages) - self.locked, len(self.slots))

    def units_counted_on_again(self) -> Mapping[str, int]:
        return {}

    def evict_until(self, is_enough: Callable[[Mapping[str, int]], bool]) -> None:
        self.walks += 1
        page_count = slot_count = 0
        while not is_enough(self._by_band(page_count, slot_count)):
            slot_count += slot_count < len(self.slots)
            page_count += slot_count == len(self.slots) and not is_enough(
                self._by_band(page_count, slot_count)
            )
        slots, self.slots = self.slots[:slot_count], self.slots[slot_count:]
        pages, self.pages = self.pages[:page_count], self.pages[page_count:]
        if slots:
            self.chain.free_state_slots(np.array(slots))
        if pages:
            self.chain.free_pages("full", np.array(pages))

    def _by_band(self, pages: int, slots: int) -> Mapping[str, int]:
        units = {"full": pages, "state": slots}
        return {band.name: units[band.name] for band in self.chain.layout.bands}


@pytest.mark.requirement("K5", "K8", "C5")
def test_admission_credits_what_a_cache_could_evict_and_takes_evict_no_more_than_they_need() -> None:
    """A full cache is the usual state of a server: without the credit nothing would ever be admitted, and with more eviction than a
    take needs nothing would ever be hit.
    """
    storage = tiny_storage(tiny_plan(state=True), units=8, chunk_tokens=8)
    cache = DumbCache(storage, pages=6, slots=2)
    assert refused(storage.admit([5], [1])).is_final, "nobody could evict"
    storage.use_cache(cache)
    with pytest.raises(StorageError, match="cannot use a second prefix cache"):
        storage.use_cache(cache)
    storage.verify_idle()
    row = int(rows_of(storage.admit([5], [1]))[0])
    assert cache.held_units() == {"full": 6, "state": 1}, "the slot needs one unit"
    step(storage, row, 3)
    assert cache.held_units() == {"full": 4, "state": 0}
    step(storage, row, 2)
    assert cache.held_units() == {"full": 2, "state": 0}
    assert cache.walks == 3
    storage.verify_idle()
    # Two are left to the cache, none is outstanding; locked, they are nobody's to give.
    cache.locked = 1
    assert not refused(storage.admit([1], [1])).is_final
    cache.locked = 0
    rows_of(storage.admit([1], [1]))
    storage.verify_idle()


@pytest.mark.requirement("K5", "K8")
def test_a_cache_that_comes_to_requests_in_service_is_refused() -> None:
    """Their promises were laid out without what it holds: the first take that missed those units would blame the admission."""
    storage = tiny_storage(tiny_plan(), units=8, chunk_tokens=8)
    rows = rows_of(storage.admit([4], [1]))
    cache = DumbCache(storage, pages=6)
    with pytest.raises(StorageError, match=r"cannot use a prefix cache while rows \[0\] are in use"):
        storage.use_cache(cache)
    storage.release(rows)
    storage.use_cache(cache)
    storage.verify_idle()


@pytest.mark.requirement("K5", "K8", "H1")
def test_what_a_backup_reads_of_a_cache_can_be_evicted_under_it() -> None:
    """A backup comes whenever the host tier likes, and asks nobody: an admitted request would be refused because of it."""
    storage = tiny_storage(tiny_plan(), units=8, chunk_tokens=8)
    cache = DumbCache(storage, pages=6)
    storage.use_cache(cache)
    row = int(rows_of(storage.admit([8], [1]))[0])
    copy = HostCopy("a backup", Access.READ, storage.device.record_event(storage.device.schedule_stream))
    storage.chain.uses.begin(copy, {"full": np.array(cache.pages)})
    storage.verify_idle()
    step(storage, row, 8)
    assert cache.held_units() == {"full": 0}
    storage.chain.uses.end(copy)
    storage.verify_idle()


@pytest.mark.requirement("K5", "K8", "L8")
def test_a_cache_that_evicts_too_little_is_blamed_by_name() -> None:
    """Else the take that misses its units would say that a demand was priced too low."""
    storage = tiny_storage(tiny_plan(), units=8, chunk_tokens=8)
    cache = DumbCache(storage, pages=6)
    cache.evict_until = lambda is_enough: None  # type: ignore[method-assign]  # the fault
    storage.use_cache(cache)
    row = int(rows_of(storage.admit([8], [1]))[0])
    with pytest.raises(InvariantError, match=r"storage\.evicted_enough.*could evict \{'full': 6\}"):
        storage.prepare_step([row], [8])


@pytest.mark.requirement("K5", "K11")
def test_units_that_were_promised_and_given_to_somebody_else_are_found() -> None:
    """By the take that misses them, and at idle before it."""
    storage = tiny_storage(tiny_plan(), units=8, chunk_tokens=8)
    cache = DumbCache(storage, pages=4)
    storage.use_cache(cache)
    row = int(rows_of(storage.admit([8], [1]))[0])
    storage.verify_idle()
    cache.locked = 4
    with pytest.raises(InvariantError, match=r"storage\.promise_kept"):
        storage.verify_idle()
    with pytest.raises(InvariantError, match=r"storage\.admission_guarantee"):
        storage.prepare_step([row], [8])
    assert cache.walks == 0, "refused, nothing is evicted"


@pytest.mark.requirement("K11")
def test_a_row_that_holds_more_than_it_was_promised_is_found_at_idle() -> None:
    """A demand priced too low would sooner or later refuse somebody a take; here a window that nobody retired."""
    storage = tiny_storage(tiny_plan(window=2), units=16, chunk_tokens=2)
    row = int(rows_of(storage.admit([6], [1]))[0])
    storage._units.retire = lambda segments: None  # type: ignore[method-assign]  # the fault
    for _ in range(3):
        step(storage, row, 2)
    with pytest.raises(InvariantError, match=r"storage\.held_within_promise"):
        storage.verify_idle()


@pytest.mark.requirement("K5", "C9")
def test_no_verdict_reads_an_estimate() -> None:
    """A scalar of free units says nothing of a demand over several bands: read in a verdict, it would raise here."""
    storage = tiny_storage(tiny_plan(window=4, state=True), units=16, chunk_tokens=8)
    decided: list[str] = []
    admits = storage.chain.admits

    def asked(units: Mapping[str, int], evictable: Mapping[str, int]) -> bool:
        with pytest.raises(InvariantError, match=r"capacity\.observe_only_read"):
            storage.chain.available_size()
        decided.append("admission")
        return admits(units, evictable)

    storage.chain.admits = asked  # type: ignore[method-assign]  # the observer
    rows_of(storage.admit([4], [1]))
    assert decided
    storage.chain.available_size()


@pytest.mark.requirement("K8", "C9")
def test_no_eviction_reads_an_estimate() -> None:
    """What a cache gives up, it chooses while the take's units are counted band by band."""
    storage = tiny_storage(tiny_plan(), units=8, chunk_tokens=8)
    decided: list[str] = []
    cache = DumbCache(storage, pages=6)
    evict = cache.evict_until

    def evicts(is_enough: Callable[[Mapping[str, int]], bool]) -> None:
        with pytest.raises(InvariantError, match=r"capacity\.observe_only_read"):
            storage.chain.available_size()
        decided.append("eviction")
        evict(is_enough)

    cache.evict_until = evicts  # type: ignore[method-assign]  # the observer
    storage.use_cache(cache)
    row = int(rows_of(storage.admit([4], [1]))[0])
    step(storage, row, 4)
    assert decided == ["eviction"]
    storage.chain.available_size()


@pytest.mark.requirement("K5")
def test_verdicts_are_counted_and_those_that_end_a_request_are_logged() -> None:
    """An operator sees why a queue stands, and which requests were lost."""
    storage = tiny_storage(tiny_plan(), units=8, chunk_tokens=8)
    with capture_logs() as logs:
        rows = rows_of(storage.admit([4, 2], [1, 1]))
        refused(storage.admit([4], [1]))
        refused(storage.admit([9], [1]))
    assert [entry["event"] for entry in logs] == ["admission.admitted", "admission.turned_away"]
    assert logs[0]["rows"] == rows.tolist()
    assert (logs[1]["prompt_tokens"], logs[1]["output_tokens"]) == ([9], [1])
    assert logs[1]["reason"].endswith("do not fit in 128 bytes, not even alone")
    statistics = storage.statistics()
    assert statistics.admission.admitted_requests == 2
    assert statistics.admission.turned_away_requests == 1
    assert statistics.admission.waits[WillFree.REQUESTS.value] == 1
    assert statistics.outstanding == {"full": 6} == dict(statistics.admitted_at_peak)
    step(storage, int(rows[0]), 4)
    assert storage.statistics().outstanding == {"full": 2}
