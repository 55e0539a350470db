"""What `kvtide plan` says, as values: `plan_capacity` computes it, `--json` prints it, tables show it.

The attributes below are the fields of the JSON document, names and nesting alike. A request of N tokens is N tokens written,
prompt and output together, priced for the worst split between them and the worst chunking of the prompt.
"""

from __future__ import annotations

from typing import Any

import attrs

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
    """`state`, `window`, `chunk` or `full`."""

    place: str
    """`grow-up end`, `float` or `grow-down end`."""

    layer_count: int
    """Layers with a plane in its units."""

    window_tokens: int | None
    """Tokens a query sees; `null` where it sees all, and for chunks and state."""

    chunk_tokens: int | None
    """Tokens of a stretch of chunked-local attention; `null` for other kinds."""

    page_tokens: int | None
    """Tokens a page; `null` for state."""

    payload_bytes: int
    """Bytes of a unit that the model asked for."""

    unit_bytes: int
    """Stride of a unit: payload and alignment."""

    bytes_per_token: int | None
    """Payload of one token in every layer, rounded down where entries stand for several tokens; `null` for state."""

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

    requests_resident: int
    """Requests of that many written tokens that the arena holds between two forwards, as they stand: not all of them could go on."""

    requests_static_split: int
    """Requests that pools of fixed size hold, divided for requests of `reference_tokens`."""

    requests_single_page: int
    """Requests that one pool of equal pages holds, each kind padded to them."""

    wasted_percent: float
    """Part that no token needs of what such a request holds with its last page half full: rounding, and alignment."""


@attrs.frozen(kw_only=True)
class StageReport:
    """One stage of a pipeline."""

    stage: int
    """From 0."""

    first_layer: int
    """Of the model."""

    last_layer: int
    """Inclusive; a fused draft's layers are counted on behind the model's."""

    arena_bytes: int
    """Its arena."""

    concurrency: int
    """Most requests that could ever run at once, of the smallest and within the rows."""

    requests_in_memory: tuple[int, ...]
    """Requests that its arena holds at once, for each of `contexts`."""


@attrs.frozen(kw_only=True)
class PageSuggestion:
    """Page sizes that waste less."""

    page_tokens: int
    """Tokens a page."""

    window_page_tokens: int
    """Tokens a page of windows and chunks; equal to `page_tokens` where there is nothing to gain."""

    wasted_percent: float
    """The most that they waste at any of `contexts`."""


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

    tp_size: int
    """Given: ranks that split every layer. All figures are one rank's."""

    pp_size: int
    """Given: stages. Figures are those of `stage`; counts of requests are the least over all stages."""

    stage: int
    """The stage that holds the fewest requests."""

    stages: tuple[StageReport, ...]
    """Every stage."""

    page_tokens: int
    """Given, or 16, or the least page that holds whole compressed entries."""

    window_page_tokens: int
    """Given, or `page_tokens`."""

    wasted_percent: float
    """The most that these pages waste at any of `contexts`."""

    suggestion: PageSuggestion | None
    """Page sizes to use instead where those given waste over 3 %; `null` where they do not."""

    chunk_tokens: int
    """Given: tokens of the longest prefill chunk."""

    chunk_reads: str
    """Given: `pages` or `activations`, where a chunk's attention reads its own tokens."""

    strategy: str
    """Given: how a prefix tree keeps recurrent states."""

    checkpoint_interval: int | None
    """Given; `null` without checkpoints."""

    overlap: bool
    """Given: whether a forward is launched before the one before it is processed."""

    draft_layers: int
    """Layers of the fused draft; 0 without one."""

    draft_tokens: int
    """Tokens drafted a step; 0 without a draft."""

    max_running_requests: int
    """Given."""

    max_context_tokens: int
    """Given, or the model's own, at least the longest of `contexts`."""

    concurrency: int
    """Most requests that could ever run at once, of the smallest and within `max_running_requests`."""

    reference_tokens: int
    """Length of request for which the static split is divided."""

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
