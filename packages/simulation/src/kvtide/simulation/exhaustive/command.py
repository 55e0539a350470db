"""Every sequence of operations on tiny arenas, to the depth that the time allows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import rich.box
from rich.console import Console
from rich.table import Table

from kvtide.simulation.cases import installed_versions
from kvtide.simulation.command_refusals import check_folder, reason_of
from kvtide.simulation.exhaustive.search import Exhausted, exhaust
from kvtide.simulation.exhaustive.shapes import SHAPES
from kvtide.simulation.exhaustive.small_actions import described
from kvtide.simulation.exhaustive.small_steps import WORDS
from kvtide.simulation.failures import CHECKS, Failure
from kvtide.simulation.sweep import quiet_logs


def _number(_ctx: click.Context, _param: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no length of time")
    return value


@click.command(
    name="exhaust",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Try every sequence of operations on tiny arenas; exit status 1 with the first bad one.\n\n"
    f"SHAPE is one or more of: {', '.join(SHAPES)}; all of them without it. WORD is the first of an action: {', '.join(WORDS)}.",
)
@click.argument("shapes", nargs=-1, type=click.Choice(list(SHAPES)), metavar="[SHAPE]...")
@click.option(
    "--depth", type=click.IntRange(1, 100), help="Longest sequence.  [default: as far as time allows]"
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    callback=_number,
    default=60,
    show_default=True,
    help="Time for each shape.",
)
@click.option(
    "--only",
    "words",
    multiple=True,
    type=click.Choice(WORDS),
    metavar="WORD",
    help='Try actions of this word, and of others so named; sequences get longer. May be repeated; of two words: --only "free all".',
)
@click.option("--jobs", type=click.IntRange(1, 1_024), default=1, show_default=True, help="Processes.")
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write each bad sequence to a file in this folder; made when there is one.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of a table.")
@click.pass_context
def command(
    context: click.Context,
    *,
    shapes: Sequence[str],
    depth: int | None,
    seconds: float,
    words: Sequence[str],
    jobs: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """See its help, which names what there is."""
    quiet_logs()
    if folder is not None:
        check_folder("--out", folder)
    stderr = Console(stderr=True)
    found = []
    for name in shapes or SHAPES:

        def tell(reached: int, states: int, name: str = name) -> None:
            if stderr.is_terminal:
                stderr.print(f"{name}: depth {reached}, {states:,} states", highlight=False)

        def tell_failure(failure: Failure, name: str = name) -> None:
            click.echo(f"{name}: {failure}; looking for a shorter sequence", err=True)

        found.append(
            exhaust(
                SHAPES[name],
                depth=depth,
                seconds=seconds,
                words=words,
                jobs=jobs,
                on_layer=tell,
                on_failure=tell_failure,
            )
        )
        if folder is not None and found[-1].failure is not None:
            _save(folder, found[-1])
    if as_json:
        document = {"versions": installed_versions(), "shapes": [_document(each) for each in found]}
        click.echo(json.dumps(document, ensure_ascii=False))
    else:
        _print(Console(), found, words)
    if any(each.failure is not None for each in found):
        context.exit(1)
    if not any(each.transitions for each in found):
        raise click.UsageError(
            f"nothing was tried: no action of {', '.join(words)} is the first of a sequence"
        )


def _print(console: Console, found: Sequence[Exhausted], words: Sequence[str]) -> None:
    table = Table(box=rich.box.SIMPLE_HEAD, title="every sequence of operations", title_justify="left")
    table.add_column("shape")
    for column in ("states", "depth", "tried", "seconds", "states a second", "of a core's time"):
        table.add_column(column, justify="right")
    for each in found:
        table.add_row(
            each.shape,
            f"{each.states:,}",
            str(each.depth),
            f"{each.transitions:,}",
            f"{each.seconds:.1f}",
            f"{each.states / each.seconds:,.0f}",
            f"{each.states / max(each.cpu_seconds, 1e-9):,.0f}",
        )
    console.print(table)
    for each in found:
        if each.failure is None:
            continue
        console.rule(f"{each.shape}: {each.failure.check}", align="left")
        for line in (
            each.failure.message,
            f"breaks: {CHECKS[each.failure.check]}",
            *(
                f"{place:4} {described(SHAPES[each.shape], action)}"
                for place, action in enumerate(each.sequence)
            ),
            f"repeat: repeat(SHAPES[{each.shape!r}], {list(each.sequence)})",
        ):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if any(each.transitions for each in found) and all(each.failure is None for each in found):
        tried = {word for each in found for word, _ in each.outcomes}
        never = [word for word in words if word not in tried]
        left_out = f"; never tried: {', '.join(never)}" if never else ""
        console.print(f"every check held{left_out}", highlight=False)


def _save(folder: Path, bad: Exhausted) -> None:
    path = folder / f"exhaust-{bad.shape}.json"
    document = {
        "versions": installed_versions(),
        **_document(bad),
        "described": [described(SHAPES[bad.shape], action) for action in bad.sequence],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        # What was found is shown all the same.
        click.echo(f"--out {str(folder)!r}: {reason_of(error)}: the sequence is not kept", err=True)
        return
    click.echo(f"{path} holds a bad sequence", err=True)


def _document(each: Exhausted) -> dict[str, Any]:
    outcomes: dict[str, dict[str, int]] = {}
    for (word, outcome), times in sorted(each.outcomes.items()):
        outcomes.setdefault(word, {})[outcome] = times
    return {
        "shape": each.shape,
        "states": each.states,
        "depth": each.depth,
        "layers": each.layers,
        "transitions": each.transitions,
        "seconds": round(each.seconds, 3),
        "cpu_seconds": round(each.cpu_seconds, 3),
        "states_per_second": round(each.states / each.seconds, 1),
        "outcomes": outcomes,
        "failure": None if each.failure is None else {**each.failure.document(), "sequence": each.sequence},
    }
