"""What a model keeps in memory, and what fits in a budget.

`kvtide plan CONFIG --budget 40GiB` reads a Hugging Face config.json; no torch and no GPU take part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

import click

from kvtide.engine.commands.plan_capacity import (
    CapacityQuestion,
    capacity_report,
    held_by_policies,
    size_each_stage,
    stage_layers,
    stage_plan,
)
from kvtide.engine.commands.plan_explain import explain
from kvtide.engine.commands.plan_pages import default_page_tokens
from kvtide.engine.commands.plan_plot import capacity_svg
from kvtide.engine.commands.plan_report import CONTEXT_TOKENS, CapacityReport
from kvtide.engine.commands.plan_tables import print_tables
from kvtide.plan import KV_FORMATS, KVLayerDecl, PlanError, from_config
from kvtide.sizing import CheckpointStrategy, ChunkReads, ServingPolicy, SizingError

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

MOST_BUDGET_BYTES = 2**50
"""A pebibyte: more than any rank has, and little enough for every figure derived from it to be printed."""

MOST_TOKENS = 2**40
"""Of a length, a page, a chunk, and of rows and ranks."""

MOST_DRAFT_TOKENS = 2**12
"""Drafted a step: more than any tree of drafts."""

SHOWN_CHARACTERS = 40
"""Of a senseless value, in an error; the rest says no more."""

COUNT = click.IntRange(min=1, max=MOST_TOKENS)
"""What most options are."""

DRAFT_TOKENS = 3
"""Tokens drafted a step where a draft is given and nothing else is said."""

PLOT_LENGTHS = tuple(2**power for power in range(9, 21))
"""Lengths of request that the picture has points for."""


class BadInput(click.UsageError):
    """What the user gave cannot be planned; one line, exit status 2."""

    def show(self, file: IO[Any] | None = None) -> None:
        """The line, without the usage text before it that other wrong calls get."""
        click.echo(f"kvtide plan: {' '.join(self.message.split())}", file=file, err=file is None)


def parse_budget(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """Bytes of `40GiB`, `40GB`, `512MiB`, `1.5GiB` or plain digits, rounded down."""
    found = re.fullmatch(r"(\d+)(?:\.(\d+))? ?([a-z]*)", value.strip().lower(), re.ASCII)
    if found is None or found[3] not in BYTE_UNITS:
        raise BadInput(
            f"--budget must be a size such as 40GiB, 40GB, 512MiB or plain bytes, found {_shortened(value)}"
        )
    whole, part = found[1].lstrip("0"), (found[2] or "")[:SHOWN_CHARACTERS]
    if len(whole) <= SHOWN_CHARACTERS:
        byte_count = int(Fraction(f"{whole or 0}.{part or 0}") * BYTE_UNITS[found[3]])
        if byte_count == 0:
            raise BadInput(f"--budget must be at least one byte, found {_shortened(value)}")
        if byte_count <= MOST_BUDGET_BYTES:
            return byte_count
    raise BadInput(f"--budget must be at most {MOST_BUDGET_BYTES // 2**40}TiB, found {_shortened(value)}")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"


@click.command(name="plan", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--budget",
    required=True,
    metavar="SIZE",
    callback=parse_budget,
    help="Bytes of one rank for the arena and its tables: 40GiB.",
)
@click.option("--tp", type=COUNT, default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=COUNT, default=1, show_default=True, help="Pipeline stages.")
@click.option(
    "--page-size",
    type=COUNT,
    help="Tokens a page.  [default: 16, or the least that holds whole compressed entries]",
)
@click.option(
    "--window-page-size",
    type=COUNT,
    help="Tokens a page of windows and chunks; must divide --page-size.  [default: --page-size]",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(list(KV_FORMATS)),
    help="How attention entries are stored.  [default: the config's type]",
)
@click.option(
    "--separate-values",
    is_flag=True,
    help="Store keys and values apart even where the model's values are its keys, as kernels without K = V do.",
)
@click.option(
    "--draft", type=click.Path(path_type=Path), help="Config of a draft whose layers join the model's bands."
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(min=0, max=MOST_DRAFT_TOKENS),
    help=f"Tokens drafted a step.  [default: {DRAFT_TOKENS} with --draft]",
)
@click.option(
    "--max-running",
    type=COUNT,
    default=256,
    show_default=True,
    help="Requests that run at once at most: rows of the request table.",
)
@click.option(
    "--max-len",
    type=COUNT,
    help="Tokens of the longest request.  [default: the model's, at least 65536]",
)
@click.option("--chunk", type=COUNT, default=2048, show_default=True, help="Tokens of a prefill chunk.")
@click.option(
    "--chunk-reads",
    type=click.Choice([reads.value for reads in ChunkReads]),
    default=ChunkReads.PAGES.value,
    show_default=True,
    help="Where a chunk's attention reads its own tokens.",
)
@click.option(
    "--strategy",
    type=click.Choice([strategy.value for strategy in CheckpointStrategy]),
    default=CheckpointStrategy.NONE.value,
    show_default=True,
    help="How a prefix tree keeps recurrent states.",
)
@click.option("--checkpoint-interval", type=COUNT, help="Tokens between kept states.")
@click.option("--overlap", is_flag=True, help="A forward is launched before the last one is processed.")
@click.option("--explain", "with_arithmetic", is_flag=True, help="Print the arithmetic behind the figures.")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Write a picture of what fits."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; CapacityReport names its fields."
)
def command(*, config: Path, as_json: bool, with_arithmetic: bool, plot: Path | None, **options: Any) -> None:
    """Print what the model of CONFIG (a Hugging Face config.json) keeps in memory, and what fits in a budget."""
    if as_json and with_arithmetic:
        raise BadInput("--explain prints text, --json one document: give one of them")
    values = read_config(config)
    try:
        question = ask(values, **options)
        report = capacity_report(question)
        lines = list(explain(report, stage_plan(question, stage_layers(question)[report.stage])))
        if plot is not None:
            write_plot(plot, question, report)
    except (PlanError, SizingError) as error:
        raise BadInput(str(error)) from error
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
        return
    print_tables(report, config)
    if with_arithmetic:
        click.echo("\n".join(lines))


def ask(
    values: Mapping[str, Any],
    *,
    budget: int,
    tp: int,
    pp: int,
    page_size: int | None,
    window_page_size: int | None,
    kv_dtype: str | None,
    separate_values: bool,
    draft: Path | None,
    draft_tokens: int | None,
    max_running: int,
    max_len: int | None,
    chunk: int,
    chunk_reads: str,
    strategy: str,
    checkpoint_interval: int | None,
    overlap: bool,
) -> CapacityQuestion:
    """The question that a command line asks; raises `BadInput`, `PlanError` or `SizingError`."""

    def declared(config: Mapping[str, Any]) -> tuple[KVLayerDecl, ...]:
        return from_config(
            config,
            kv_dtype=None if kv_dtype is None else KV_FORMATS[kv_dtype],
            equal_kv_once=not separate_values,
            checkpoint_interval=checkpoint_interval,
            tp_size=tp,
        )

    layers = declared(values)
    draft_layers: tuple[KVLayerDecl, ...] = ()
    if draft is not None:
        try:
            draft_layers = declared(read_config(draft))
        except PlanError as error:
            raise BadInput(f"--draft {draft}: {error}") from error
    drafted = draft_tokens if draft_tokens is not None else DRAFT_TOKENS if draft is not None else 0
    return CapacityQuestion(
        layers=layers,
        draft=draft_layers,
        model_type=str(_text(values).get("model_type") or values.get("model_type")),
        budget_bytes=budget,
        tp_size=tp,
        pp_size=pp,
        page_tokens=page_size or default_page_tokens((*layers, *draft_layers)),
        window_page_tokens=window_page_size,
        chunk_tokens=chunk,
        max_running_requests=max_running,
        max_context_tokens=max_len or _longest_context(values),
        policy=ServingPolicy(
            chunk_reads=ChunkReads(chunk_reads),
            strategy=CheckpointStrategy(strategy),
            overlap=overlap,
            draft_tokens=drafted,
        ),
    )


def write_plot(path: Path, question: CapacityQuestion, report: CapacityReport) -> None:
    """A picture of the tightest stage; raises `BadInput` where the file cannot be written."""
    sized = size_each_stage(question, [stage_plan(question, layers) for layers in stage_layers(question)])[
        report.stage
    ]
    lengths = [tokens for tokens in PLOT_LENGTHS if tokens <= question.max_context_tokens]
    counts = [held_by_policies(question, sized, tokens) for tokens in lengths]
    names = ("one arena", "static split", "single page size")
    svg = capacity_svg(
        f"{report.model_type}: requests in {report.budget_bytes / 2**30:,.1f} GiB",
        {
            name: [(tokens, held[place]) for tokens, held in zip(lengths, counts, strict=True)]
            for place, name in enumerate(names)
        },
    )
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


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
    if own is not None and own > MOST_TOKENS:
        raise BadInput(
            f"max_position_embeddings must be at most {MOST_TOKENS}, found {_shortened(own)}; or give --max-len"
        )
    return max(own or 0, *CONTEXT_TOKENS)
