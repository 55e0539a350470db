"""What is planned for: a model, its pages, a way of serving and a budget; and which of all these CI tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import pytest

from kvtide.plan import KVLayerDecl, KVStoragePlan, page_multiple, plan_kv_storage
from kvtide.sizing import (
    CheckpointStrategy,
    ChunkReads,
    DemandPurpose,
    KVDemand,
    ServingPolicy,
    SizedPlan,
    resident_demand,
    size_plan,
)

from .catalogue import CHECKPOINT_INTERVAL, Models, built_by_hand, published_models

BUDGET_BYTES = 40 * 10**9
CHUNK_TOKENS = 2048
CONTEXT_TOKENS = 131_072

BUILT, PUBLISHED = built_by_hand(), published_models()
EVERY_MODEL: Models = PUBLISHED | BUILT


@attrs.frozen(kw_only=True)
class Way:
    """A way of serving, and the requests that it serves."""

    purpose: DemandPurpose = DemandPurpose.CEILING
    policy: ServingPolicy = attrs.field(factory=ServingPolicy)
    prompt_tokens: int = 6000
    output_tokens: int = 1200
    cached_tokens: int = 0

    def demand(self, sized: SizedPlan) -> KVDemand:
        """Of one request."""
        return sized.demand(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            purpose=self.purpose,
            cached_tokens=self.cached_tokens,
        )

    def shared(self, sized: SizedPlan) -> KVDemand | None:
        """What the tree holds of the prefix that all requests share; `None` where each brings its own."""
        if self.purpose is not DemandPurpose.ADMIT:
            return None
        return resident_demand(sized.plan, written_tokens=self.cached_tokens)


ON_GRID: dict[str, Any] = {
    "strategy": CheckpointStrategy.EXTRA_BUFFER,
    "checkpoint_interval": CHECKPOINT_INTERVAL,
}
WAYS: dict[str, Way] = {
    "plain": Way(),
    "short": Way(prompt_tokens=450, output_tokens=50),
    "chunks in activations": Way(policy=ServingPolicy(chunk_reads=ChunkReads.ACTIVATIONS, overlap=True)),
    "behind a prefix": Way(
        purpose=DemandPurpose.ADMIT,
        policy=ServingPolicy(strategy=CheckpointStrategy.NO_BUFFER),
        cached_tokens=4096,
    ),
    "behind a prefix, with checkpoints": Way(
        purpose=DemandPurpose.ADMIT, policy=ServingPolicy(**ON_GRID, overlap=True), cached_tokens=4096
    ),
    "loaded, with drafts": Way(
        purpose=DemandPurpose.LOAD_BACK,
        policy=ServingPolicy(
            **ON_GRID | {"strategy": CheckpointStrategy.EXTRA_BUFFER_LAZY}, overlap=True, draft_tokens=3
        ),
        cached_tokens=2048,
    ),
    "arriving whole": Way(purpose=DemandPurpose.DECODE_PREALLOC, policy=ServingPolicy(overlap=True)),
}


@attrs.frozen(kw_only=True)
class Pages:
    """Page sizes of a plan."""

    page_tokens: int
    window_page_tokens: int | None = None

    def __str__(self) -> str:
        own = f"{self.page_tokens}"
        return own if self.window_page_tokens is None else f"{own} and {self.window_page_tokens}"


def pages_of(layers: tuple[KVLayerDecl, ...]) -> list[Pages]:
    """Every page size of the row, and windows' smaller ones where there are windows beside an owner."""
    sizes = (1, 16, 64) if page_multiple(layers) == 1 else (128, 256)
    plan = plan_kv_storage(layers, page_tokens=sizes[-1])
    mixed = [(16, 1), (64, 16)] if sizes[-1] == 64 else [(128, 16), (256, 64)]
    return [Pages(page_tokens=size) for size in sizes] + [
        Pages(page_tokens=size, window_page_tokens=smaller)
        for size, smaller in mixed
        if len(plan.token_sub_pools) > 1
    ]


@attrs.frozen(kw_only=True)
class Case:
    """One filling."""

    model: str
    pages: Pages
    way: str
    budget_bytes: int = BUDGET_BYTES

    def __str__(self) -> str:
        return f"{self.model}, {self.way}, pages of {self.pages}, {self.budget_bytes // 10**9} GB"

    @property
    def plan(self) -> KVStoragePlan:
        return plan_kv_storage(
            EVERY_MODEL[self.model],
            page_tokens=self.pages.page_tokens,
            window_page_tokens=self.pages.window_page_tokens,
        )

    def sized(self) -> SizedPlan:
        return size_plan(
            self.plan,
            budget_bytes=self.budget_bytes,
            max_running_requests=256,
            max_context_tokens=CONTEXT_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            policy=WAYS[self.way].policy,
        )

    def demands(self) -> tuple[SizedPlan, KVDemand, KVDemand | None]:
        """A budget's bytes, one request, and what is held beside all of them."""
        sized, way = self.sized(), WAYS[self.way]
        return sized, way.demand(sized), way.shared(sized)


def every_case(models: Models, ways: Iterable[str]) -> Iterator[Case]:
    """Every model at every page size, served in each of the ways."""
    for model, layers in models.items():
        for pages, way in itertools.product(pages_of(layers), ways):
            yield Case(model=model, pages=pages, way=way)


def rotated_cases(models: Models, ways: Iterable[str]) -> Iterator[Case]:
    """Every model in each of the ways, each at the next of its page sizes."""
    turn = itertools.count()
    for model, layers in models.items():
        sizes = pages_of(layers)
        for way in ways:
            yield Case(model=model, pages=sizes[next(turn) % len(sizes)], way=way)


def tried(ci: Iterable[Case], nightly: Iterable[Case]) -> pytest.MarkDecorator:
    """A test's `case`: CI tries some, a night all of `nightly` at budgets from 16 to 120 GB, and the rest of them at 40."""
    ci = list(ci)
    others = [
        attrs.evolve(case, budget_bytes=budget)
        for case in nightly
        for budget in (16 * 10**9, BUDGET_BYTES, 120 * 10**9)
    ]
    marked = [pytest.param(case, marks=pytest.mark.nightly) for case in others if case not in ci]
    return pytest.mark.parametrize("case", [*ci, *marked], ids=str)
