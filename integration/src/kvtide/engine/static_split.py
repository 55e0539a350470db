"""What a static split of the same bytes would hold: a model of the policy that kvtide replaces, not of any engine.

Each band gets a pool of its own, in proportion to what an average request of the workload needs at its peak: better than an
operator can know beforehand. Bytes never change hands. Requests are admitted in arrival order, at their peaks, exactly as the
arena admits them, so the two differ in nothing but the walls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs

from kvtide.engine.requests import Request
from kvtide.plan import ArenaLayout, KVStoragePlan
from kvtide.sizing import ServingPolicy, request_demand

Fits = Callable[[Sequence[int]], bool]
"""Whether units, one count a band in chain order, fit together."""


@attrs.frozen(kw_only=True)
class StaticSplit:
    """Pools of fixed size in one arena."""

    units: tuple[int, ...]
    """Units of each pool, in chain order."""

    walls: tuple[int, ...]
    """Bytes at which pools meet."""

    def fits(self, units: Sequence[int]) -> bool:
        """Whether each pool holds its share."""
        return all(asked <= pool for asked, pool in zip(units, self.units, strict=True))


@attrs.frozen(kw_only=True)
class Held:
    """Requests that were running at once."""

    most: int
    """At the fullest step."""

    steps: int
    """Steps until the last was done."""

    never_fit: int
    """Requests that not even an empty pool could hold."""


def average_split(layout: ArenaLayout, demands: Sequence[Sequence[int]]) -> StaticSplit:
    """Divide the arena behind its prefix in proportion to the average of `demands`."""
    room = layout.arena_bytes - layout.prefix_bytes
    needed = [
        sum(demand[place] for demand in demands) * band.unit_bytes for place, band in enumerate(layout.bands)
    ]
    pools = [room * share // sum(needed) for share in needed]
    walls = [layout.prefix_bytes + sum(pools[: place + 1]) for place in range(len(pools) - 1)]
    units = [pool // band.unit_bytes for pool, band in zip(pools, layout.bands, strict=True)]
    return StaticSplit(units=tuple(units), walls=tuple(walls))


def peaks(
    plan: KVStoragePlan, requests: Sequence[Request], chunk_tokens: int, policy: ServingPolicy
) -> list[tuple[int, ...]]:
    """Peak units of each request, served as `policy` says."""
    return [
        request_demand(
            plan,
            prompt_tokens=len(request.prompt),
            output_tokens=request.output_tokens,
            chunk_tokens=chunk_tokens,
            policy=policy,
        ).units
        for request in requests
    ]


def requests_held(
    requests: Sequence[Request],
    demands: Sequence[Sequence[int]],
    fits: Fits,
    chunk_tokens: int,
    row_count: int,
) -> Held:
    """Play the steps of `kvtide.engine.loop` on counts alone: who is admitted when, and who is running together."""
    waiting = deque(sorted(range(len(requests)), key=lambda index: requests[index].arrival_step))
    band_count = len(demands[0])
    used = [0] * band_count
    chunks: dict[int, int] = {}
    outputs: dict[int, int] = {}
    most = step = never_fit = 0
    while waiting or chunks:
        while waiting and requests[waiting[0]].arrival_step <= step:
            demand = demands[waiting[0]]
            if not fits(demand):
                never_fit += 1
            elif len(chunks) < row_count and fits([a + b for a, b in zip(used, demand, strict=True)]):
                index = waiting[0]
                used = [a + b for a, b in zip(used, demand, strict=True)]
                chunks[index] = -(-len(requests[index].prompt) // chunk_tokens)
                outputs[index] = requests[index].output_tokens
            else:
                break
            waiting.popleft()
        most = max(most, len(chunks))
        prefilling = next((index for index, left in chunks.items() if left), None)
        if prefilling is not None:
            chunks[prefilling] -= 1
            outputs[prefilling] -= not chunks[prefilling]
        for index, left in chunks.items():
            decodes_now = not left and outputs[index]
            outputs[index] -= 1 if decodes_now else 0
        for index in [index for index, left in chunks.items() if not left and not outputs[index]]:
            used = [a - b for a, b in zip(used, demands[index], strict=True)]
            del chunks[index], outputs[index]
        step += 1
    return Held(most=most, steps=step, never_fit=never_fit)
