"""What `kvtide plan` prints for people: tables of a `CapacityReport`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtide.engine.commands.plan_report import BandReport, CapacityReport

PLAIN_WIDTH = 110
"""Columns of the tables where the output is no terminal."""


def print_tables(report: CapacityReport, config: Path) -> None:
    """The report for people."""
    # A path is printed as it is, whatever brackets and colons it holds.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=PLAIN_WIDTH)
    kv_dtypes = " and ".join(report.kv_dtypes) or "no attention"
    beside = sum(term.byte_count for term in report.fixed if not term.in_arena)
    console.print(f"{config}: {report.model_type}, {report.layer_count} layers, {kv_dtypes}", style="bold")
    ranks = f"one of {report.tp_size} tensor-parallel ranks, " if report.tp_size > 1 else ""
    stages = f"stage {report.stage} of {report.pp_size}, " if report.pp_size > 1 else ""
    console.print(
        f"{ranks}{stages}budget {size(report.budget_bytes)}: arena {size(report.arena_bytes)}, of which sinks "
        f"{size(report.prefix_bytes)}; tables beside it {size(beside)}\n"
    )
    tables = [_band_table(report), _request_table(report), _fit_table(report)]
    if report.pp_size > 1:
        tables.append(_stage_table(report))
    for table in tables:
        console.print(table)
        console.print()
    for line in _notes(report):
        console.print(line)


def _band_table(report: CapacityReport) -> Table:
    table = _table("Bands, in chain order", "boot targets: at run time any band may take any free byte")
    _columns(table, ["band", "place"], ["layers", "payload bytes", "unit bytes", "units", "tokens"])
    for band in report.bands:
        table.add_row(
            band.name,
            band.place,
            f"{band.layer_count:,}",
            f"{band.payload_bytes:,}",
            f"{band.unit_bytes:,}",
            f"{band.target_units:,}",
            "" if band.target_tokens is None else f"{band.target_tokens:,}",
        )
    return table


def _request_table(report: CapacityReport) -> Table:
    drafts = f", {report.draft_tokens} drafted a step" if report.draft_tokens else ""
    table = _table(
        "One request at its peak, by part", f"prefill chunks of up to {report.chunk_tokens:,} tokens{drafts}"
    )
    lengths = [f"{context.context_tokens:,} tokens" for context in report.contexts]
    _columns(table, ["part", "kept"], ["bytes per token", *lengths])
    for band in report.bands:
        per_token = "" if band.bytes_per_token is None else f"{band.bytes_per_token:,}"
        table.add_row(
            band.name,
            _kept(band),
            per_token,
            *(size(context.bytes[band.name]) for context in report.contexts),
        )
    total = sum(band.bytes_per_token or 0 for band in report.bands)
    table.add_section()
    table.add_row(
        "sum", "", f"{total:,}", *(size(context.request_bytes) for context in report.contexts), style="bold"
    )
    return table


def _kept(band: BandReport) -> str:
    if band.page_tokens is None:
        return "state slots"
    if band.window_tokens is not None:
        return f"last {band.window_tokens:,} tokens"
    return "every token" if band.chunk_tokens is None else f"own {band.chunk_tokens:,} tokens"


def _fit_table(report: CapacityReport) -> Table:
    table = _table("What fits", f"at most {report.max_running_requests:,} running (--max-running)")
    columns = [
        "bytes each",
        "fit at peak",
        "admitted at peak",
        "resident now",
        "static split",
        "single page",
    ]
    _columns(table, ["request of"], columns)
    for context in report.contexts:
        over = context.context_tokens > report.max_context_tokens
        table.add_row(
            f"{context.context_tokens:,} tokens",
            size(context.request_bytes),
            f"{context.requests_in_memory:,}",
            f"none: over {report.max_context_tokens:,}" if over else f"{context.requests_admitted:,}",
            f"{context.requests_resident:,}",
            f"{context.requests_static_split:,}",
            f"{context.requests_single_page:,}",
        )
    return table


def _stage_table(report: CapacityReport) -> Table:
    table = _table("Stages", "every stage runs the same requests, so the least counts")
    lengths = [f"of {context.context_tokens:,} tokens" for context in report.contexts]
    _columns(table, ["stage", "layers"], ["arena", *lengths])
    for stage in report.stages:
        table.add_row(
            str(stage.stage),
            f"{stage.first_layer} to {stage.last_layer}",
            size(stage.arena_bytes),
            *(f"{count:,}" for count in stage.requests_in_memory),
        )
    return table


def _notes(report: CapacityReport) -> list[str]:
    notes = [
        "admitted at peak: each can run to its end; resident now: held between two forwards, without room to go on",
        (
            f"static split: a pool a kind, divided once for requests of {report.reference_tokens:,} tokens; bytes never change "
            "hands"
        ),
        "single page: one pool of equal pages, each kind padded to the largest; both are our models of the policies",
    ]
    if report.suggestion is not None:
        better = report.suggestion
        sizes = f"--page-size {better.page_tokens}"
        if better.window_page_tokens != better.page_tokens:
            sizes += f" --window-page-size {better.window_page_tokens}"
        notes.append(
            f"these pages waste up to {report.wasted_percent} % of a request; {sizes} would waste {better.wasted_percent} %"
        )
    return notes


def _table(title: str, caption: str) -> Table:
    return Table(title=title, caption=caption, title_justify="left", caption_justify="left")


def _columns(table: Table, texts: list[str], numbers: list[str]) -> None:
    for heading in texts:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")


def size(byte_count: int) -> str:
    """A byte count for people: exact below a KiB, else three digits and a binary unit."""
    if byte_count < 2**10:
        return f"{byte_count} B"
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if byte_count >= factor:
            return f"{byte_count / factor:,.2f} {unit}"
    return f"{byte_count / 2**10:,.2f} KiB"
