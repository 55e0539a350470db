"""What a model keeps in memory, and what fits in a budget.

`kvtide plan CONFIG --budget 40GiB` reads a Hugging Face config.json; no torch and no GPU take part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table

from kvtide.engine.commands.plan_report import CONTEXT_TOKENS, CapacityReport, capacity_report
from kvtide.plan import DType, PlanError, from_config, page_multiple
from kvtide.sizing import SizingError

BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
"""Suffixes of `--budget`, in any case."""

PLAIN_WIDTH = 110
"""Columns of the tables where the output is no terminal."""


class BadInput(click.UsageError):
    """What the user gave cannot be planned; one line, exit status 2."""

    def show(self, file: IO[Any] | None = None) -> None:
        """The line, without the usage text before it that other wrong calls get."""
        click.echo(f"kvtide plan: {' '.join(self.message.split())}", file=file, err=file is None)


def parse_budget(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """Bytes of `40GiB`, `40GB`, `512MiB`, `1.5GiB` or plain digits, rounded down."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", value.strip().lower(), re.ASCII)
    if found is None or found[2] not in BYTE_UNITS:
        raise BadInput(f"--budget must be a size such as 40GiB, 40GB, 512MiB or plain bytes, found {value!r}")
    byte_count = int(Decimal(found[1]) * BYTE_UNITS[found[2]])
    if byte_count == 0:
        raise BadInput(f"--budget must be at least one byte, found {value!r}")
    return byte_count


@click.command(name="plan", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--budget",
    required=True,
    metavar="SIZE",
    callback=parse_budget,
    help="Bytes for the arena and its tables: 40GiB.",
)
@click.option(
    "--page-size",
    type=click.IntRange(min=1),
    help="Tokens a page.  [default: 16, or the least that holds whole compressed entries]",
)
@click.option(
    "--max-running",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Requests that run at once at most: rows of the request table.",
)
@click.option(
    "--max-len",
    type=click.IntRange(min=1),
    help="Tokens of the longest request.  [default: the model's, at least 65536]",
)
@click.option(
    "--chunk", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens of a prefill chunk."
)
@click.option(
    "--kv-dtype",
    type=click.Choice([dtype.value for dtype in DType]),
    help="Element type of attention entries.  [default: the config's]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; CapacityReport names its fields."
)
def command(
    *,
    config: Path,
    budget: int,
    page_size: int | None,
    max_running: int,
    max_len: int | None,
    chunk: int,
    kv_dtype: str | None,
    as_json: bool,
) -> None:
    """Print what the model of CONFIG (a Hugging Face config.json) keeps in memory, and what fits in a budget."""
    values = read_config(config)
    try:
        declarations = from_config(values, kv_dtype=None if kv_dtype is None else DType(kv_dtype))
        report = capacity_report(
            declarations,
            model_type=str(_text(values).get("model_type") or values.get("model_type")),
            budget_bytes=budget,
            page_tokens=page_size or max(16, page_multiple(declarations)),
            chunk_tokens=chunk,
            max_running_requests=max_running,
            max_context_tokens=max_len or _longest_context(values),
        )
    except (PlanError, SizingError) as error:
        raise BadInput(str(error)) from error
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        print_tables(report, config)


def read_config(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; raises `BadInput` for whatever else lies there."""
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory; name the config.json in it") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise BadInput(f"{path} is no JSON: it is no UTF-8 text") from None
    try:
        values = json.loads(text)
    except RecursionError:
        raise BadInput(f"{path} is no config: its JSON is nested too deeply") from None
    except ValueError as error:
        raise BadInput(f"{path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{path} holds no JSON object but a {type(values).__name__}")
    return values


def _text(values: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = values.get("text_config")
    return nested if isinstance(nested, Mapping) else values


def _longest_context(values: Mapping[str, Any]) -> int:
    """`max_position_embeddings`, but never less than the longest context that the report answers for."""
    own = _text(values).get("max_position_embeddings")
    if own is not None and (isinstance(own, bool) or not isinstance(own, int) or own < 1):
        raise BadInput(
            f"max_position_embeddings must be a positive integer, found {own!r}; or give --max-len"
        )
    return max(own or 0, *CONTEXT_TOKENS)


def print_tables(report: CapacityReport, config: Path) -> None:
    """The report for people."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    kv_dtypes = " and ".join(report.kv_dtypes) or "no attention"
    beside = sum(term.byte_count for term in report.fixed if not term.in_arena)
    console.print(f"{config}: {report.model_type}, {report.layer_count} layers, {kv_dtypes}", style="bold")
    console.print(
        f"budget {size(report.budget_bytes)}: arena {size(report.arena_bytes)}, of which sinks "
        f"{size(report.prefix_bytes)}; tables beside it {size(beside)}\n"
    )
    for table in (_band_table(report), _request_table(report), _fit_table(report)):
        console.print(table)
        console.print()


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
    table = _table(
        "One request at its peak, by part", f"prefill chunks of up to {report.chunk_tokens:,} tokens"
    )
    lengths = [f"{context.context_tokens:,} tokens" for context in report.contexts]
    _columns(table, ["part", "kept"], ["bytes per token", *lengths])
    for band in report.bands:
        kept = "one slot" if band.page_tokens is None else "every token"
        if band.window_tokens is not None:
            kept = f"last {band.window_tokens:,} tokens"
        per_token = "" if band.bytes_per_token is None else f"{band.bytes_per_token:,}"
        table.add_row(
            band.name, kept, per_token, *(size(context.bytes[band.name]) for context in report.contexts)
        )
    total = sum(band.bytes_per_token or 0 for band in report.bands)
    table.add_section()
    table.add_row(
        "sum", "", f"{total:,}", *(size(context.request_bytes) for context in report.contexts), style="bold"
    )
    return table


def _fit_table(report: CapacityReport) -> Table:
    table = _table("What fits", f"at most {report.max_running_requests:,} running (--max-running)")
    _columns(table, ["request of"], ["bytes each", "requests in memory", "admitted at peak"])
    for context in report.contexts:
        over = context.context_tokens > report.max_context_tokens
        table.add_row(
            f"{context.context_tokens:,} tokens",
            size(context.request_bytes),
            f"{context.requests_in_memory:,}",
            f"none: over {report.max_context_tokens:,}" if over else f"{context.requests_admitted:,}",
        )
    return table


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
