"""Arena layouts as JSON, and which documents are none.

An allocator computes with a layout and asks no more of it, so what is wrong with one shows as a wrong answer, or as an exception from
deep inside; here it is refused, with the rule that it breaks (row P9, `kvtide.plan.ArenaLayout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvtide.plan import ArenaLayout, BandLayout, Growth, SubPoolKind, growths
from kvtide.simulation.traces.trace_schema import TraceError, is_whole

GRAIN_BYTES = 16
"""Origins and units are multiples of it."""

_SIZES = ("unit_bytes", "origin_bytes", "first_page", "page_count")
_BAND_KEYS = ("name", "kind", "growth", *_SIZES, "has_sink", "page_tokens")


def layout_document(layout: ArenaLayout) -> dict[str, Any]:
    """As JSON; planes are left out, no allocator decides by them."""
    return {
        "arena_bytes": layout.arena_bytes,
        "prefix_bytes": layout.prefix_bytes,
        "owner": layout.owner,
        "bands": [
            {
                **{key: getattr(band, key) for key in _BAND_KEYS},
                "kind": band.kind.name,
                "growth": band.growth.name,
            }
            for band in layout.bands
        ],
    }


def layout_of(document: Mapping[str, Any]) -> ArenaLayout:
    """What `document` says; raises `TraceError` for what is no layout, `KeyError` where something is missing."""
    bands = tuple(_band_of(band) for band in document["bands"])
    layout = ArenaLayout(
        arena_bytes=document["arena_bytes"],
        prefix_bytes=document["prefix_bytes"],
        bands=bands,
        owner=document["owner"],
    )
    for fault in _faults(layout):
        raise TraceError(f"its layout is none: {fault}")
    return layout


def _band_of(document: Mapping[str, Any]) -> BandLayout:
    for key, known in (("kind", SubPoolKind), ("growth", Growth)):
        if document[key] not in known.__members__:
            raise TraceError(
                f"its layout is none: {key} {document[key]!r}, known are {list(known.__members__)}"
            )
    band = BandLayout(
        **{
            **{key: document[key] for key in _BAND_KEYS},
            "kind": SubPoolKind[document["kind"]],
            "growth": Growth[document["growth"]],
            "planes": (),
        }
    )
    for key in _SIZES:
        if not is_whole(document[key]):
            raise TraceError(f"its layout is none: {key} of band {band.name!r} is {document[key]!r}")
    return band


def _faults(layout: ArenaLayout) -> Iterator[str]:
    """What is wrong, of that which every other question stands on first."""
    if not (is_whole(layout.arena_bytes) and is_whole(layout.prefix_bytes)) or not (
        0 <= layout.prefix_bytes < layout.arena_bytes and layout.prefix_bytes % GRAIN_BYTES == 0
    ):
        yield f"a prefix of {layout.prefix_bytes!r} bytes in an arena of {layout.arena_bytes!r}"
    if not layout.bands:
        yield "no band"
    for band in layout.bands:
        yield from _faults_of_band(layout, band)
    names = [band.name for band in layout.bands]
    if len(set(names)) != len(names):
        yield f"bands are called {names}"
    roles = growths(len(names))
    if tuple(band.growth for band in layout.bands) != roles:
        yield f"bands grow {[band.growth.name for band in layout.bands]}, in their places {[role.name for role in roles]}"
    kinds = [band.kind for band in layout.bands]
    if SubPoolKind.FULL in kinds[:-1] or kinds.count(SubPoolKind.STATE) > 1:
        yield f"kinds are {[kind.name for kind in kinds]}: full attention stands last, and state once at most"
    yield from _faults_of_tokens(layout)


def _faults_of_band(layout: ArenaLayout, band: BandLayout) -> Iterator[str]:
    if (
        band.unit_bytes <= 0
        or band.origin_bytes < 0
        or band.unit_bytes % GRAIN_BYTES
        or band.origin_bytes % GRAIN_BYTES
    ):
        yield (
            f"band {band.name!r} has units of {band.unit_bytes} bytes from byte {band.origin_bytes}: positive multiples of "
            f"{GRAIN_BYTES} are needed"
        )
        return
    first_page = -((band.origin_bytes - layout.prefix_bytes) // band.unit_bytes)
    page_count = (layout.arena_bytes - band.origin_bytes) // band.unit_bytes
    if (band.first_page, band.page_count) != (first_page, page_count):
        yield (
            f"band {band.name!r} hands out pages [{band.first_page}, {band.page_count}); behind the prefix and inside the "
            f"arena lie [{first_page}, {page_count})"
        )
    if band.origin_bytes + band.unit_bytes * bool(band.has_sink) > layout.prefix_bytes:
        yield f"page 0 of band {band.name!r} is a sink: {band.has_sink!r}, and not in the prefix"


def _faults_of_tokens(layout: ArenaLayout) -> Iterator[str]:
    attention = [band for band in layout.bands if band.kind is not SubPoolKind.STATE]
    for band in layout.bands:
        is_counted = is_whole(band.page_tokens) and (band.page_tokens or 0) > 0
        if is_counted is (band.kind is SubPoolKind.STATE) or not (is_counted or band.page_tokens is None):
            yield f"a page of band {band.name!r}, of kind {band.kind.name}, holds {band.page_tokens!r} tokens"
            return
    if (layout.owner is None) is bool(attention) or layout.owner not in (
        None,
        *(band.name for band in attention),
    ):
        yield f"its owner is {layout.owner!r}, attention bands are {[band.name for band in attention]}"
        return
    for band in attention:
        if layout.page_tokens % (band.page_tokens or 1):
            yield f"pages of {band.page_tokens} tokens of band {band.name!r} do not divide the owner's {layout.page_tokens}"
