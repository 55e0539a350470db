"""From layer declarations to sub-pools in chain order (rows P2, P3, P10).

Parts of one lifetime share a sub-pool: its page holds the planes of all their layers for the same tokens, so one id serves
every layer. Two kinds of geometry in one sub-pool are refused, since one page size could not serve both well.

Chain order puts the shortest lifetime first: state, then windows and chunks from the longest, then full attention. The ends
are the bands that grow and shrink most, and full attention, which is never retired, has the arena's end to itself.

The owner's page is the plan's virtual page. A window may have smaller pages, of which a whole number makes an owner's page:
its virtual page is `owner page × ratio + sub-page`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtide.plan.checks import check_positive
from kvtide.plan.decl import KVLayerDecl, KVPart
from kvtide.plan.errors import PlanError
from kvtide.plan.geometry import TensorDecl
from kvtide.plan.lifetime import ChunkLifetime, FullLifetime, Lifetime, StateLifetime, WindowLifetime
from kvtide.plan.storage_plan import KVStoragePlan, SubPool, SubPoolKind
from kvtide.plan.unit import lay_out_unit

Parts = list[tuple[KVLayerDecl, KVPart]]


def plan_kv_storage(
    layers: Iterable[KVLayerDecl],
    *,
    page_tokens: int,
    window_page_tokens: int | Mapping[str, int] | None = None,
) -> KVStoragePlan:
    """Group the parts of `layers` into sub-pools.

    Args:
        layers: what each layer stores, in any order.
        page_tokens: tokens a page of the owner (full attention, else the longest window): the plan's virtual page.
        window_page_tokens: tokens a page of the other windows and chunks, or by name of some of them; by default the owner's.

    Raises:
        PlanError: no layer stores anything, a layer is declared twice or shares a layer that stores no attention, two
            kinds of geometry have one lifetime (naming the layers), state layers disagree on checkpoints, checkpoints and
            attention chunks drift apart, or a page size is no positive integer, does not divide the checkpoint interval,
            its attention chunk or the owner's page, or cuts a compressed entry.
    """
    check_positive("page_tokens", page_tokens)
    decls: dict[int, KVLayerDecl] = {}
    for decl in sorted(layers, key=lambda decl: decl.layer):
        if decls.setdefault(decl.layer, decl) is not decl:
            raise PlanError(f"layer {decl.layer} is declared twice")
    groups: dict[Lifetime, Parts] = {}
    for decl in decls.values():
        for part in decl.parts:
            groups.setdefault(part.lifetime, []).append((decl, part))
    if not groups:
        raise PlanError("no layer declares a part: there is nothing to store")
    order = sorted(groups, key=_chain_rank)
    _check_checkpoints(order, page_tokens)
    pages = _pages(order, page_tokens, window_page_tokens)
    return KVStoragePlan(
        page_tokens=page_tokens,
        sub_pools=tuple(_sub_pool(lifetime, groups[lifetime], pages[lifetime]) for lifetime in order),
        shared_layers=_shared_layers(decls),
    )


def _shared_layers(decls: Mapping[int, KVLayerDecl]) -> tuple[tuple[int, int], ...]:
    shared = []
    for decl in decls.values():
        if decl.shares_layer is None:
            continue
        source = decls.get(decl.shares_layer)
        if source is None or not any(not isinstance(part.lifetime, StateLifetime) for part in source.parts):
            what = "is not declared" if source is None else "stores no attention"
            raise PlanError(f"layer {decl.layer} shares layer {decl.shares_layer}'s entries, which {what}")
        shared.append((decl.layer, decl.shares_layer))
    return tuple(shared)


def _check_checkpoints(order: list[Lifetime], page_tokens: int) -> None:
    states = [lifetime for lifetime in order if isinstance(lifetime, StateLifetime)]
    if len(states) > 1:
        intervals = sorted(str(lifetime.checkpoint_interval) for lifetime in states)
        raise PlanError(
            f"state layers disagree on checkpoint_interval ({', '.join(intervals)}): a request has one state slot"
        )
    interval = states[0].checkpoint_interval if states else None
    if interval is None:
        return
    if interval % page_tokens:
        raise PlanError(
            f"page_tokens = {page_tokens} does not divide checkpoint_interval = {interval}: a checkpoint would lie inside "
            "a page"
        )
    for lifetime in order:
        if (
            isinstance(lifetime, ChunkLifetime)
            and interval % lifetime.chunk_tokens
            and lifetime.chunk_tokens % interval
        ):
            raise PlanError(
                f"checkpoint_interval = {interval} and the attention chunk of {lifetime.chunk_tokens} tokens must divide one "
                "another: checkpoints and ends of chunks would drift apart"
            )


def _pages(
    order: list[Lifetime], page_tokens: int, window_page_tokens: int | Mapping[str, int] | None
) -> dict[Lifetime, int | None]:
    """Tokens a page of each sub-pool; `order` is the chain's."""
    attention = [lifetime for lifetime in order if not isinstance(lifetime, StateLifetime)]
    owner = next((one for one in attention if isinstance(one, FullLifetime)), None) or next(
        iter(attention), None
    )
    pages: dict[Lifetime, int | None] = dict.fromkeys(order)
    pages |= dict.fromkeys(attention, page_tokens)
    others = {_name(lifetime): lifetime for lifetime in attention if lifetime is not owner}
    if isinstance(window_page_tokens, Mapping):
        asked = dict(window_page_tokens)
    else:
        asked = {} if window_page_tokens is None else dict.fromkeys(others, window_page_tokens)
        if window_page_tokens is not None:
            check_positive("window_page_tokens", window_page_tokens)
    for name, tokens in asked.items():
        if name not in others:
            raise PlanError(f"window_page_tokens names {name!r}; windows beside the owner are {list(others)}")
        pages[others[name]] = check_positive(f"window_page_tokens[{name!r}]", tokens)
    for lifetime in attention:
        _check_page(lifetime, pages[lifetime] or page_tokens, page_tokens)
    return pages


def _check_page(lifetime: Lifetime, tokens: int, owner_tokens: int) -> None:
    if owner_tokens % tokens:
        raise PlanError(
            f"pages of {tokens} tokens in band {_name(lifetime)!r} do not divide the owner's pages of {owner_tokens}"
        )
    if isinstance(lifetime, ChunkLifetime) and lifetime.chunk_tokens % tokens:
        raise PlanError(
            f"pages of {tokens} tokens do not divide the attention chunk of band {_name(lifetime)!r}: a page across its end "
            "would outlive it; give a smaller page, or a smaller window page"
        )


def _sub_pool(lifetime: Lifetime, parts: Parts, page_tokens: int | None) -> SubPool:
    layers_by_kind: dict[str, list[int]] = {}
    for decl, part in parts:
        layers_by_kind.setdefault(type(part.geometry).__name__, []).append(decl.layer)
    name = _name(lifetime)
    if len(layers_by_kind) > 1:
        found = "; ".join(f"{kind} in layers {layers}" for kind, layers in layers_by_kind.items())
        drafts = [decl.layer for decl, _ in parts if decl.is_draft]
        note = f"; the draft's layers are {drafts}" if drafts else ""
        raise PlanError(f"sub-pool {name!r} mixes kinds of geometry: {found}{note}")
    tensors: list[tuple[int, TensorDecl]] = [
        (decl.layer, tensor) for decl, part in parts for tensor in part.geometry.tensors()
    ]
    return SubPool(
        name=name,
        lifetime=lifetime,
        page_tokens=page_tokens,
        unit=lay_out_unit(tensors, page_tokens),
        is_draft=all(decl.is_draft for decl, _ in parts),
    )


def _name(lifetime: Lifetime) -> str:
    match lifetime:
        case FullLifetime():
            return SubPoolKind.FULL.value
        case WindowLifetime(window_tokens):
            return f"{SubPoolKind.WINDOW.value}-{window_tokens}"
        case ChunkLifetime(chunk_tokens):
            return f"{SubPoolKind.CHUNK.value}-{chunk_tokens}"
        case StateLifetime():
            return SubPoolKind.STATE.value


def _chain_rank(lifetime: Lifetime) -> tuple[int, int, int]:
    match lifetime:
        case StateLifetime():
            return (0, 0, 0)
        case WindowLifetime(window_tokens):
            return (1, -window_tokens, 0)
        case ChunkLifetime(chunk_tokens):
            return (1, -chunk_tokens, 1)
        case FullLifetime():
            return (2, 0, 0)
