"""A trace on the allocator that ships, or on another, up to the first answer or state that differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from kvtide.simulation.command_refusals import check_file, reason_of, refuse_beside
from kvtide.simulation.sweep import quiet_logs
from kvtide.simulation.traces.replay import adapter_named, differs, first_divergence, replayed
from kvtide.simulation.traces.telling import document, told
from kvtide.simulation.traces.trace_format import TraceHeader, TraceLine, TraceWriter, read_trace
from kvtide.simulation.traces.trace_schema import TraceError

NO_TRACE = 3
"""Exit status for a file that is no trace; 2 is for what cannot be read or run at all."""


@click.command(name="replay", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("trace", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--adapter",
    metavar="MODULE:FACTORY",
    default="kvtide.simulation:ChainAdapter",
    show_default=True,
    help="The implementation to replay on.",
)
@click.option(
    "--around",
    type=click.IntRange(0, 1_000),
    default=5,
    show_default=True,
    help="Calls shown around a divergence.",
)
@click.option(
    "--write",
    "written",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the trace with the answers found, to compare it with others.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def command(
    context: click.Context, *, trace: Path, adapter: str, around: int, written: Path | None, as_json: bool
) -> None:
    """Replay TRACE; exit status 1 with the first divergence, 0 where every answer and state is as recorded, 3 for what is no trace.

    What the implementation raises, other than as an allocator answers, is a divergence, and ends the replay.
    """
    quiet_logs()
    if as_json:
        refuse_beside(context, "--json", {"around": "--around"})
    if written is not None:
        check_file("--write", written)
    try:
        factory = adapter_named(adapter)
    except TraceError as error:
        raise click.UsageError(str(error)) from error
    try:
        header, recorded = read_trace(trace)
        # To write, go on to the end; otherwise what follows a divergence says nothing.
        found: list[TraceLine] = []
        for line in replayed(header, recorded, factory):
            found.append(line)
            if written is None and differs(recorded[len(found) - 1], line):
                break
    except TraceError as error:
        click.echo(str(error), err=True)
        context.exit(NO_TRACE)
    except OSError as error:
        raise click.UsageError(f"{trace}: {reason_of(error)}") from error
    if written is not None:
        _write(written, header, found)
    divergence = first_divergence(recorded[: len(found)], found)
    if as_json:
        shown = {"calls": len(found), "divergence": None if divergence is None else document(divergence)}
        click.echo(json.dumps(shown, ensure_ascii=False))
    elif divergence is None:
        click.echo(f"{len(found)} calls, every answer and state as recorded")
    else:
        click.echo("\n".join(told(divergence, recorded, around=around)))
    if divergence is not None:
        context.exit(1)


def _write(path: Path, header: TraceHeader, lines: Sequence[TraceLine]) -> None:
    try:
        with path.open("w", encoding="utf-8") as out:
            writer = TraceWriter(out, header)
            for line in lines:
                writer.write(line)
    except OSError as error:
        raise click.UsageError(f"--write {str(path)!r}: {reason_of(error)}") from error
