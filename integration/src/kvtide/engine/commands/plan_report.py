"""What `kvtide plan` says, as values: `capacity_report` computes it, `--json` prints it, tables show it.

The attributes below are the fields of the JSON document, names and nesting alike. A request of N tokens is N tokens written,
prompt and output together, priced for the worst split between them and the worst chunking of the prompt.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvtide.plan import KVLayerDecl, KVStoragePlan, MHAGeometry, MLAGeometry, plan_kv_storage
from kvtide.sizing import SizedPlan, request_demand, requests_that_fit, size_plan

CONTEXT_TOKENS = (1024, 8192, 65536)
"""Lengths of request that the report answers for."""


@attrs.frozen(kw_only=True)
class FixedReport:
    """Bytes of the budget that no band can take."""

    name: str
    """What they are for."""

    byte_count: int
    """How many."""

    in_arena: bool
    """Whether they lie in the arena or beside it."""


@attrs.frozen(kw_only=True)
class BandReport:
    """One band of the chain."""

    name: str
    """Name of its sub-pool."""

    kind: str
    """`state`, `window` or `full`."""

    place: str
    """`grow-up end`, `float` or `grow-down end`."""

    layer_count: int
    """Layers with a plane in its units."""

    window_tokens: int | None
    """Tokens a query sees; `null` where it sees all, and for state."""

    page_tokens: int | None
    """Tokens a page; `null` for state."""

    payload_bytes: int
    """Bytes of a unit that the model asked for."""

    unit_bytes: int
    """Stride of a unit: payload and alignment."""

    bytes_per_token: int | None
    """Payload of one token in every layer; `null` for state."""

    capacity_units: int
    """Units if the band had the arena to itself."""

    target_units: int
    """Boot target: pages, or state slots."""

    target_tokens: int | None
    """Tokens in the boot target; `null` for state."""


@attrs.frozen(kw_only=True)
class ContextReport:
    """What one length of request costs, and how many fit."""

    context_tokens: int
    """Tokens written: prompt and output."""

    units: dict[str, int]
    """Units held at the peak, by band."""

    bytes: dict[str, int]
    """The same in bytes, by band."""

    request_bytes: int
    """Their sum."""

    requests_in_memory: int
    """Requests that the arena holds at once, each at its peak."""

    requests_admitted: int
    """The same within `max_running_requests`; 0 where the length exceeds `max_context_tokens`."""


@attrs.frozen(kw_only=True)
class CapacityReport:
    """The whole answer."""

    model_type: str
    """Family that the config was read as."""

    layer_count: int
    """Layers of the model."""

    kv_dtypes: tuple[str, ...]
    """Element types of attention entries; empty without attention."""

    budget_bytes: int
    """Given."""

    page_tokens: int
    """Given."""

    chunk_tokens: int
    """Given."""

    max_running_requests: int
    """Given."""

    max_context_tokens: int
    """Given, or the model's own, at least the longest of `contexts`."""

    arena_bytes: int
    """The one region that holds every band."""

    prefix_bytes: int
    """Its reserved prefix: the sinks."""

    used_bytes: int
    """Arena and everything beside it."""

    fixed: tuple[FixedReport, ...]
    """What no band can take."""

    bands: tuple[BandReport, ...]
    """In chain order."""

    contexts: tuple[ContextReport, ...]
    """By length."""

    def as_json(self) -> dict[str, Any]:
        """The document: attributes as fields."""
        return attrs.asdict(self)


def capacity_report(
    declarations: tuple[KVLayerDecl, ...],
    *,
    model_type: str,
    budget_bytes: int,
    page_tokens: int,
    chunk_tokens: int,
    max_running_requests: int,
    max_context_tokens: int,
) -> CapacityReport:
    """Plan, size and price; raises `PlanError` or `SizingError` where that cannot be done."""
    plan = plan_kv_storage(declarations, page_tokens=page_tokens)
    sized = size_plan(
        plan,
        budget_bytes=budget_bytes,
        max_running_requests=max_running_requests,
        max_context_tokens=max_context_tokens,
        chunk_tokens=chunk_tokens,
    )
    return CapacityReport(
        model_type=model_type,
        layer_count=len(declarations),
        kv_dtypes=_kv_dtypes(declarations),
        budget_bytes=budget_bytes,
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
        max_running_requests=max_running_requests,
        max_context_tokens=max_context_tokens,
        arena_bytes=sized.layout.arena_bytes,
        prefix_bytes=sized.layout.prefix_bytes,
        used_bytes=sized.used_bytes,
        fixed=tuple(FixedReport(**attrs.asdict(term)) for term in sized.fixed),
        bands=_bands(plan, sized),
        contexts=tuple(_context(plan, sized, tokens) for tokens in CONTEXT_TOKENS),
    )


def _kv_dtypes(declarations: tuple[KVLayerDecl, ...]) -> tuple[str, ...]:
    geometries = (part.geometry for decl in declarations for part in decl.parts)
    return tuple(
        sorted({one.dtype.value for one in geometries if isinstance(one, MHAGeometry | MLAGeometry)})
    )


def _bands(plan: KVStoragePlan, sized: SizedPlan) -> tuple[BandReport, ...]:
    return tuple(
        BandReport(
            name=pool.name,
            kind=pool.kind.value,
            place=band.growth.value,
            layer_count=len(pool.layers),
            window_tokens=pool.window_tokens,
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


def _context(plan: KVStoragePlan, sized: SizedPlan, context_tokens: int) -> ContextReport:
    # A prompt of all the tokens has the largest chunks, so no other split of them holds more.
    demand = request_demand(
        plan, prompt_tokens=context_tokens, output_tokens=1, chunk_tokens=sized.chunk_tokens
    )
    units = {pool.name: count for pool, count in zip(plan.sub_pools, demand.units, strict=True)}
    byte_counts = {pool.name: units[pool.name] * pool.unit.unit_bytes for pool in plan.sub_pools}
    in_memory = requests_that_fit(sized.layout, demand)
    admitted = min(in_memory, sized.max_running_requests)
    return ContextReport(
        context_tokens=context_tokens,
        units=units,
        bytes=byte_counts,
        request_bytes=sum(byte_counts.values()),
        requests_in_memory=in_memory,
        requests_admitted=admitted if context_tokens <= sized.max_context_tokens else 0,
    )
