"""A length is priced for the worst of its splits into prompt and output, in every band and under every policy (S1, S5)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtide.plan import KVStoragePlan
from kvtide.sizing import (
    CHECKPOINT_RULES,
    CheckpointStrategy,
    ChunkReads,
    KVDemand,
    ServingPolicy,
    SizingError,
    context_demand,
    demand,
    request_demand,
    size_stages,
)

from .test_demand_mutants import module_of, mutants

MakePlan = Callable[..., KVStoragePlan]
EVERY_SPLIT = settings(deadline=None, max_examples=400)


@attrs.frozen(kw_only=True)
class Length:
    """A plan with a band of every kind, a length and a policy."""

    page: int
    ratio: int
    window: int
    stretch_pages: int
    interval_pages: int
    tokens: int
    chunk: int
    rule: tuple[CheckpointStrategy, bool]
    reads: ChunkReads
    draft: int

    @property
    def interval(self) -> int:
        return self.page * self.ratio * self.interval_pages

    @property
    def stretch(self) -> int:
        return self.page * self.stretch_pages

    @property
    def runs(self) -> bool:
        longer, shorter = max(self.interval, self.stretch), min(self.interval, self.stretch)
        return longer % shorter == 0 and (
            not CHECKPOINT_RULES[self.rule].on_grid or self.chunk >= self.interval
        )

    def plan(self, make_plan: MakePlan) -> KVStoragePlan:
        return make_plan(
            self.page * self.ratio,
            state=16,
            windows={self.window: 16},
            chunks={self.stretch: 16},
            full=16,
            interval=self.interval,
            window_page_tokens=self.page,
        )

    def asked(self) -> dict[str, Any]:
        strategy, overlap = self.rule
        policy = ServingPolicy(
            chunk_reads=self.reads, strategy=strategy, overlap=overlap, draft_tokens=self.draft
        )
        return {"chunk_tokens": self.chunk, "policy": policy}

    def priced(self, make_plan: MakePlan, price: Callable[..., KVDemand] = context_demand) -> tuple[int, ...]:
        return price(self.plan(make_plan), context_tokens=self.tokens, **self.asked()).units

    def worst(self, make_plan: MakePlan) -> tuple[int, ...]:
        """The most of each band over every split, tried one by one."""
        plan = self.plan(make_plan)
        splits = [
            request_demand(
                plan, prompt_tokens=prompt, output_tokens=self.tokens - prompt + 1, **self.asked()
            ).units
            for prompt in range(1, self.tokens + 1)
        ]
        return tuple(max(counts) for counts in zip(*splits, strict=True))


LENGTHS = st.builds(
    Length,
    page=st.integers(1, 4),
    ratio=st.sampled_from([1, 2]),
    window=st.integers(1, 30),
    stretch_pages=st.sampled_from([1, 2, 4, 8]),
    interval_pages=st.sampled_from([1, 2, 4]),
    tokens=st.integers(1, 90),
    chunk=st.integers(1, 40),
    rule=st.sampled_from(sorted(CHECKPOINT_RULES, key=str)),
    reads=st.sampled_from(ChunkReads),
    draft=st.sampled_from([0, 0, 1, 3]),
)


@pytest.mark.requirement("S1", "S5")
@EVERY_SPLIT
@given(length=LENGTHS)
def test_a_length_is_priced_for_the_worst_of_all_its_splits(make_plan: MakePlan, length: Length) -> None:
    """Less, and a capacity is printed that some prompt of that length breaks; more, and room is left unused."""
    assume(length.runs)
    assert length.priced(make_plan) == length.worst(make_plan)


@pytest.mark.requirement("S1", "S5")
@EVERY_SPLIT
@given(length=LENGTHS)
def test_a_longer_length_never_costs_less(make_plan: MakePlan, length: Length) -> None:
    """A longer prompt may, but every split of a length is one of a longer length too, cut short."""
    assume(length.runs)
    longer = attrs.evolve(length, tokens=length.tokens + 1)
    pairs = zip(length.priced(make_plan), longer.priced(make_plan), strict=True)
    assert all(less <= more for less, more in pairs)


@pytest.mark.requirement("S1", "S5")
@pytest.mark.parametrize(
    ("page", "interval", "asked", "pages"),
    [
        (128, 1024, {"context_tokens": 8192, "chunk_tokens": 2000}, 17),
        (256, 768, {"context_tokens": 10_000, "chunk_tokens": 2048}, 9),
    ],
)
def test_the_worst_prompt_may_lie_in_the_middle(
    make_plan: MakePlan, page: int, interval: int, asked: dict[str, int], pages: int
) -> None:
    """DeepSeek V4 by hand: a last chunk need not end on the grid, so it is longest for prompts of a multiple and a chunk.

    Behind 1,024 × k tokens a chunk of 2,000, and 127 tokens before it: 1 + 16 pages of 128. A prompt of 8,192 ends in chunks of
    1,024, which hold 9. With 768 and pages of 256: 2,048 tokens are 8, and one page before them.
    """
    plan = make_plan(page, state=16, windows={128: 16}, full=16, interval=interval)
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER)
    assert context_demand(plan, **asked, policy=policy).units[1] == pages


@pytest.mark.requirement("S5")
def test_no_prompt_that_a_length_is_priced_for_can_be_left_out(make_plan: MakePlan) -> None:
    """Each candidate, and each term that finds one, is the worst split of some length."""
    chosen = random.Random(5)
    lengths: list[Length] = []
    while len(lengths) < 1200:
        length = Length(
            page=chosen.randint(1, 4),
            ratio=chosen.choice([1, 2]),
            window=chosen.randint(1, 20),
            stretch_pages=chosen.choice([1, 2, 4, 8]),
            interval_pages=chosen.choice([1, 2, 4]),
            tokens=chosen.randint(1, 50),
            chunk=chosen.randint(1, 30),
            rule=chosen.choice(sorted(CHECKPOINT_RULES, key=str)),
            reads=chosen.choice(list(ChunkReads)),
            draft=chosen.choice([0, 0, 1, 3]),
        )
        if length.runs:
            lengths.append(length)
    worst = {length: length.worst(make_plan) for length in lengths}
    survivors, tried = [], 0
    for name, tree in mutants(demand, {"context_demand", "_worst_prompts", "_before_turn"}):
        tried += 1
        changed = module_of(tree, demand).context_demand
        if all(finds(length, make_plan, changed, worst[length]) for length in lengths):
            survivors.append(name)
    assert survivors == []
    assert tried > 10


def finds(
    length: Length, make_plan: MakePlan, price: Callable[..., KVDemand], worst: tuple[int, ...]
) -> bool:
    """Whether `price` is right."""
    try:
        return length.priced(make_plan, price) == worst
    except (ArithmeticError, IndexError, RecursionError, SizingError, TypeError, ValueError):
        return False


@pytest.mark.requirement("S5")
@pytest.mark.parametrize("name", ["context_tokens", "chunk_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8"])
def test_a_senseless_length_is_refused_by_its_name(make_plan: MakePlan, name: str, value: Any) -> None:
    """A caller that asks for a length is not told of a prompt it never gave."""
    asked: dict[str, Any] = {"context_tokens": 8, "chunk_tokens": 8, name: value}
    with pytest.raises(SizingError) as caught:
        context_demand(make_plan(4, full=16), **asked)
    assert str(caught.value) == f"{name} must be a positive integer, found {value!r}"


@pytest.mark.requirement("S4", "S5")
@EVERY_SPLIT
@given(length=LENGTHS, has_state_first=st.booleans())
def test_a_stage_without_state_retains_what_the_whole_model_does(
    make_plan: MakePlan, length: Length, has_state_first: bool
) -> None:
    """A hit on a checkpoint goes on in every stage, so each keeps its windows for it, whichever stage has the states."""
    assume(length.runs)
    windows = make_plan(
        length.page * length.ratio,
        windows={length.window: 16},
        chunks={length.stretch: 16},
        full=16,
        window_page_tokens=length.page,
    )
    states = make_plan(length.page * length.ratio, state=16, full=16, interval=length.interval)
    stages = (states, windows) if has_state_first else (windows, states)
    asked = length.asked()
    sized = size_stages(
        stages, budget_bytes=10**6, max_running_requests=2, max_context_tokens=length.tokens, **asked
    )
    whole = length.plan(make_plan)
    stage = sized[stages.index(windows)]
    assert stage.context_demand(length.tokens).units == length.priced(make_plan)[1:]
    request = {"prompt_tokens": 1, "output_tokens": length.tokens}
    assert stage.demand(**request).units == request_demand(whole, **request, **asked).units[1:]


@pytest.mark.requirement("S4")
def test_a_grid_that_a_plan_could_not_keep_is_refused(make_plan: MakePlan) -> None:
    """What planning refuses of a plan with state, sizing refuses where the interval comes with the policy."""
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER, checkpoint_interval=24)
    asked: dict[str, Any] = {"context_tokens": 64, "chunk_tokens": 64, "policy": policy}
    with pytest.raises(
        SizingError, match="page_tokens = 16 does not divide checkpoint_interval = 24: a checkpoint"
    ):
        context_demand(make_plan(16, windows={8: 16}), **asked)
    with pytest.raises(
        SizingError, match="= 24 and the attention chunk of 16 tokens must divide one another"
    ):
        context_demand(make_plan(8, chunks={16: 16}), **asked)
    with pytest.raises(SizingError, match="checkpoint_interval = 24 and the plan's = 8 differ: one model"):
        context_demand(make_plan(8, state=16, interval=8), **asked)
    for senseless in (0, -1, True, 2.5):
        with pytest.raises(
            SizingError, match=f"checkpoint_interval must be a positive integer or None, found {senseless!r}"
        ):
            attrs.evolve(policy, checkpoint_interval=senseless)
