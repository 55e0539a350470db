"""The arithmetic behind `kvtide plan`'s figures, a line a step, for whoever wants to check them by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kvtide.engine.commands.plan_report import CapacityReport
from kvtide.plan import KVStoragePlan, Plane, SubPool


def explain(report: CapacityReport, plan: KVStoragePlan) -> Iterator[str]:
    """Lines on the bands, the budget, and one request of each length."""
    for pool in plan.sub_pools:
        yield from _band(pool)
    yield from _budget(report)
    for context in report.contexts:
        terms = [
            f"{context.units[band.name]:,} × {band.unit_bytes:,} of {band.name}" for band in report.bands
        ]
        yield (
            f"a request of {context.context_tokens:,} tokens: {' + '.join(terms)} = {context.request_bytes:,} bytes, "
            f"and with its last page half full {context.wasted_percent} % are rounding and alignment"
        )


def _band(pool: SubPool) -> Iterator[str]:
    per = "slot" if pool.page_tokens is None else "page"
    yield (
        f"{pool.name}, bytes a {per}"
        + ("" if pool.page_tokens is None else f" of {pool.page_tokens} tokens")
        + ":"
    )
    by_layer: dict[int, list[Plane]] = {}
    for plane in pool.unit.planes:
        by_layer.setdefault(plane.layer, []).append(plane)
    alike = sorted(by_layer, key=lambda layer: (_shapes(by_layer[layer]), layer))
    for _, group in groupby(alike, key=lambda layer: _shapes(by_layer[layer])):
        layers = list(group)
        planes = by_layer[layers[0]]
        terms = " + ".join(
            f"{plane.name} {'×'.join(map(str, plane.shape))} {plane.dtype.value} {plane.byte_count:,}"
            for plane in planes
        )
        total = len(layers) * sum(plane.byte_count for plane in planes)
        yield f"  {len(layers)} layers × ({terms}) = {total:,}"
    unit = pool.unit
    yield f"  payload {unit.payload_bytes:,} + alignment {unit.unit_bytes - unit.payload_bytes:,} = {unit.unit_bytes:,}"


def _shapes(planes: list[Plane]) -> str:
    return str([(plane.name, plane.shape, plane.dtype.value) for plane in planes])


def _budget(report: CapacityReport) -> Iterator[str]:
    beside = [term for term in report.fixed if not term.in_arena]
    terms = "".join(f" - {term.byte_count:,} {term.name}" for term in beside)
    left = report.budget_bytes - report.used_bytes
    unused = f", {left:,} left over" if left else ""
    yield f"arena: {report.budget_bytes:,} budget{terms} = {report.arena_bytes:,}{unused}"
    yield f"chain: {report.arena_bytes:,} arena - {report.prefix_bytes:,} sinks = {report.arena_bytes - report.prefix_bytes:,}"
