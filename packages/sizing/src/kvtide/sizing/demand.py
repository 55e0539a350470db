"""What one request holds at most, in units of each band (row S5, simple form).

A request writes `prompt + output - 1` tokens: the last one generated is returned, never fed back. Prefill writes it in
chunks of up to `chunk_tokens`; decode one token a step. After each forward is processed, window pages wholly behind the
window are retired, so while a forward of n tokens runs at length L, a window of W holds the pages that cover tokens
[L - W + 1, L + n): a run of at most W - 1 + n tokens.

A run of m tokens within the first t touches at most ceil((m + p - 1) / p) pages of p tokens, or all ceil(t / p) there are;
some start reaches the smaller of the two. So the peak below is exact for the worst chunking, and a bound for every other.
"""

from __future__ import annotations

import attrs

from kvtide.plan import KVStoragePlan, SubPool, SubPoolKind
from kvtide.sizing.errors import SizingError


@attrs.frozen
class KVDemand:
    """Units per band, in chain order: pages for attention, state slots for state."""

    units: tuple[int, ...]
    """One count a band."""


def request_demand(
    plan: KVStoragePlan, *, prompt_tokens: int, output_tokens: int, chunk_tokens: int
) -> KVDemand:
    """The most units of each band that a request ever holds at once, over every chunking of its prompt.

    Raises `SizingError` when a count is no positive integer.
    """
    for name, value in (
        ("prompt_tokens", prompt_tokens),
        ("output_tokens", output_tokens),
        ("chunk_tokens", chunk_tokens),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise SizingError(f"{name} must be a positive integer, found {value!r}")
    return KVDemand(
        tuple(_peak_units(pool, prompt_tokens, output_tokens, chunk_tokens) for pool in plan.sub_pools)
    )


def _peak_units(pool: SubPool, prompt_tokens: int, output_tokens: int, chunk_tokens: int) -> int:
    if pool.page_tokens is None:
        return 1
    written_tokens = prompt_tokens + output_tokens - 1
    if pool.kind is SubPoolKind.FULL or pool.window_tokens is None:
        return _pages(written_tokens, pool.page_tokens)
    kept_tokens = pool.window_tokens - 1
    prefill_run = kept_tokens + min(chunk_tokens, prompt_tokens)
    decode_run = kept_tokens + 1
    return max(
        _most_pages_of_a_run(prefill_run, prompt_tokens, pool.page_tokens),
        _most_pages_of_a_run(decode_run, written_tokens, pool.page_tokens),
    )


def _pages(token_count: int, page_tokens: int) -> int:
    return -(-token_count // page_tokens)


def _most_pages_of_a_run(run_tokens: int, written_tokens: int, page_tokens: int) -> int:
    return min(_pages(written_tokens, page_tokens), _pages(run_tokens + page_tokens - 1, page_tokens))
