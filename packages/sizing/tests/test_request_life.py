"""The demand of a request against every life it could lead under every policy, lived token by token (S5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtide.plan import KVStoragePlan
from kvtide.sizing import (
    CHECKPOINT_RULES,
    DEMAND_RULES,
    CheckpointStrategy,
    ChunkReads,
    DemandPurpose,
    KVDemand,
    ServingPolicy,
    SizingError,
    request_demand,
    resident_demand,
)

from .life import Request, State, chunks, full, held_pages, most_pages, most_slots, window

MakePlan = Callable[..., KVStoragePlan]
EVERY_LIFE = settings(deadline=None, max_examples=250)
SLOTS = {
    (CheckpointStrategy.NONE, False): (1, 1),
    (CheckpointStrategy.NONE, True): (1, 1),
    (CheckpointStrategy.NO_BUFFER, False): (1, 2),
    (CheckpointStrategy.EXTRA_BUFFER, False): (2, 2),
    (CheckpointStrategy.EXTRA_BUFFER, True): (3, 3),
    (CheckpointStrategy.EXTRA_BUFFER_LAZY, True): (2, 3),
}
"""State slots of a request, all along and while one goes over to the tree, as the glossary gives them."""
ON_GRID = (CheckpointStrategy.EXTRA_BUFFER, CheckpointStrategy.EXTRA_BUFFER_LAZY)


@attrs.frozen(kw_only=True)
class Case:
    """A plan's numbers, a request and a policy."""

    page: int
    ratio: int
    window: int
    chunk_pages: int
    interval_pages: int
    prompt: int
    output: int
    chunk: int
    cached_units: int
    purpose: DemandPurpose
    strategy: CheckpointStrategy
    overlap: bool
    reads: ChunkReads
    draft: int

    @property
    def owner_page(self) -> int:
        return self.page * self.ratio

    @property
    def interval(self) -> int:
        return self.owner_page * self.interval_pages

    @property
    def attention_chunk(self) -> int:
        return self.page * self.chunk_pages

    @property
    def cached(self) -> int:
        unit = self.interval if self.strategy in ON_GRID else self.owner_page
        return min(self.cached_units, (self.prompt - 1) // unit) * unit

    def plan(self, make_plan: MakePlan) -> KVStoragePlan:
        return make_plan(
            self.owner_page,
            state=16,
            windows={self.window: 16},
            chunks={self.attention_chunk: 16},
            full=16,
            interval=self.interval,
            window_page_tokens=self.page,
        )

    def demand(self, make_plan: MakePlan, price: Callable[..., KVDemand] = request_demand) -> dict[str, int]:
        plan = self.plan(make_plan)
        policy = ServingPolicy(
            chunk_reads=self.reads, strategy=self.strategy, overlap=self.overlap, draft_tokens=self.draft
        )
        units = price(
            plan,
            prompt_tokens=self.prompt,
            output_tokens=self.output,
            chunk_tokens=self.chunk,
            cached_tokens=self.cached,
            purpose=self.purpose,
            policy=policy,
        ).units
        return {pool.kind.value: count for pool, count in zip(plan.sub_pools, units, strict=True)}

    def request(self, page: int) -> Request:
        begins = {
            DemandPurpose.CEILING: 0,
            DemandPurpose.ADMIT: self.cached,
            DemandPurpose.LOAD_BACK: self.cached,
            DemandPurpose.DECODE_PREALLOC: self.prompt,
        }
        return Request(
            prompt=self.prompt,
            output=self.output,
            chunk=self.chunk,
            page=page,
            begin=begins[self.purpose],
            credited=self.cached if self.purpose is DemandPurpose.ADMIT else 0,
            grid=self.interval if self.strategy in ON_GRID else None,
            draft=self.draft,
            overlap=self.overlap,
            activations=self.reads is ChunkReads.ACTIVATIONS,
        )

    def lived(self) -> dict[str, int]:
        running, handing_over = SLOTS[self.strategy, self.overlap]
        loaded = 1 if self.purpose is DemandPurpose.LOAD_BACK and self.cached else 0
        small, large = self.request(self.page), self.request(self.owner_page)
        return {
            "state": loaded + most_slots(small, running, handing_over, on_grid=self.strategy in ON_GRID),
            "window": most_pages(small, window(self.window)),
            "chunk": most_pages(small, chunks(self.attention_chunk)),
            "full": most_pages(large, full),
        }


CASES = st.builds(
    Case,
    page=st.integers(1, 4),
    ratio=st.sampled_from([1, 2]),
    window=st.integers(1, 9),
    chunk_pages=st.sampled_from([1, 2, 4]),
    interval_pages=st.sampled_from([1, 2]),
    prompt=st.integers(1, 13),
    output=st.integers(1, 6),
    chunk=st.integers(1, 8),
    cached_units=st.integers(0, 4),
    purpose=st.sampled_from(DemandPurpose),
    strategy=st.sampled_from(CheckpointStrategy),
    overlap=st.booleans(),
    reads=st.sampled_from(ChunkReads),
    draft=st.sampled_from([0, 0, 1, 2]),
)


def assume_it_runs(case: Case) -> None:
    assume((case.strategy, case.overlap) in CHECKPOINT_RULES)
    assume(case.strategy not in ON_GRID or case.chunk >= case.interval)
    larger, smaller = max(case.interval, case.attention_chunk), min(case.interval, case.attention_chunk)
    assume(larger % smaller == 0)


@pytest.mark.requirement("S5")
@EVERY_LIFE
@given(case=CASES.map(lambda case: attrs.evolve(case, reads=ChunkReads.PAGES)))
def test_where_chunks_read_pages_the_demand_is_the_most_that_any_life_holds(
    make_plan: MakePlan, case: Case
) -> None:
    """One unit less and an admitted request is refused mid-way; one more and a request waits for nothing."""
    assume_it_runs(case)
    demand, lived = case.demand(make_plan), case.lived()
    # With drafts, a state that goes over and a verify forward's states are priced together, though they may never meet.
    assert lived["state"] <= demand["state"] <= lived["state"] + (1 if case.draft else 0)
    assert demand | {"state": 0} == lived | {"state": 0}


@pytest.mark.requirement("S5")
@EVERY_LIFE
@given(case=CASES.map(lambda case: attrs.evolve(case, reads=ChunkReads.ACTIVATIONS)))
def test_where_chunks_read_activations_no_life_holds_more(make_plan: MakePlan, case: Case) -> None:
    """A bound, never above what chunks in pages would hold; exact for windows without a grid, and for full."""
    assume_it_runs(case)
    demand, lived = case.demand(make_plan), case.lived()
    in_pages = attrs.evolve(case, reads=ChunkReads.PAGES).demand(make_plan)
    assert demand["full"] == lived["full"]
    assert demand["state"] == in_pages["state"]
    for name in ("window", "chunk"):
        assert lived[name] <= demand[name] <= in_pages[name]
    if case.strategy not in ON_GRID:
        assert demand["window"] == lived["window"]


@pytest.mark.requirement("S5")
@EVERY_LIFE
@given(case=CASES)
def test_a_longer_output_never_demands_less(make_plan: MakePlan, case: Case) -> None:
    """The memory clip bisects over output limits; under every policy it is right only while this holds."""
    assume_it_runs(case)
    less, more = case.demand(make_plan), attrs.evolve(case, output=case.output + 1).demand(make_plan)
    assert all(less[name] <= more[name] for name in less)


@pytest.mark.requirement("S6")
@EVERY_LIFE
@given(case=CASES)
def test_what_is_resident_is_what_the_row_holds_between_forwards(make_plan: MakePlan, case: Case) -> None:
    """Resident now and admitted at peak are two figures: the first is what a scheduler's gauge shows, and never above the second."""
    assume_it_runs(case)
    case = attrs.evolve(case, purpose=DemandPurpose.CEILING)
    plan = case.plan(make_plan)
    policy = ServingPolicy(
        chunk_reads=case.reads, strategy=case.strategy, overlap=case.overlap, draft_tokens=case.draft
    )
    units = resident_demand(plan, written_tokens=case.prompt, policy=policy).units
    resident = {pool.kind.value: count for pool, count in zip(plan.sub_pools, units, strict=True)}
    now, small, large = State(case.prompt), case.request(case.page), case.request(case.owner_page)
    assert resident == {
        "state": SLOTS[case.strategy, case.overlap][0],
        "window": held_pages(small, now, window(case.window)),
        "chunk": held_pages(small, now, chunks(case.attention_chunk)),
        "full": held_pages(large, now, full),
    }
    peak = case.demand(make_plan)
    assert all(resident[name] <= peak[name] for name in peak)


@pytest.mark.requirement("S5")
def test_every_purpose_and_every_strategy_has_its_row() -> None:
    """A purpose without a row would be found out in service."""
    assert set(DEMAND_RULES) == set(DemandPurpose)
    assert {strategy for strategy, _ in CHECKPOINT_RULES} == set(CheckpointStrategy)
    assert {pair: (rule.slots, rule.slots_at_checkpoint) for pair, rule in CHECKPOINT_RULES.items()} == SLOTS


@pytest.mark.requirement("S5")
def test_a_chunk_that_reads_activations_leaves_tails_only(make_plan: MakePlan) -> None:
    """By hand: chunks of 8,192, window 1,024, pages of 16. In pages: 1,023 + 8,192 tokens, in the worst place 577 pages.
    In activations: 1,023 tokens before the chunk and 1,023 behind it, 65 pages each.
    """
    plan = make_plan(16, windows={1024: 16}, full=16)
    counts: dict[str, Any] = {"prompt_tokens": 65536, "output_tokens": 1024, "chunk_tokens": 8192}
    assert request_demand(plan, **counts).units[0] == (1023 + 8192 + 15 + 15) // 16 == 577
    policy = ServingPolicy(chunk_reads=ChunkReads.ACTIVATIONS)
    assert request_demand(plan, **counts, policy=policy).units[0] == 2 * 65


@pytest.mark.requirement("S5")
@EVERY_LIFE
@given(
    case=CASES.map(lambda case: attrs.evolve(case, reads=ChunkReads.ACTIVATIONS)),
    prompt=st.integers(1, 3000),
    output=st.sampled_from([1, 2, 3, 100]),
    chunk=st.integers(16, 2000),
)
def test_where_chunks_read_activations_no_price_grows_with_the_chunk(
    make_plan: MakePlan, case: Case, prompt: int, output: int, chunk: int
) -> None:
    """What was kept before a chunk, a tail for each forward in flight, and what decoding writes: never the chunk itself.

    Overlap and a first decode forward on top of the last chunk included; the tail is as long as what a query may read behind
    the latest checkpoint.
    """
    case = attrs.evolve(case, prompt=prompt, output=output, chunk=chunk, purpose=DemandPurpose.CEILING)
    assume_it_runs(case)
    demand = case.demand(make_plan)
    floor = case.interval - 1 if case.strategy in ON_GRID else 0
    in_flight = 2 if case.overlap else 1
    written = in_flight * (1 + case.draft)
    for name, read in (("window", case.window - 1), ("chunk", case.attention_chunk - 1)):
        tail = (read + floor + 2 * case.page - 2) // case.page
        while_prefilling = (1 + in_flight) * tail
        while_decoding = in_flight * tail + -(-written // case.page) + 1
        assert demand[name] <= max(while_prefilling, while_decoding)


@pytest.mark.requirement("S5")
@pytest.mark.parametrize(
    ("window", "page", "counts", "pages"),
    [
        (64, 4, {"chunk_tokens": 256, "prompt_tokens": 1024}, 51),
        (128, 16, {"chunk_tokens": 2048, "prompt_tokens": 8192}, 27),
    ],
)
def test_a_second_token_costs_no_chunk_that_was_never_in_pages(
    make_plan: MakePlan, window: int, page: int, counts: dict[str, Any], pages: int
) -> None:
    """By hand, with overlap: the window before a chunk and two tails, pages of 4: 3 × 17; of 16: 3 × 9.

    Once more than a token is generated, a decode forward runs on top of the last chunk, of which only the tail is in pages.
    """
    plan = make_plan(page, windows={window: 16}, full=16)
    policy = ServingPolicy(chunk_reads=ChunkReads.ACTIVATIONS, overlap=True)
    for output in (1, 2, 100):
        demand = request_demand(plan, **counts, output_tokens=output, policy=policy)
        assert demand.units[0] == pages


@pytest.mark.requirement("S5")
def test_a_finished_attention_chunk_is_not_paid_for_twice(make_plan: MakePlan) -> None:
    """Llama 4 by hand: 8,191 tokens of a stretch and a prefill chunk of 512 on top of them, 544 pages of 16 tokens."""
    plan = make_plan(16, chunks={8192: 16}, full=16)
    demand = request_demand(plan, prompt_tokens=100_000, output_tokens=1000, chunk_tokens=512)
    assert demand.units[0] == (8191 + 512 + 15) // 16 == 544


@pytest.mark.requirement("S5")
def test_a_cached_prefix_costs_an_admission_nothing_and_a_load_everything(make_plan: MakePlan) -> None:
    """8,192 of 10,000 tokens cached: 512 pages fewer to take, or to take them and a slot for the loaded checkpoint."""
    plan = make_plan(16, state=16, full=16, interval=512)
    counts: dict[str, Any] = {
        "prompt_tokens": 10_000,
        "output_tokens": 1,
        "chunk_tokens": 2048,
        "cached_tokens": 8192,
        "policy": ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER),
    }
    units = {purpose: request_demand(plan, **counts, purpose=purpose).units for purpose in DemandPurpose}
    assert units == {
        DemandPurpose.CEILING: (2, 625),
        DemandPurpose.ADMIT: (2, 625 - 512),
        DemandPurpose.LOAD_BACK: (3, 625),
        DemandPurpose.DECODE_PREALLOC: (2, 625),
    }


@pytest.mark.requirement("S5")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cached_tokens": -1}, "cached_tokens must be an integer of 0 or more, found -1"),
        ({"cached_tokens": True}, "cached_tokens must be an integer of 0 or more, found True"),
        (
            {"cached_tokens": 64},
            "cached_tokens = 64 must be below prompt_tokens = 64: one token at least is computed",
        ),
        ({"cached_tokens": 6}, "cached_tokens = 6 is no multiple of page_tokens = 4: no hit ends there"),
        (
            {"cached_tokens": 4},
            "cached_tokens = 4 is no multiple of checkpoint_interval = 8: no hit ends there",
        ),
        (
            {"chunk_tokens": 7},
            "chunk_tokens = 7 is below checkpoint_interval = 8: no chunk would reach a checkpoint",
        ),
    ],
)
def test_what_no_scheduler_could_do_is_refused(
    make_plan: MakePlan, changes: dict[str, Any], text: str
) -> None:
    """A price for it would be a price for something else."""
    arguments: dict[str, Any] = {"prompt_tokens": 64, "output_tokens": 8, "chunk_tokens": 16} | changes
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER)
    with pytest.raises(SizingError) as caught:
        request_demand(make_plan(4, state=16, full=16, interval=8), **arguments, policy=policy)
    assert str(caught.value) == text


@pytest.mark.requirement("S5")
def test_policies_that_do_not_run_are_refused(make_plan: MakePlan) -> None:
    """Where they are declared, or where a plan lacks what they need."""
    with pytest.raises(SizingError, match="strategy 'no_buffer' does not run with overlap"):
        ServingPolicy(strategy=CheckpointStrategy.NO_BUFFER, overlap=True)
    with pytest.raises(SizingError, match="strategy 'extra_buffer_lazy' does not run without overlap"):
        ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER_LAZY)
    with pytest.raises(SizingError, match="draft_tokens must be an integer of 0 or more, found -1"):
        ServingPolicy(draft_tokens=-1)
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER)
    with pytest.raises(SizingError, match="strategy 'extra_buffer' needs a plan with a checkpoint_interval"):
        request_demand(
            make_plan(4, state=16, full=16), prompt_tokens=8, output_tokens=8, chunk_tokens=8, policy=policy
        )
    # A model without state has nothing to keep at checkpoints.
    plain = request_demand(make_plan(4, full=16), prompt_tokens=8, output_tokens=8, chunk_tokens=8)
    kept = request_demand(
        make_plan(4, full=16), prompt_tokens=8, output_tokens=8, chunk_tokens=8, policy=policy
    )
    assert kept == plain
