"""Each rule of the allocator weakened in turn, and how soon the simulation notices."""

from __future__ import annotations

import difflib
import json
import time
from pathlib import Path
from typing import Any

import click
import rich.box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.simulation.command import show_progress
from kvtide.simulation.command_refusals import check_file, reason_of
from kvtide.simulation.mutations.hunting import Hunt, chosen_mutations, hunt
from kvtide.simulation.mutations.page import ACTIONS, SEEDS, page
from kvtide.simulation.mutations.table import MUTATIONS
from kvtide.simulation.seed_options import seed_options
from kvtide.simulation.sweep import quiet_logs


@click.command(name="mutations", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[ID|KIND]...")
@seed_options(SEEDS, ACTIONS)
@click.option(
    "--out",
    "written",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the page of the whole table.",
)
@click.option(
    "--check",
    "compared",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Fail unless this file is that page.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of a table.")
@click.pass_context
def command(
    context: click.Context,
    *,
    names: tuple[str, ...],
    seeds: range,
    action_count: int,
    jobs: int,
    written: Path | None,
    compared: Path | None,
    as_json: bool,
) -> None:
    """Weaken rules of the allocator one at a time, all of them or those named.

    Exit status 1 when the simulation does not notice one; with --check, when anything is otherwise than that page says, survivors too.
    """
    quiet_logs()
    if (written or compared) and (names or seeds != SEEDS or action_count != ACTIONS):
        raise click.UsageError(
            "--out and --check are for the whole table, with the seeds and actions of the page"
        )
    if written is not None:
        check_file("--out", written)
    was = None if compared is None else (compared, _read(compared))
    try:
        mutations = chosen_mutations(names)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    start = time.perf_counter()
    hunts = []
    with show_progress(Console(stderr=True), len(mutations), "mutations") as advance:
        for each in hunt(mutations, seeds, action_count, jobs=jobs):
            hunts.append(each)
            advance()
    wrong = [each.mutation for each in hunts if not each.is_as_it_should_be]
    if as_json:
        click.echo(json.dumps(_document(hunts, time.perf_counter() - start), ensure_ascii=False))
    else:
        _print(Console(), hunts, wrong, time.perf_counter() - start)
    if written is not None:
        try:
            written.write_text(page(hunts), encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"--out {str(written)!r}: {reason_of(error)}") from error
    # A page says which mutations survive: what it knows of is open, not new.
    if wrong if was is None else not _is_current(*was, hunts):
        context.exit(1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--check {str(path)!r}: {reason_of(error)}") from error


def _is_current(path: Path, was: str, hunts: list[Hunt]) -> bool:
    """Whether a page says what was found, every survivor among it; says what differs."""
    now = page(hunts)
    if was != now:
        click.echo(f"{path} is not what `kvtide mutations --out {path}` writes now:", err=True)
        differences = difflib.unified_diff(
            was.splitlines(), now.splitlines(), str(path), "found", "", "", 0, ""
        )
        click.echo("\n".join(differences), err=True)
    return was == now


def _print(console: Console, hunts: list[Hunt], wrong: list[str], seconds: float) -> None:
    table = Table(box=rich.box.SIMPLE_HEAD)
    for title in ("mutation", "rule", "seeds", "found by"):
        table.add_column(title, justify="right" if title == "seeds" else "left")
    for each in hunts:
        mutation = MUTATIONS[each.mutation]
        check = each.failure.check if each.failure is not None else _survived(each)
        table.add_row(mutation.id, escape(mutation.rule), str(each.seeds_run), check)
    console.print(table)
    said = f"not as they should be: {', '.join(wrong)}" if wrong else "every one as it should be"
    console.print(f"{len(hunts)} mutations in {seconds:.0f} s: {said}", highlight=False, soft_wrap=True)


def _survived(each: Hunt) -> str:
    return "behind another rule" if MUTATIONS[each.mutation].unreachable else "[bold]survived[/bold]"


def _document(hunts: list[Hunt], seconds: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 3),
        "mutations": [
            {
                "id": each.mutation,
                "rule": MUTATIONS[each.mutation].rule,
                "rows": list(MUTATIONS[each.mutation].rows),
                "unreachable": MUTATIONS[each.mutation].unreachable or None,
                "seeds": each.seeds_run,
                "failure": None if each.failure is None else each.failure.document(),
            }
            for each in hunts
        ],
    }
