"""What a request holds at most, against every life it could lead, lived token by token (S5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.plan import KVStoragePlan
from kvtide.sizing import SizingError, request_demand

MakePlan = Callable[..., KVStoragePlan]
EVERY_LIFE = settings(deadline=None, max_examples=200)


def every_chunking(prompt_tokens: int, chunk_tokens: int) -> Iterator[tuple[int, ...]]:
    """Every way in which a scheduler may cut a prompt into chunks."""
    if not prompt_tokens:
        yield ()
    for first in range(1, min(prompt_tokens, chunk_tokens) + 1):
        for rest in every_chunking(prompt_tokens - first, chunk_tokens):
            yield (first, *rest)


def most_pages_held(steps: tuple[int, ...], page_tokens: int, window_tokens: int | None) -> int:
    """Live one request: each forward writes its tokens' pages, and once processed drops those no later token reads."""
    held: set[int] = set()
    most, length = 0, 0
    for token_count in steps:
        for token in range(length, length + token_count):
            held.add(token // page_tokens)
        most = max(most, len(held))
        length += token_count
        if window_tokens is not None:
            first_readable = length - window_tokens + 1
            held = {
                page
                for page in held
                if any(
                    token >= first_readable for token in range(page * page_tokens, (page + 1) * page_tokens)
                )
            }
    return most


@pytest.mark.requirement("S5")
@EVERY_LIFE
@given(
    counts=st.fixed_dictionaries(
        {
            "prompt_tokens": st.integers(1, 9),
            "output_tokens": st.integers(1, 6),
            "chunk_tokens": st.integers(1, 10),
        }
    ),
    window_tokens=st.integers(1, 10),
    page_tokens=st.integers(1, 5),
)
def test_the_demand_is_the_most_that_any_chunking_reaches(
    make_plan: MakePlan, counts: dict[str, Any], window_tokens: int, page_tokens: int
) -> None:
    """One page less and an admitted request is refused a page mid-way; one more and a request waits for nothing."""
    demand = request_demand(make_plan(page_tokens, state=16, windows={window_tokens: 16}, full=16), **counts)
    # The last token generated is returned, never fed back.
    decode = (1,) * (counts["output_tokens"] - 1)
    lives = [(*chunks, *decode) for chunks in every_chunking(counts["prompt_tokens"], counts["chunk_tokens"])]
    windows = [most_pages_held(steps, page_tokens, window_tokens) for steps in lives]
    fulls = {most_pages_held(steps, page_tokens, None) for steps in lives}
    assert demand.units == (1, max(windows), *fulls)


@pytest.mark.requirement("S5")
@given(
    prompt_tokens=st.integers(1, 10**6),
    output_tokens=st.integers(1, 10**6),
    chunk_tokens=st.integers(1, 10**5),
    page_tokens=st.sampled_from([1, 16, 64]),
)
def test_in_plain_windows_more_prompt_output_or_chunk_never_demands_less(
    make_plan: MakePlan, prompt_tokens: int, output_tokens: int, chunk_tokens: int, page_tokens: int
) -> None:
    """Under the plainest policy. Elsewhere a longer prompt may hold less: with a grid its last chunk may be shorter, and at the end
    of an attention chunk all of it retires. The output limit, which the memory clip bisects over, never does
    (`test_a_longer_output_never_demands_less`).
    """
    plan = make_plan(page_tokens, windows={1024: 16, 128: 16}, full=16)

    def demand(prompt: int, output: int, chunk: int) -> tuple[int, ...]:
        return request_demand(plan, prompt_tokens=prompt, output_tokens=output, chunk_tokens=chunk).units

    least = demand(prompt_tokens, output_tokens, chunk_tokens)
    for more in (
        demand(prompt_tokens + 1, output_tokens, chunk_tokens),
        demand(prompt_tokens, output_tokens + 1, chunk_tokens),
        demand(prompt_tokens, output_tokens, chunk_tokens + 1),
    ):
        assert all(few <= many for few, many in zip(least, more, strict=True))


@pytest.mark.requirement("S5")
def test_a_window_larger_than_the_request_demands_what_full_attention_does(make_plan: MakePlan) -> None:
    """Nothing retires before the request ends, so nothing may be saved."""
    plan = make_plan(16, windows={4096: 16}, full=16)
    demand = request_demand(plan, prompt_tokens=1000, output_tokens=1000, chunk_tokens=256)
    assert demand.units == (125, 125)


@pytest.mark.requirement("S5")
def test_a_long_request_by_hand(make_plan: MakePlan) -> None:
    """8,192 tokens in, 1,024 out, chunks of 512, window 1,024, pages of 16.

    Full: 9,215 tokens written, 576 pages. Window: 1,023 kept tokens and a chunk of 512 are 1,535 tokens, which in the
    worst place touch (1,535 + 15) / 16, rounded up, 97 pages.
    """
    plan = make_plan(16, state=16, windows={1024: 16}, full=16)
    demand = request_demand(plan, prompt_tokens=8192, output_tokens=1024, chunk_tokens=512)
    assert demand.units == (1, 97, 576)


@pytest.mark.requirement("S5")
@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens", "chunk_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8"])
def test_senseless_counts_are_refused_naming_them(make_plan: MakePlan, name: str, value: Any) -> None:
    """A demand of nothing would admit everything."""
    counts: dict[str, Any] = {"prompt_tokens": 8, "output_tokens": 8, "chunk_tokens": 8, name: value}
    with pytest.raises(SizingError) as caught:
        request_demand(make_plan(4, full=16), **counts)
    assert str(caught.value) == f"{name} must be a positive integer, found {value!r}"
