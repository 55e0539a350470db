"""Random schedulers on the allocator that ships, checked after every step.

`kvtide stress --seeds 0:200` runs seeds; what fails is written to a file that `kvtide stress --replay FILE` runs again. With
`--device` runs and cases are carried out on a device that ships; with `--record FILE` one seed becomes a trace of its allocator's life, for `kvtide replay`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import rich.box
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from kvtide.simulation.actions import installed_operations, not_reached
from kvtide.simulation.cases import MODELLED, Case, installed_versions, load_case, save_case
from kvtide.simulation.command_refusals import check_folder, reason_of, refuse_beside
from kvtide.simulation.failures import CHECKS
from kvtide.simulation.real import DEVICE_KINDS, open_device, run_actions_on, run_seed_on
from kvtide.simulation.run import Run, run_actions
from kvtide.simulation.seed_options import seed_options
from kvtide.simulation.shrinking import shrink
from kvtide.simulation.sweep import SeedRun, Totals, quiet_logs, sweep
from kvtide.simulation.traces import record_seed

SHOWN_ACTIONS = 40
"""Of a failing run; the rest is in its file."""

_NOT_RECORDED = {
    "jobs": "--jobs",
    "minimize": "--minimize",
    "folder": "--out",
    "replayed": "--replay",
    "kind": "--device",
    "as_json": "--json",
}
"""Parameter → option that means nothing where a seed is recorded."""

_NOT_REPLAYED = {
    "seeds": "--seeds",
    "action_count": "--ops",
    "jobs": "--jobs",
    "page_tokens": "--page-tokens",
}
"""Where a case is replayed."""

_NOT_ON_DEVICES = {"jobs": "--jobs", "minimize": "--minimize"}
"""Where seeds run on a device that ships: one after the other, and a shrink runs its cases on modelled ones."""


@click.command(name="stress", context_settings={"help_option_names": ["-h", "--help"]})
@seed_options(range(100), 300)
@click.option(
    "--minimize", is_flag=True, help="Shrink each failure to a minimal one; takes a minute or so each."
)
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("kvtide-stress"),
    show_default=True,
    help="Folder for failing cases; made when there is one.",
)
@click.option(
    "--replay",
    "replayed",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Run this case instead of seeds.",
)
@click.option(
    "--device",
    "kind",
    type=click.Choice([MODELLED, *DEVICE_KINDS]),
    help="What runs the work: real ones show wrong bytes, not races.  [default: modelled; of a case, what it failed on]",
)
@click.option(
    "--record",
    "trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the trace of one seed instead.",
)
@click.option(
    "--page-tokens",
    type=click.IntRange(1, 4_096),
    help="Tokens in the largest pages of a recorded seed.  [default: as drawn]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of tables.")
@click.pass_context
def command(
    context: click.Context,
    *,
    seeds: range,
    action_count: int,
    jobs: int,
    minimize: bool,
    folder: Path,
    replayed: Path | None,
    kind: str | None,
    trace: Path | None,
    page_tokens: int | None,
    as_json: bool,
) -> None:
    """Run random schedulers on the allocator that ships; exit status 1 when a check fails."""
    quiet_logs()
    try:
        installed_operations()
    except (ValueError, TypeError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    if trace is not None:
        refuse_beside(context, "--record", _NOT_RECORDED)
        has_failed = _record(trace, seeds, action_count, page_tokens)
    elif replayed is not None:
        refuse_beside(context, "--replay", _NOT_REPLAYED | ({} if minimize else {"folder": "--out"}))
        has_failed = _replay(replayed, kind, minimize=minimize, folder=folder, as_json=as_json)
    else:
        if page_tokens is not None:
            raise click.UsageError("--page-tokens is for --record: seeds draw their own")
        if kind in DEVICE_KINDS:
            refuse_beside(context, f"--device {kind}", _NOT_ON_DEVICES)
        check_folder("--out", folder)
        results = (
            _on_device(kind, seeds, action_count)
            if kind in DEVICE_KINDS
            else sweep(seeds, action_count, jobs=jobs, minimize=minimize)
        )
        has_failed = _sweep(results, len(seeds), kind or MODELLED, folder=folder, as_json=as_json)
    if has_failed:
        context.exit(1)


def _record(path: Path, seeds: range, action_count: int, page_tokens: int | None) -> bool:
    """Write a seed's trace; whether a check failed, up to which the trace goes then."""
    if len(seeds) != 1:
        raise click.UsageError(f"--record writes the trace of one seed, found {len(seeds)}: --seeds N")
    try:
        with path.open("w", encoding="utf-8") as out:
            recorded = record_seed(out, seeds[0], action_count, page_tokens=page_tokens)
    except OSError as error:
        raise click.UsageError(f"--record {str(path)!r}: {reason_of(error)}") from error
    if recorded.failure is not None:
        click.echo(
            f"seed {seeds[0]} fails after {recorded.calls} calls, which are in {path}: {recorded.failure}",
            err=True,
        )
        return True
    click.echo(f"{recorded.calls} calls of seed {seeds[0]} in {path}")
    return False


def _on_device(kind: str, seeds: range, action_count: int) -> Iterator[SeedRun]:
    for seed in seeds:
        try:
            run = run_seed_on(partial(open_device, kind), seed, action_count)
        except (ImportError, RuntimeError, AssertionError) as error:
            raise click.UsageError(f"--device {kind}: {error}") from error
        yield SeedRun(seed, run, None)


def _sweep(results: Iterator[SeedRun], seed_count: int, kind: str, *, folder: Path, as_json: bool) -> bool:
    totals, files = Totals(), dict[int, Path | None]()
    stderr = Console(stderr=True)
    start = time.perf_counter()
    with show_progress(stderr, seed_count, "seeds") as advance:
        for result in results:
            totals.add(result)
            if result.run.failure is not None:
                files[result.seed] = _save(result, folder, kind)
                stderr.print(
                    f"seed {result.seed}: {escape(str(result.run.failure))}", highlight=False, soft_wrap=True
                )
            advance()
    seconds = time.perf_counter() - start
    if as_json:
        click.echo(json.dumps(_document(totals, seconds, files), ensure_ascii=False))
    else:
        _print_totals(Console(), totals, seconds)
        for result in totals.failed:
            _print_failure(Console(), result.shrunk or result.run, f"seed {result.seed}", files[result.seed])
    return bool(totals.failed)


def _replay(path: Path, kind: str | None, *, minimize: bool, folder: Path, as_json: bool) -> bool:
    try:
        case = load_case(path)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--replay {str(path)!r}: {reason_of(error)}") from error
    given, kind = kind, kind or case.device
    if minimize:
        if kind in DEVICE_KINDS:
            raise click.UsageError(
                f"a case on --device {kind} is not made minimal: a shrink runs it on modelled devices; "
                "--device modelled --minimize if it fails there too"
            )
        check_folder("--out", folder)
    try:
        run = (
            run_actions_on(partial(open_device, kind), case.scenario, case.actions)
            if kind in DEVICE_KINDS
            else run_actions(case.scenario, case.actions)
        )
    except ValueError as error:
        raise click.UsageError(f"--replay {str(path)!r}: {error}") from error
    except (ImportError, RuntimeError, AssertionError) as error:
        raise click.UsageError(
            f"--device {kind}: {error}"
            if given
            else f"the case failed on {kind}: {error}; --device modelled runs it without"
        ) from error
    console, stderr = Console(), Console(stderr=True)
    if dict(case.versions) != installed_versions():
        stderr.print(
            f"found with {dict(case.versions)}, replayed with {installed_versions()}",
            highlight=False,
            soft_wrap=True,
        )
    where = path
    if run.failure is not None and minimize:
        run = shrink(run, installed_operations())
        kept = _keep(folder / f"{path.stem}-minimal.json", Case.of(run, case.seed))
        where = kept or path
    if as_json:
        document = {"failure": None if run.failure is None else run.failure.document(), "file": str(where)}
        click.echo(json.dumps(document, ensure_ascii=False))
    elif run.failure is not None:
        _print_failure(console, run, "the case", where)
    else:
        was = "nothing" if case.failure is None else case.failure.check
        console.print(
            f"{len(run.actions)} actions, every check held (when the case was written, {was} failed)",
            highlight=False,
        )
    return run.failure is not None


@contextmanager
def show_progress(console: Console, count: int, what: str) -> Iterator[Any]:
    """A bar on a terminal, nothing elsewhere; yields what to call after each of `count` seeds, or whatever they are."""
    columns = [*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=count)
        yield lambda: progress.advance(task)


def _save(result: SeedRun, folder: Path, kind: str) -> Path | None:
    """Write a failure, minimal if it was shrunk; its file."""
    # A seed that fails before it comes to the device is replayed, and shrunk, without one.
    kind = MODELLED if result.run.is_modelled else kind
    case = Case.of(result.shrunk or result.run, result.seed, kind)
    return _keep(folder / f"seed-{result.seed}.json", case)


def _keep(path: Path, case: Case) -> Path | None:
    """Write a case; its file, or `None` where the disk takes no more: what was found is shown all the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_case(path, case)
    except OSError as error:
        click.echo(f"--out {str(path.parent)!r}: {reason_of(error)}: the case is not kept", err=True)
        return None
    return path


def _print_totals(console: Console, totals: Totals, seconds: float) -> None:
    table = Table(box=rich.box.SIMPLE_HEAD, title="what the operations met", title_justify="left")
    table.add_column("operation")
    table.add_column("outcome")
    table.add_column("times", justify="right")
    rows = [
        (operation, outcome, f"{times:,}") for (operation, outcome), times in sorted(totals.coverage.items())
    ]
    missing = not_reached(installed_operations(), totals.coverage)
    rows += [
        (operation, f"not reached: {'; '.join(outcomes)}", "") for operation, outcomes in missing.items()
    ]
    last = ""
    # In the order of operations, of each what was not reached last.
    for operation, outcome, times in sorted(rows, key=lambda row: row[0]):
        table.add_row(operation if operation != last else "", escape(outcome), times)
        last = operation
    console.print(table)
    facts = ", ".join(f"{count:,} {fact}" for fact, count in sorted(totals.facts.items()))
    console.print(facts, highlight=False, soft_wrap=True)
    failed = f"{len(totals.failed)} failed" if totals.failed else "every check held"
    console.print(
        f"{totals.seeds:,} seeds, {totals.actions:,} actions in {seconds:.1f} s, "
        f"{totals.actions / seconds:,.0f} a second: {failed}",
        highlight=False,
        soft_wrap=True,
    )


def _print_failure(console: Console, run: Run, name: str, path: Path | None) -> None:
    assert run.failure is not None, "only failures are printed"
    console.rule(f"{name}: {run.failure.check}", align="left")
    lines = [
        f"[bold]{escape(run.failure.message)}[/bold]",
        f"breaks: {CHECKS[run.failure.check]}",
        f"in: {escape(str(run.scenario))}",
        *(
            f"{place:4} {escape(str(action))}"
            for place, action in list(enumerate(run.actions))[-SHOWN_ACTIONS:]
        ),
        "not kept" if path is None else f"replay: kvtide stress --replay {escape(str(path))}",
    ]
    if len(run.actions) > SHOWN_ACTIONS:
        lines.insert(3, f"     … {len(run.actions) - SHOWN_ACTIONS} actions before")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _document(totals: Totals, seconds: float, files: dict[int, Path | None]) -> dict[str, Any]:
    coverage: dict[str, dict[str, int]] = {}
    for (operation, outcome), times in sorted(totals.coverage.items()):
        coverage.setdefault(operation, {})[outcome] = times
    return {
        "seeds": totals.seeds,
        "actions": totals.actions,
        "seconds": round(seconds, 3),
        "actions_per_second": round(totals.actions / seconds, 1),
        "versions": installed_versions(),
        "coverage": coverage,
        "not_reached": not_reached(installed_operations(), totals.coverage),
        "facts": dict(sorted(totals.facts.items())),
        "failures": [
            {
                "seed": result.seed,
                **(result.run.failure.document() if result.run.failure is not None else {}),
                "actions": len(result.run.actions),
                "minimal_actions": None if result.shrunk is None else len(result.shrunk.actions),
                "file": None if files[result.seed] is None else str(files[result.seed]),
            }
            for result in totals.failed
        ],
    }
