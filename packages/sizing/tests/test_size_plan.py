"""A byte budget is divided exactly: against trying every arena and every target, on numbers small enough to try (S1, S2)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.plan import ArenaLayout, KVStoragePlan, lay_out, pack
from kvtide.sizing import (
    CheckpointStrategy,
    ChunkReads,
    KVDemand,
    ServingPolicy,
    SizedPlan,
    SizingError,
    request_demand,
    requests_that_fit,
    size_plan,
    size_stages,
)

MakePlan = Callable[..., KVStoragePlan]
EXHAUSTIVE = settings(deadline=None, max_examples=100)

SHAPES = st.fixed_dictionaries(
    {
        "page_tokens": st.sampled_from([1, 2, 3, 8]),
        "state": st.sampled_from([0, 40, 100]),
        "windows": st.dictionaries(st.integers(1, 12), st.integers(1, 40), max_size=2),
        "full": st.sampled_from([0, 7, 16, 33]),
    }
).filter(lambda shape: shape["state"] or shape["windows"] or shape["full"])
LIMITS = st.fixed_dictionaries(
    {
        "max_running_requests": st.integers(1, 4),
        "max_context_tokens": st.integers(1, 20),
        "chunk_tokens": st.integers(1, 8),
    }
)


def mirror_bytes(layout: ArenaLayout, plan: KVStoragePlan, limits: dict[str, int]) -> int:
    """Four bytes an entry: a row of virtual pages a request, and for each band an entry an id."""
    entries = limits["max_running_requests"] * -(-limits["max_context_tokens"] // plan.page_tokens)
    attention = {pool.name: pool.unit.unit_bytes for pool in plan.sub_pools if pool.has_sink}
    if "full" in attention:
        full = layout.band("full")
        pages = max(0, full.page_count - full.first_page)
    elif attention:
        pages = (layout.arena_bytes - layout.prefix_bytes) // min(attention.values())
    for band in layout.bands:
        if band.name in attention:
            entries += 1 + pages
        else:
            entries += max(0, band.page_count - band.first_page)
    return 4 * entries + 24 * limits["max_running_requests"]


def sized_or_refused(
    plan: KVStoragePlan, budget_bytes: int, limits: dict[str, Any], **more: Any
) -> SizedPlan | str:
    try:
        return size_plan(plan, budget_bytes=budget_bytes, **limits, **more)
    except SizingError as error:
        return str(error)


def shape_plan(make_plan: MakePlan, shape: dict[str, Any]) -> KVStoragePlan:
    return make_plan(shape["page_tokens"], state=shape["state"], windows=shape["windows"], full=shape["full"])


@pytest.mark.requirement("S1")
@EXHAUSTIVE
@given(shape=SHAPES, limits=LIMITS, budget_bytes=st.integers(1, 4000), beside=st.integers(0, 300))
def test_the_arena_is_the_largest_that_leaves_room_for_everything_beside_it(
    make_plan: MakePlan, shape: dict[str, Any], limits: dict[str, int], budget_bytes: int, beside: int
) -> None:
    """One byte more would be out of memory at boot, one less is capacity thrown away."""
    plan = shape_plan(make_plan, shape)
    sized = sized_or_refused(plan, budget_bytes, limits, beside_arena={"staging": beside})
    if isinstance(sized, str):
        return
    prefix_bytes = sum(pool.unit.unit_bytes for pool in plan.sub_pools if pool.has_sink)
    fitting = [
        arena_bytes
        for arena_bytes in range(prefix_bytes + 1, budget_bytes + 1)
        if arena_bytes + mirror_bytes(lay_out(plan, arena_bytes), plan, limits) + beside <= budget_bytes
    ]
    assert sized.layout == lay_out(plan, fitting[-1])
    assert sized.used_bytes == fitting[-1] + mirror_bytes(sized.layout, plan, limits) + beside
    in_arena = {term.name: term.byte_count for term in sized.fixed if term.in_arena}
    assert sum(in_arena.values()) == sized.layout.prefix_bytes
    assert {term.name: term.byte_count for term in sized.fixed if not term.in_arena}["staging"] == beside


@attrs.frozen
class Splits:
    """What a request of the longest length may hold, over every split of its tokens into prompt and output."""

    plan: KVStoragePlan
    limits: dict[str, int]
    policy: ServingPolicy

    def peaks(self) -> list[int]:
        longest, chunk = self.limits["max_context_tokens"], self.limits["chunk_tokens"]
        return [
            max(counts)
            for counts in zip(
                *(
                    request_demand(
                        self.plan,
                        prompt_tokens=prompt,
                        output_tokens=longest - prompt + 1,
                        chunk_tokens=chunk,
                        policy=self.policy,
                    ).units
                    for prompt in range(1, longest + 1)
                ),
                strict=True,
            )
        ]


POLICIES = st.sampled_from(
    [
        ServingPolicy(),
        ServingPolicy(strategy=CheckpointStrategy.NO_BUFFER),
        ServingPolicy(overlap=True),
        ServingPolicy(draft_tokens=2),
        ServingPolicy(overlap=True, draft_tokens=3),
        ServingPolicy(overlap=True, draft_tokens=1, chunk_reads=ChunkReads.ACTIVATIONS),
        ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER),
        ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER_LAZY, overlap=True, draft_tokens=1),
    ]
)


@pytest.mark.requirement("S1", "P10")
@EXHAUSTIVE
@given(
    shape=SHAPES,
    limits=LIMITS,
    budget_bytes=st.integers(200, 4000),
    asked=st.fixed_dictionaries(
        {
            "state": st.none() | st.integers(1, 6) | st.fractions(Fraction(1, 10), 1, max_denominator=10),
            "policy": POLICIES,
            "ratio": st.sampled_from([1, 1, 2]),
            "stretch_pages": st.sampled_from([0, 0, 1, 2, 4]),
        }
    ),
)
def test_targets_are_the_best_of_all_that_pack(
    make_plan: MakePlan,
    shape: dict[str, Any],
    limits: dict[str, int],
    budget_bytes: int,
    asked: dict[str, Any],
) -> None:
    """The stated objective, tried from the top: slots first, then full attention with its windows beside it."""
    state, policy, ratio = asked["state"], asked["policy"], asked["ratio"]
    small = shape["page_tokens"]
    plan = make_plan(
        small * ratio,
        state=shape["state"],
        windows=shape["windows"],
        chunks={small * ratio * asked["stretch_pages"]: 20} if asked["stretch_pages"] else None,
        full=shape["full"],
        interval=small * ratio if shape["state"] else None,
        window_page_tokens=small,
    )
    given_state = {"state_slots": state} if isinstance(state, int) else {"state_share": state}
    sized = sized_or_refused(plan, budget_bytes, limits, policy=policy, **given_state)
    if isinstance(sized, str):
        return
    peaks, rows = Splits(plan, limits, policy).peaks(), limits["max_running_requests"]
    each = peaks[0] if shape["state"] else None

    def running(slots: int) -> int:
        return rows if each is None else min(rows, slots // each)

    def targets(slots: int, owner_pages: int) -> tuple[int, ...]:
        return tuple(
            slots
            if pool.page_tokens is None
            else owner_pages
            if pool is plan.owner
            else min(owner_pages * (plan.page_tokens // pool.page_tokens), max(1, running(slots)) * peak)
            for pool, peak in zip(plan.sub_pools, peaks, strict=True)
        )

    def packs(slots: int, owner_pages: int) -> bool:
        return pack(sized.layout, targets(slots, owner_pages)) is not None

    slots = 0
    if isinstance(state, int) and each is not None:
        slots = state
    elif each is not None:
        share = Fraction(1) if plan.owner is None else state or Fraction(1, 2)
        chain_bytes = sized.layout.arena_bytes - sized.layout.prefix_bytes
        unit = plan.sub_pools[0].unit.unit_bytes
        wanted = [count for count in range(each, rows * each + 1) if count * unit <= chain_bytes * share]
        slots = max([count for count in wanted if packs(count, 1)], default=each)
    most = max([pages for pages in range(budget_bytes // 16 + 1) if packs(slots, pages)]) if plan.owner else 0
    assert tuple(target.unit_count for target in sized.targets) == targets(slots, most)
    smallest = request_demand(
        plan, prompt_tokens=1, output_tokens=1, chunk_tokens=limits["chunk_tokens"], policy=policy
    ).units
    together = [count for count in range(rows + 1) if pack(sized.layout, [count * u for u in smallest])]
    assert sized.concurrency == max(together)
    for target, pool in zip(sized.targets, plan.sub_pools, strict=True):
        assert target.name == pool.name
        assert target.token_count == (pool.page_tokens and pool.page_tokens * target.unit_count)


@pytest.mark.requirement("S1")
@given(
    state_bytes=st.integers(1, 3000),
    token_bytes=st.integers(1, 300),
    tokens=st.integers(1, 60),
    budget_bytes=st.integers(20_000, 60_000),
)
def test_half_for_state_holds_half_of_what_the_best_split_would(
    make_plan: MakePlan, state_bytes: int, token_bytes: int, tokens: int, budget_bytes: int
) -> None:
    """The argument for the default share: whatever requests are like, no kind has less than half of its best."""
    plan = make_plan(1, state=state_bytes, full=token_bytes)
    rows = 10_000
    sized = sized_or_refused(
        plan, budget_bytes, {"max_running_requests": rows, "max_context_tokens": 1, "chunk_tokens": 1}
    )
    if isinstance(sized, str):
        return
    demand = KVDemand((1, tokens))
    best = requests_that_fit(sized.layout, demand)
    held = [target.unit_count // units for target, units in zip(sized.targets, demand.units, strict=True)]
    assert min(held) >= best // 2 - 1


@pytest.mark.requirement("S1")
def test_a_model_of_large_states_keeps_room_for_tokens(make_plan: MakePlan) -> None:
    """Qwen3.5-397B by its bytes, 40 GiB, 256 rows: 111 states of 192 MB and some 697,000 tokens, not 222 states and 9,568 tokens."""
    plan = make_plan(16, state=192_061_440, full=30_720)
    sized = size_plan(
        plan, budget_bytes=40 * 2**30, max_running_requests=256, max_context_tokens=262_144, chunk_tokens=2048
    )
    state, full = sized.targets
    assert state.unit_count == 20 * 2**30 // 192_061_440 == 111
    assert full.token_count is not None
    assert 690_000 < full.token_count < 710_000


@pytest.mark.requirement("S4")
def test_stages_agree_on_the_least_concurrency(make_plan: MakePlan) -> None:
    """Every stage runs the same requests, so rows that one stage cannot serve are bytes lost to the others."""
    large, small = make_plan(16, state=400_000, full=64), make_plan(16, state=100_000, full=64)
    windows = make_plan(16, windows={128: 64}, full=64)
    limits: dict[str, Any] = {"max_running_requests": 64, "max_context_tokens": 1024, "chunk_tokens": 256}
    alone = [size_plan(plan, budget_bytes=16 * 2**20, **limits) for plan in (small, large, windows)]
    assert [sized.concurrency for sized in alone] == [64, 41, 64]
    agreed = size_stages((small, large, windows), budget_bytes=16 * 2**20, **limits)
    assert [(sized.concurrency, sized.max_running_requests) for sized in agreed] == [(41, 41)] * 3
    for before, after in zip(alone, agreed, strict=True):
        assert after.layout.arena_bytes >= before.layout.arena_bytes


@pytest.mark.requirement("S1", "S4")
def test_stages_take_every_argument_that_a_plan_does(make_plan: MakePlan) -> None:
    """A pipeline of one stage is no pipeline: whatever divides a budget divides each stage's."""
    own, stages = (set(inspect.signature(one).parameters) for one in (size_plan, size_stages))
    assert stages - {"plans"} == own - {"plan"}
    plan = make_plan(16, state=400, full=64)
    limits: dict[str, Any] = {"max_running_requests": 4, "max_context_tokens": 64, "chunk_tokens": 16}
    for more in (
        {"reserved_bytes": 30_000},
        {"beside_arena": {"staging": 9}},
        {"state_slots": 3},
        {"state_share": 0.25},
    ):
        asked = {"budget_bytes": 100_000, **limits, **more}
        assert size_stages((plan,), **asked) == (size_plan(plan, **asked),)


@pytest.mark.requirement("S1")
def test_reserved_bytes_are_left_alone(make_plan: MakePlan) -> None:
    """Activations and graphs need them; they stand among the terms that no band can take."""
    limits: dict[str, Any] = {"max_running_requests": 4, "max_context_tokens": 64, "chunk_tokens": 16}
    plan = make_plan(16, full=64)
    kept = size_plan(plan, budget_bytes=100_000, reserved_bytes=30_000, **limits)
    less = size_plan(plan, budget_bytes=70_000, **limits)
    assert kept.layout == less.layout
    assert {term.name: term.byte_count for term in kept.fixed}["reserved"] == 30_000
    with pytest.raises(SizingError, match=r"; reserved 99999; missing \d+ bytes$"):
        size_plan(plan, budget_bytes=100_000, reserved_bytes=99_999, **limits)


@pytest.mark.requirement("S2")
def test_a_window_beyond_the_context_costs_the_floor_no_more_than_the_context(make_plan: MakePlan) -> None:
    """A model with a window of a million tokens serves requests of 64 in a small budget."""
    plan = make_plan(16, windows={2**20: 64}, full=64)
    sized = size_plan(
        plan, budget_bytes=30_000, max_running_requests=1, max_context_tokens=64, chunk_tokens=64
    )
    assert all(target.unit_count >= 4 for target in sized.targets)


@pytest.mark.requirement("S1")
@pytest.mark.parametrize("value", [0, -0.5, 1.5, True, "half", float("nan")])
def test_a_share_that_is_none_is_refused(make_plan: MakePlan, value: Any) -> None:
    """More than the whole chain, or nothing of it."""
    limits: dict[str, Any] = {"max_running_requests": 2, "max_context_tokens": 8, "chunk_tokens": 4}
    with pytest.raises(SizingError) as caught:
        size_plan(make_plan(4, state=16, full=16), budget_bytes=10_000, state_share=value, **limits)
    assert str(caught.value) == f"state_share must lie in (0, 1], found {value!r}"
    with pytest.raises(SizingError, match=r"state_slots = 3 and state_share = 0.5 exclude one another"):
        size_plan(
            make_plan(4, state=16, full=16), budget_bytes=10_000, state_slots=3, state_share=0.5, **limits
        )


def terms_of(text: str) -> list[int]:
    """The byte counts that a refusal lists between its first colon and what is missing; `3 × 32 bytes` counts as 96."""
    listed = text.split(" bytes: ", 1)[1].rsplit("; missing ", 1)[0]
    products = [int(count) * int(unit) for count, unit in re.findall(r"(\d+) × (\d+) bytes of '", listed)]
    others = [int(number) for number in re.findall(r" (\d+)(?:;|$)", listed)]
    return products + others


@pytest.mark.requirement("S2")
@EXHAUSTIVE
@given(shape=SHAPES, limits=LIMITS, beside=st.integers(0, 300))
def test_a_refusal_lists_every_term_and_exactly_the_missing_bytes(
    make_plan: MakePlan, shape: dict[str, Any], limits: dict[str, int], beside: int
) -> None:
    """Its reader wants one number to raise the budget by, and to see which term to shrink instead."""
    plan = shape_plan(make_plan, shape)
    text = sized_or_refused(plan, 1, limits, beside_arena={"staging": beside})
    assert isinstance(text, str)
    assert "\n" not in text
    for pool in plan.sub_pools:
        assert f" × {pool.unit.unit_bytes} bytes of '{pool.name}'" in text
        assert f"; mirror of ids:{pool.name} " in text
    for name in (": sinks ", "; alignment between bands ", "; mirror of rows ", f"; staging {beside}"):
        assert name in text
    missing = int(text.rsplit("missing ", 1)[1].removesuffix(" bytes"))
    floor_bytes = 1 + missing
    assert sum(terms_of(text)) == floor_bytes
    assert f"below the floor of one request at batch size 1, {floor_bytes} bytes: " in text

    assert isinstance(
        sized_or_refused(plan, floor_bytes, limits, beside_arena={"staging": beside}), SizedPlan
    )
    one_short = sized_or_refused(plan, floor_bytes - 1, limits, beside_arena={"staging": beside})
    assert isinstance(one_short, str)
    assert one_short.endswith("; missing 1 bytes")


@pytest.mark.requirement("S2")
@EXHAUSTIVE
@given(shape=SHAPES, limits=LIMITS)
def test_the_floor_holds_one_request_token_by_token(
    make_plan: MakePlan, shape: dict[str, Any], limits: dict[str, int]
) -> None:
    """Its window rows, its slot and a page to write to: the longest request decodes on to its end in the windows."""
    plan = shape_plan(make_plan, shape)
    text = sized_or_refused(plan, 1, limits)
    assert isinstance(text, str)
    counts = [int(count) for count in re.findall(r"(\d+) × \d+ bytes of '", text)]
    longest = limits["max_context_tokens"]
    decoding = request_demand(plan, prompt_tokens=1, output_tokens=longest, chunk_tokens=1).units
    expected = [
        units if pool.window_tokens else 1 for pool, units in zip(plan.sub_pools, decoding, strict=True)
    ]
    assert counts == expected


@pytest.mark.requirement("S2")
@EXHAUSTIVE
@given(shape=SHAPES.filter(lambda shape: shape["state"]), limits=LIMITS, state_slots=st.integers(2, 50))
def test_state_slots_that_do_not_fit_are_refused_with_every_term_too(
    make_plan: MakePlan, shape: dict[str, Any], limits: dict[str, int], state_slots: int
) -> None:
    """Slots asked for by count are a promise; fewer in silence would break it."""
    plan = shape_plan(make_plan, shape)
    floor = sized_or_refused(plan, 1, limits)
    assert isinstance(floor, str)
    budget_bytes = 1 + int(floor.rsplit("missing ", 1)[1].removesuffix(" bytes"))
    text = sized_or_refused(plan, budget_bytes, limits, state_slots=state_slots)
    if not isinstance(text, str):
        return
    assert f"{state_slots} state slots and a page of each attention band" in text
    missing = int(text.rsplit("missing ", 1)[1].removesuffix(" bytes"))
    assert sum(terms_of(text)) == budget_bytes + missing
    assert isinstance(
        sized_or_refused(plan, budget_bytes + missing, limits, state_slots=state_slots), SizedPlan
    )
    assert isinstance(
        sized_or_refused(plan, budget_bytes + missing - 1, limits, state_slots=state_slots), str
    )


@pytest.mark.requirement("S1")
@EXHAUSTIVE
@given(shape=SHAPES, limits=LIMITS, arena_bytes=st.integers(1, 1500), data=st.data())
def test_requests_that_fit_is_the_last_count_that_packs(
    make_plan: MakePlan, shape: dict[str, Any], limits: dict[str, int], arena_bytes: int, data: st.DataObject
) -> None:
    """The printed number is a promise in both directions: that many fit beside what others hold, and no more."""
    plan = shape_plan(make_plan, shape)
    prefix_bytes = sum(pool.unit.unit_bytes for pool in plan.sub_pools if pool.has_sink)
    layout = lay_out(plan, prefix_bytes + arena_bytes)
    demand = KVDemand(tuple(data.draw(st.integers(1, 5)) for _ in plan.sub_pools))
    beside = KVDemand(tuple(data.draw(st.sampled_from([0, 0, 1, 4])) for _ in plan.sub_pools))

    def last_that_packs(held: tuple[int, ...]) -> int:
        count = 0
        while (
            pack(layout, [(count + 1) * units + h for units, h in zip(demand.units, held, strict=True)])
            is not None
        ):
            count += 1
        return count

    assert requests_that_fit(layout, demand) == last_that_packs((0,) * len(beside.units))
    assert requests_that_fit(layout, demand, beside=beside) == last_that_packs(beside.units)


@pytest.mark.requirement("S1")
def test_a_real_budget_by_hand(make_plan: MakePlan) -> None:
    """A gibibyte over one band of 64 KiB pages: two tables of 4 bytes an entry, 24 bytes a row, and the sink, come off first."""
    plan = make_plan(16, full=4096)
    sized = size_plan(
        plan, budget_bytes=2**30, max_running_requests=256, max_context_tokens=8192, chunk_tokens=512
    )
    rows_bytes = 4 * 256 * 512
    row_state_bytes = 256 * 24
    ids_bytes = 4 * 16374
    assert {term.name: (term.byte_count, term.in_arena) for term in sized.fixed} == {
        "reserved prefix (sinks)": (65_536, True),
        "mirror of rows": (rows_bytes, False),
        "mirror of ids:full": (ids_bytes, False),
        "row state": (row_state_bytes, False),
    }
    beside = rows_bytes + ids_bytes + row_state_bytes
    assert sized.used_bytes == 2**30
    assert sized.targets[0].unit_count == (2**30 - beside - 65_536) // 65_536 == 16_373
    assert sized.pages_per_row == 512


@pytest.mark.requirement("S2")
@pytest.mark.parametrize(
    "name", ["budget_bytes", "max_running_requests", "max_context_tokens", "chunk_tokens", "state_slots"]
)
@pytest.mark.parametrize("value", [0, -5, True, 2.5])
def test_senseless_arguments_are_refused_naming_them(make_plan: MakePlan, name: str, value: Any) -> None:
    """A budget of a bool or a float is a slip of the caller."""
    arguments: dict[str, Any] = {
        "budget_bytes": 10_000,
        "max_running_requests": 2,
        "max_context_tokens": 8,
        "chunk_tokens": 4,
        name: value,
    }
    with pytest.raises(SizingError) as caught:
        size_plan(make_plan(4, state=16, full=16), **arguments)
    assert str(caught.value) == f"{name} must be a positive integer, found {value!r}"


@pytest.mark.requirement("S1")
@pytest.mark.parametrize("value", [-1, True, 0.5])
def test_senseless_bytes_beside_the_arena_are_refused_naming_them(make_plan: MakePlan, value: Any) -> None:
    """A negative term would grow the arena past the budget."""
    with pytest.raises(SizingError) as caught:
        size_plan(
            make_plan(4, full=16),
            budget_bytes=10_000,
            max_running_requests=1,
            max_context_tokens=4,
            chunk_tokens=4,
            beside_arena={"staging": value},
        )
    assert str(caught.value) == f"beside_arena['staging'] must be an integer of 0 or more, found {value!r}"
