"""A byte budget is divided exactly: against trying every arena and every target, on numbers small enough to try (S1, S2)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.plan import ArenaLayout, KVStoragePlan, lay_out, pack
from kvtide.sizing import (
    KVDemand,
    SizedPlan,
    SizingError,
    request_demand,
    requests_that_fit,
    size_plan,
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
    owner = "full" if any(pool.name == "full" for pool in plan.sub_pools) else None
    if owner is None:
        windows = [pool for pool in plan.sub_pools if pool.window_tokens]
        owner = max(windows, key=lambda pool: pool.window_tokens or 0).name if windows else None
    for band in layout.bands:
        if band.page_tokens is None:
            entries += max(0, band.page_count - band.first_page)
        else:
            assert owner is not None
            entries += 1 + max(0, layout.band(owner).page_count - layout.band(owner).first_page)
    return 4 * entries


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


@pytest.mark.requirement("S1")
@EXHAUSTIVE
@given(
    shape=SHAPES,
    limits=LIMITS,
    budget_bytes=st.integers(200, 4000),
    state_slots=st.none() | st.integers(1, 6),
)
def test_targets_are_the_best_of_all_that_pack(
    make_plan: MakePlan,
    shape: dict[str, Any],
    limits: dict[str, int],
    budget_bytes: int,
    state_slots: int | None,
) -> None:
    """The stated objective, tried from the top: slots first, then full attention with its windows beside it."""
    plan = shape_plan(make_plan, shape)
    sized = sized_or_refused(plan, budget_bytes, limits, state_slots=state_slots)
    if isinstance(sized, str):
        return
    longest = request_demand(
        plan,
        prompt_tokens=limits["max_context_tokens"],
        output_tokens=1,
        chunk_tokens=limits["chunk_tokens"],
    )
    window_peaks = [limits["max_running_requests"] * units for units in longest.units]
    owner_place = len(plan.sub_pools) - 1 if shape["full"] else (1 if shape["state"] else 0)

    def targets(slots: int, owner_pages: int) -> tuple[int, ...]:
        return tuple(
            slots
            if pool.page_tokens is None
            else owner_pages
            if place == owner_place
            else min(owner_pages, window_peaks[place])
            for place, pool in enumerate(plan.sub_pools)
        )

    def packs(slots: int, owner_pages: int) -> bool:
        return pack(sized.layout, targets(slots, owner_pages)) is not None

    tried = [slots for slots in range(1, limits["max_running_requests"] + 1) if packs(slots, slots)]
    slots = state_slots or tried[-1]
    most = max([pages for pages in range(1, budget_bytes // 16 + 1) if packs(slots, pages)])
    assert tuple(target.unit_count for target in sized.targets) == targets(slots, most)
    for target, pool in zip(sized.targets, plan.sub_pools, strict=True):
        assert target.name == pool.name
        assert target.token_count == (pool.page_tokens and pool.page_tokens * target.unit_count)


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
    """Its window rows, its slot and a page to write to: a request that is long enough decodes on forever in the windows."""
    plan = shape_plan(make_plan, shape)
    text = sized_or_refused(plan, 1, limits)
    assert isinstance(text, str)
    counts = [int(count) for count in re.findall(r"(\d+) × \d+ bytes of '", text)]
    decoding = request_demand(plan, prompt_tokens=1, output_tokens=1000, chunk_tokens=1).units
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
    """The printed number is a promise in both directions: that many fit, and no more."""
    plan = shape_plan(make_plan, shape)
    prefix_bytes = sum(pool.unit.unit_bytes for pool in plan.sub_pools if pool.has_sink)
    layout = lay_out(plan, prefix_bytes + arena_bytes)
    demand = KVDemand(tuple(data.draw(st.integers(1, 5)) for _ in plan.sub_pools))
    count = 0
    while pack(layout, [(count + 1) * units for units in demand.units]) is not None:
        count += 1
    assert requests_that_fit(layout, demand) == count


@pytest.mark.requirement("S1")
def test_a_real_budget_by_hand(make_plan: MakePlan) -> None:
    """A gibibyte over one band of 64 KiB pages: two tables of 4 bytes an entry, and the sink, come off first."""
    plan = make_plan(16, full=4096)
    sized = size_plan(
        plan, budget_bytes=2**30, max_running_requests=256, max_context_tokens=8192, chunk_tokens=512
    )
    rows_bytes = 4 * 256 * 512
    ids_bytes = 4 * (1 + 16374)
    assert {term.name: (term.byte_count, term.in_arena) for term in sized.fixed} == {
        "reserved prefix (sinks)": (65_536, True),
        "mirror of rows": (rows_bytes, False),
        "mirror of ids:full": (ids_bytes, False),
    }
    assert sized.used_bytes == 2**30
    assert sized.targets[0].unit_count == (2**30 - rows_bytes - ids_bytes - 65_536) // 65_536 == 16_374
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
