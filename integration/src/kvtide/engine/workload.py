"""Requests, and a budget for them that is too small for comfort: what the demo serves and the tests check.

Prompts have the same lengths for every model: texts for the trained ones, random tokens for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvtide.arena import SCRATCH_BYTES
from kvtide.engine.attention import CHUNK_READS
from kvtide.engine.prompts import FOLLOW_UPS, PROMPTS
from kvtide.engine.requests import Request
from kvtide.plan import KVStoragePlan, lay_out, pack
from kvtide.sizing import ID_BYTES, ROW_STATE_BYTES, ServingPolicy, mirror_lengths, request_demand

CHUNK_TOKENS = 16
"""Prompt tokens of one prefill forward."""

RUNNING_REQUESTS = 12
"""Rows of the request table."""

CONTEXT_TOKENS = max(len(prompt.text) + prompt.output_tokens for prompt in PROMPTS)
"""Tokens of the longest request."""

LATEST_GAP = 2
"""Steps between one arrival and the next, at most."""

PLAIN = ServingPolicy(chunk_reads=CHUNK_READS)
OVERLAP = ServingPolicy(chunk_reads=CHUNK_READS, overlap=True)
"""How the two loops serve."""

SIDE_BY_SIDE = 3
"""Requests, the first that arrive, which the arena holds together and no more."""


def text_requests(seed: int = 0) -> tuple[Request, ...]:
    """One request a prompt, its bytes as tokens; `seed` decides when they arrive."""
    requests = _requests(
        [tuple(prompt.text.encode("ascii")) for prompt in PROMPTS], np.random.default_rng(seed)
    )
    return tuple(
        attrs.evolve(request, stops=(tuple(prompt.stop.encode("ascii")),)) if prompt.stop else request
        for request, prompt in zip(requests, PROMPTS, strict=True)
    )


def random_requests(vocabulary: int, seed: int = 0) -> tuple[Request, ...]:
    """Requests of the same lengths with random tokens below `vocabulary`, the first three left out (padding and marks)."""
    numbers = np.random.default_rng(seed)
    return _requests(
        [tuple(numbers.integers(3, vocabulary, len(prompt.text)).tolist()) for prompt in PROMPTS], numbers
    )


def with_follow_ups(
    requests: Sequence[Request], *, vocabulary: int | None = None, seed: int = 0
) -> tuple[Request, ...]:
    """`requests` of this module, and some that begin as they do: with the texts' bytes, or with random tokens below `vocabulary`."""
    numbers = np.random.default_rng(seed)
    more = []
    for place, follow_up in enumerate(FOLLOW_UPS):
        own = follow_up.text.encode("ascii")
        tail = tuple(own) if vocabulary is None else tuple(numbers.integers(3, vocabulary, len(own)).tolist())
        more.append(
            Request(
                request_id=f"r{len(requests) + place}",
                prompt=requests[follow_up.of].prompt[: follow_up.shared_tokens] + tail,
                output_tokens=follow_up.output_tokens,
                arrival_step=requests[follow_up.behind].arrival_step,
            )
        )
    return (*requests, *more)


def chunk_on_grid(page_tokens: int) -> int:
    """Tokens of a chunk that ends on a grid of that many tokens, whole pages of `page_tokens`."""
    return -(-CHUNK_TOKENS // page_tokens) * page_tokens


def tight_budget_bytes(
    plan: KVStoragePlan,
    requests: Sequence[Request],
    policy: ServingPolicy = PLAIN,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> int:
    """A budget whose arena holds the first `SIDE_BY_SIDE` of `requests` at their peaks, with less than a page to spare.

    For `build_kv_storage` with the row and context figures of this module.
    """
    demands = [
        request_demand(
            plan,
            prompt_tokens=len(request.prompt),
            output_tokens=request.output_tokens,
            chunk_tokens=chunk_tokens,
            policy=policy,
        )
        for request in requests[:SIDE_BY_SIDE]
    ]
    units: list[int] = [sum(counts) for counts in zip(*(demand.units for demand in demands), strict=True)]
    unit_bytes = [pool.unit.unit_bytes for pool in plan.sub_pools]
    arena_bytes: int = sum(count * size for count, size in zip(units, unit_bytes, strict=True))
    arena_bytes += sum(size for size, pool in zip(unit_bytes, plan.sub_pools, strict=True) if pool.has_sink)
    # What the grids lose between bands is less than a unit each.
    while pack(lay_out(plan, arena_bytes), units) is None:
        arena_bytes += min(unit_bytes)
    return arena_bytes + _beside_arena_bytes(plan, arena_bytes)


def _beside_arena_bytes(plan: KVStoragePlan, arena_bytes: int) -> int:
    lengths = mirror_lengths(
        lay_out(plan, arena_bytes),
        max_running_requests=RUNNING_REQUESTS,
        pages_per_row=-(-CONTEXT_TOKENS // plan.page_tokens),
    )
    return SCRATCH_BYTES + ROW_STATE_BYTES * RUNNING_REQUESTS + ID_BYTES * sum(lengths.values())


def _requests(prompts: Sequence[tuple[int, ...]], numbers: np.random.Generator) -> tuple[Request, ...]:
    arrival_step = 0
    requests = []
    for index, (prompt, shape) in enumerate(zip(prompts, PROMPTS, strict=True)):
        requests.append(
            Request(
                request_id=f"r{index}",
                prompt=prompt,
                output_tokens=shape.output_tokens,
                arrival_step=arrival_step,
            )
        )
        arrival_step += int(numbers.integers(0, LATEST_GAP + 1))
    return tuple(requests)
