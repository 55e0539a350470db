"""How long one request may be in an arena that holds nothing else: the memory clip (row K6).

A longer output never demands less, so the most output is where it last fits. A longer prompt may: its last chunk can begin at a
later checkpoint, or a run of tokens that is written at once touch fewer pages. But a prompt moved up by a *period*, a multiple
of every page, stretch and grid, has every page at the place it had, and more that was cut off at its beginning. So a prompt
that fits does so a period shorter too, and of the prompts beyond one that fits only those within a period need a look.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvtide.plan import KVStoragePlan
from kvtide.sizing.bisection import last_that
from kvtide.sizing.policy import ChunkReads, ServingPolicy


def prompt_period(plan: KVStoragePlan, policy: ServingPolicy) -> int:
    """Tokens by which a prompt that fits may be cut and still does; 1 where every shorter prompt fits.

    That is so where a token of the prompt costs what a decoded one does: a prompt of one token more then leads every life that
    the shorter one does.
    """
    grid = policy.grid_tokens(plan)
    if grid is None and not policy.draft_tokens and policy.chunk_reads is ChunkReads.PAGES:
        return 1
    return math.lcm(plan.page_tokens, grid or 1, *(pool.chunk_tokens or 1 for pool in plan.token_sub_pools))


def longest_that_fits(fits: Callable[[int], bool], most: int, period: int = 1) -> int:
    """The largest of `[1, most]` that fits, 0 for none, where what fits does so `period` less too.

    Asks about `period` lengths and a few more.
    """
    base = last_that(fits, 0, max(0, most))
    longest = base
    for length in range(base + 1, min(base + period, most) + 1):
        if fits(length):
            longest = max(longest, _last_periodic(fits, length, most, period))
    return longest


def _last_periodic(fits: Callable[[int], bool], length: int, most: int, period: int) -> int:
    """The largest of `length`, which fits, and those whole periods above it that fits."""

    def fits_above(periods: int) -> bool:
        return fits(length + periods * period)

    return length + period * last_that(fits_above, 0, (most - length) // period)
