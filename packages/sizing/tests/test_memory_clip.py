"""The longest request that an empty arena serves, against every length tried one by one (K6)."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvtide.plan import KVStoragePlan, lay_out, pack
from kvtide.sizing import (
    CheckpointStrategy,
    ChunkReads,
    ServingPolicy,
    SizedPlan,
    SizingError,
    request_demand,
)
from kvtide.sizing.clip import longest_that_fits, prompt_period

from .test_context_demand import LENGTHS, Length

MakePlan = Callable[..., KVStoragePlan]
EVERY_LENGTH = settings(deadline=None, max_examples=300)


def sized_over(plan: KVStoragePlan, arena_bytes: int, context_tokens: int, length: Length) -> SizedPlan:
    """What sizing would yield for an arena of exactly so many bytes; what a clip never looks at is left empty."""
    asked = length.asked()
    return SizedPlan(
        plan=plan,
        layout=lay_out(plan, arena_bytes),
        budget_bytes=arena_bytes,
        fixed=(),
        targets=(),
        max_running_requests=1,
        max_context_tokens=context_tokens,
        chunk_tokens=asked["chunk_tokens"],
        policy=asked["policy"],
        concurrency=1,
    )


def served(sized: SizedPlan, prompt: int, output: int, chunk: int | None = None) -> bool:
    """Whether such a request fits alone, by the demand function and the packing alone; in the shortest chunks unless told otherwise."""
    units = request_demand(
        sized.plan,
        prompt_tokens=prompt,
        output_tokens=output,
        chunk_tokens=sized.least_chunk_tokens if chunk is None else chunk,
        policy=sized.policy,
    ).units
    return prompt + output <= sized.max_context_tokens and pack(sized.layout, units) is not None


LENGTH = Length(
    page=4,
    ratio=1,
    window=4,
    stretch_pages=1,
    interval_pages=2,
    tokens=16,
    chunk=8,
    rule=(CheckpointStrategy.NONE, False),
    reads=ChunkReads.PAGES,
    draft=0,
)
"""Any length: for questions that set what they need themselves."""
NOTHING_DRAFTED_IN_ACTIVATIONS = attrs.evolve(
    LENGTH,
    ratio=2,
    window=1,
    stretch_pages=4,
    interval_pages=4,
    chunk=22,
    rule=(CheckpointStrategy.NONE, True),
    reads=ChunkReads.ACTIVATIONS,
)


@attrs.frozen(kw_only=True)
class Question:
    """A plan with a band of every kind, an arena's size and one side of a request."""

    length: Length
    arena_bytes: int
    tokens: int

    def sized(self, make_plan: MakePlan) -> SizedPlan:
        plan = self.length.plan(make_plan)
        smallest = sum(pool.unit.unit_bytes for pool in plan.sub_pools)
        return sized_over(plan, smallest + self.arena_bytes, self.length.tokens, self.length)


QUESTIONS = st.builds(
    Question, length=LENGTHS, arena_bytes=st.integers(16, 12_000), tokens=st.integers(1, 70)
)


@pytest.mark.requirement("K6")
@EVERY_LENGTH
@given(question=QUESTIONS)
def test_the_clip_is_the_most_output_that_fits(make_plan: MakePlan, question: Question) -> None:
    """A token more is aborted half-way or never admitted, a token less is an answer cut short for nothing."""
    assume(question.length.runs)
    sized = question.sized(make_plan)
    fitting = [
        output for output in range(1, sized.max_context_tokens + 1) if served(sized, question.tokens, output)
    ]
    assert sized.max_new_tokens_for_memory(question.tokens) == max(fitting, default=0)
    assert fitting == list(range(1, len(fitting) + 1))
    for output in (len(fitting), len(fitting) + 1):
        if output:
            assert sized.fits_alone(prompt_tokens=question.tokens, output_tokens=output) == (
                output in fitting
            )


@pytest.mark.requirement("K6")
@EVERY_LENGTH
@given(question=QUESTIONS)
def test_the_longest_prompt_is_the_longest_that_fits(make_plan: MakePlan, question: Question) -> None:
    """Whoever is told a length will send it, whatever becomes of the lengths around it."""
    assume(question.length.runs)
    sized = question.sized(make_plan)
    fitting = [
        prompt for prompt in range(1, sized.max_context_tokens + 1) if served(sized, prompt, question.tokens)
    ]
    assert sized.max_prompt_tokens_for_memory(question.tokens) == max(fitting, default=0)


@pytest.mark.requirement("K6")
@EVERY_LENGTH
@example(length=NOTHING_DRAFTED_IN_ACTIVATIONS, output=4, stretches=False)
@given(length=LENGTHS, output=st.integers(1, 10), stretches=st.booleans())
def test_a_prompt_costs_no_less_a_period_later(
    make_plan: MakePlan, length: Length, output: int, stretches: bool
) -> None:
    """The longest prompt is looked for within one period of one that fits, which is right only while this holds. The example is one
    that seldom comes up: a first decode forward on top of a last chunk of which only the tail is in pages.
    """
    assume(length.runs)
    plan, asked = length.plan(make_plan), length.asked()
    if not stretches:
        plan = attrs.evolve(
            plan, sub_pools=tuple(pool for pool in plan.sub_pools if pool.chunk_tokens is None)
        )
    prices = [
        request_demand(plan, prompt_tokens=prompt, output_tokens=output, **asked).units
        for prompt in range(1, 80)
    ]
    period = prompt_period(plan, asked["policy"])
    for price, later in zip(prices, prices[period:], strict=False):
        assert all(less <= more for less, more in zip(price, later, strict=True))


@pytest.mark.requirement("K6")
@settings(deadline=None)
@given(last=st.lists(st.integers(-5, 60), min_size=1, max_size=6), most=st.integers(-1, 50))
def test_of_lengths_that_fit_to_a_limit_of_their_own_each_the_longest_is_found(
    last: list[int], most: int
) -> None:
    """One limit for each remainder of the period: whatever fits does so a period less too, and nothing else is known."""

    def fits(length: int) -> bool:
        return length <= last[length % len(last)]

    brute = max((length for length in range(1, most + 1) if fits(length)), default=0)
    assert longest_that_fits(lambda length: length == 0 or fits(length), most, len(last)) == brute


@pytest.mark.requirement("K6")
def test_a_longer_prompt_may_fit_where_a_shorter_one_does_not(make_plan: MakePlan) -> None:
    """By hand: pages of a token, a window of 4, chunks of 12, a checkpoint every 8, room for 11 window pages. A prompt of 12 is one
    chunk; one of 13 to 16 is cut at 8, and its last chunk holds 3 tokens before it and 8 of its own at most. So it is 8 tokens on.
    In chunks of 8, the shortest there are, all of them fit, and that is what a request is clipped to.
    """
    plan = make_plan(1, state=16, windows={4: 1600}, full=16, interval=8)
    policy = ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER)
    # Sinks and state slots end inside the window's second page.
    arena_bytes = (2 + 11) * 1600 + 100 * 16
    sized = attrs.evolve(sized_over(plan, arena_bytes, 101, LENGTH), chunk_tokens=12, policy=policy)
    fitting = [prompt for prompt in range(1, 101) if served(sized, prompt, 1, chunk=12)]
    assert fitting == [*range(1, 12), *(8 * interval + n for interval in range(1, 12) for n in range(5, 9))]
    assert longest_that_fits(lambda n: n == 0 or n in fitting, 100, prompt_period(plan, policy)) == 96
    assert sized.least_chunk_tokens == 8
    assert sized.max_prompt_tokens_for_memory(1) == 100


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, None])
def test_a_senseless_length_is_refused_by_its_name(make_plan: MakePlan, tokens: int) -> None:
    """Zero would be read as "no output fits"."""
    sized = sized_over(make_plan(4, full=4), 1000, 16, LENGTH)
    with pytest.raises(SizingError, match="prompt_tokens must be a positive integer"):
        sized.max_new_tokens_for_memory(tokens)
    with pytest.raises(SizingError, match="output_tokens must be a positive integer"):
        sized.max_prompt_tokens_for_memory(tokens)
