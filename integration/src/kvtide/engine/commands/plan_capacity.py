"""From a model, a budget and a way of serving to the answer of `kvtide plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvtide.engine.commands.plan_baselines import single_page_requests, static_split_requests
from kvtide.engine.commands.plan_pages import WASTE_LIMIT_PERCENT, percent, suggest_pages, wasted_share
from kvtide.engine.commands.plan_report import (
    CONTEXT_TOKENS,
    BandReport,
    CapacityReport,
    ContextReport,
    FixedReport,
    StageReport,
)
from kvtide.plan import (
    GPU_SCRATCH_BYTES,
    KVLayerDecl,
    KVStoragePlan,
    StateGeometry,
    TensorDecl,
    place_fused_draft,
    plan_kv_storage,
    split_stages,
)
from kvtide.sizing import ServingPolicy, SizedPlan, requests_that_fit, size_plan, size_stages

REFERENCE_TOKENS = 8192
"""Length of request for which the static split is divided."""


@attrs.frozen(kw_only=True)
class CapacityQuestion:
    """What is asked of the planner."""

    layers: tuple[KVLayerDecl, ...]
    """The model's, as one rank of a tensor-parallel group holds them."""

    draft: tuple[KVLayerDecl, ...]
    """The fused draft's; empty without one."""

    model_type: str
    budget_bytes: int
    """Of one rank."""

    tp_size: int
    pp_size: int
    page_tokens: int
    window_page_tokens: int | None
    chunk_tokens: int
    max_running_requests: int
    max_context_tokens: int
    policy: ServingPolicy


def capacity_report(question: CapacityQuestion) -> CapacityReport:
    """Plan, size and price; raises `PlanError` or `SizingError` where that cannot be done."""
    stages = stage_layers(question)
    plans = [stage_plan(question, layers) for layers in stages]
    sized_stages = size_each_stage(question, plans)
    fitting = [[_fitting(sized, tokens) for tokens in CONTEXT_TOKENS] for sized in sized_stages]
    # The stage that holds the fewest of the shortest requests, and of the longer ones where those are equal.
    stage = min(range(len(stages)), key=lambda place: fitting[place])
    sized, plan = sized_stages[stage], plans[stage]
    contexts = tuple(
        _context(question, sized, sized_stages, tokens, min(counts))
        for tokens, counts in zip(CONTEXT_TOKENS, zip(*fitting, strict=True), strict=True)
    )
    wasted = max(context.wasted_percent for context in contexts)
    suggestion = None
    if wasted > WASTE_LIMIT_PERCENT:
        suggestion = suggest_pages(
            stages[stage], CONTEXT_TOKENS, chunk_tokens=question.chunk_tokens, policy=sized.policy
        )
    policy = question.policy
    intervals = [one.checkpoint_interval for one in plans if one.checkpoint_interval is not None]
    return CapacityReport(
        model_type=question.model_type,
        layer_count=len(question.layers),
        kv_dtypes=_kv_dtypes(question.layers),
        budget_bytes=question.budget_bytes,
        tp_size=question.tp_size,
        pp_size=question.pp_size,
        stage=stage,
        stages=tuple(
            StageReport(
                stage=place,
                first_layer=stages[place][0].layer,
                last_layer=stages[place][-1].layer,
                arena_bytes=one.layout.arena_bytes,
                concurrency=one.concurrency,
                requests_in_memory=tuple(fitting[place]),
            )
            for place, one in enumerate(sized_stages)
        ),
        page_tokens=question.page_tokens,
        window_page_tokens=question.window_page_tokens or question.page_tokens,
        wasted_percent=wasted,
        suggestion=suggestion if suggestion and suggestion.wasted_percent < wasted else None,
        chunk_tokens=question.chunk_tokens,
        chunk_reads=policy.chunk_reads.value,
        strategy=policy.strategy.value,
        checkpoint_interval=next(iter(intervals), None),
        overlap=policy.overlap,
        draft_layers=len(question.draft),
        draft_tokens=policy.draft_tokens,
        max_running_requests=question.max_running_requests,
        max_context_tokens=question.max_context_tokens,
        concurrency=sized.concurrency,
        reference_tokens=REFERENCE_TOKENS,
        arena_bytes=sized.layout.arena_bytes,
        prefix_bytes=sized.layout.prefix_bytes,
        used_bytes=sized.used_bytes,
        fixed=tuple(FixedReport(**attrs.asdict(term)) for term in sized.fixed),
        bands=_bands(plan, sized),
        contexts=contexts,
    )


def stage_layers(question: CapacityQuestion) -> list[tuple[KVLayerDecl, ...]]:
    """The layers of each stage; a fused draft runs on the last."""
    fused = place_fused_draft(question.layers, question.draft)
    stages = [tuple(layers) for layers in split_stages(question.layers, question.pp_size)]
    stages[-1] += fused[len(question.layers) :]
    return stages


def stage_plan(question: CapacityQuestion, layers: Sequence[KVLayerDecl]) -> KVStoragePlan:
    """The sub-pools of one stage."""
    return plan_kv_storage(
        layers, page_tokens=question.page_tokens, window_page_tokens=question.window_page_tokens
    )


def size_each_stage(question: CapacityQuestion, plans: Sequence[KVStoragePlan]) -> tuple[SizedPlan, ...]:
    """Each stage's bytes; stages of a pipeline have rows for the least concurrency among them."""
    limits: dict[str, Any] = {
        "budget_bytes": question.budget_bytes,
        "max_running_requests": question.max_running_requests,
        "max_context_tokens": question.max_context_tokens,
        "chunk_tokens": question.chunk_tokens,
        "beside_arena": {"scratch of the device": GPU_SCRATCH_BYTES},
    }
    if len(plans) == 1:
        return (size_plan(plans[0], **limits, policy=question.policy),)
    return size_stages(plans, **limits, policy=question.policy)


def held_by_policies(question: CapacityQuestion, sized: SizedPlan, tokens: int) -> tuple[int, int, int]:
    """Requests of `tokens` in the arena, in a static split, and in a single page size of one stage."""
    demand = sized.context_demand(tokens)
    reference = sized.context_demand(REFERENCE_TOKENS)
    return (
        requests_that_fit(sized.layout, demand),
        static_split_requests(sized.layout, reference, demand),
        single_page_requests(
            sized.plan,
            sized.layout.arena_bytes,
            context_tokens=tokens,
            chunk_tokens=question.chunk_tokens,
            policy=sized.policy,
        ),
    )


def _fitting(sized: SizedPlan, tokens: int) -> int:
    return requests_that_fit(sized.layout, sized.context_demand(tokens))


def _kv_dtypes(layers: tuple[KVLayerDecl, ...]) -> tuple[str, ...]:
    tensors: list[TensorDecl] = [
        part.geometry.tensors()[0]
        for decl in layers
        for part in decl.parts
        if not isinstance(part.geometry, StateGeometry)
    ]
    return tuple(sorted({tensor.dtype.value for tensor in tensors}))


def _bands(plan: KVStoragePlan, sized: SizedPlan) -> tuple[BandReport, ...]:
    return tuple(
        BandReport(
            name=pool.name,
            kind=pool.kind.value,
            place=band.growth.value,
            layer_count=len(pool.layers),
            window_tokens=pool.window_tokens,
            chunk_tokens=pool.chunk_tokens,
            page_tokens=pool.page_tokens,
            payload_bytes=pool.unit.payload_bytes,
            unit_bytes=pool.unit.unit_bytes,
            bytes_per_token=None if pool.page_tokens is None else pool.payload_bytes_per_token,
            capacity_units=band.capacity_pages,
            target_units=target.unit_count,
            target_tokens=target.token_count,
        )
        for pool, band, target in zip(plan.sub_pools, sized.layout.bands, sized.targets, strict=True)
    )


def _context(
    question: CapacityQuestion,
    sized: SizedPlan,
    sized_stages: Sequence[SizedPlan],
    tokens: int,
    in_memory: int,
) -> ContextReport:
    demand = sized.context_demand(tokens)
    units = {pool.name: count for pool, count in zip(sized.plan.sub_pools, demand.units, strict=True)}
    byte_counts = {pool.name: units[pool.name] * pool.unit.unit_bytes for pool in sized.plan.sub_pools}
    others = [held_by_policies(question, one, tokens) for one in sized_stages]
    wasted = wasted_share(
        sized.plan, context_tokens=tokens, chunk_tokens=question.chunk_tokens, policy=sized.policy
    )
    within = tokens <= question.max_context_tokens
    return ContextReport(
        context_tokens=tokens,
        units=units,
        bytes=byte_counts,
        request_bytes=sum(byte_counts.values()),
        requests_in_memory=in_memory,
        requests_admitted=min(in_memory, sized.max_running_requests) if within else 0,
        requests_resident=min(
            requests_that_fit(one.layout, one.resident_demand(tokens)) for one in sized_stages
        ),
        requests_static_split=min(split for _, split, _ in others),
        requests_single_page=min(single for _, _, single in others),
        wasted_percent=percent(wasted),
    )
