"""Real hybrid models served from one arena, every token and logit checked.

`kvtide demo` serves seven small models, two of them trained, from arenas so tight that bands take each other's bytes and
pages move, each forward launched before the last one is processed; it ends with a table and a picture of each arena over time. Five
more are served if they are named. Exit status 1 when one token or logit differs, or something ran unordered. `--break` switches one rule off, to see that it is needed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import rich.box
import structlog
import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.engine.broken_rules import Rule
from kvtide.engine.demo import Continuation, DemoRun, DemoSettings, Loop, demo_runs
from kvtide.engine.models import MODELS
from kvtide.engine.static_split import Held
from kvtide.sizing import CheckpointStrategy, SizingError
from kvtide.storage import StorageError, StorageSettings

DEFAULT_PAGE_SIZES = (1, 16)
"""Tokens a page, unless asked otherwise."""

SHOWN_TEXTS = 4
"""Continuations shown of a trained model."""

LEFT_OUT = {
    Rule.BARRIER: "the schedule stream does not wait for the read end of the newest forward",
    Rule.CLEARANCE: "the schedule stream does not wait for forwards that may still read what it is about to write",
    Rule.ZEROING: "pages and state slots are handed out as their last owner left them",
    Rule.TRANSLATE: "forwards are not told where a page that has moved lies",
}
"""What the demo says that `--break` leaves out."""


@click.command("demo")
@click.option(
    "--model",
    "names",
    multiple=True,
    type=click.Choice(list(MODELS)),
    help="Only this model; repeatable.  [default: the first seven]",
)
@click.option(
    "--page-size",
    "page_sizes",
    multiple=True,
    type=click.IntRange(min=1, max=64),
    help="Tokens a page; repeatable.  [default: 1 and 16]",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Arrival times, random prompts, and when queued work runs.",
)
@click.option(
    "--loop",
    "loop_name",
    type=click.Choice([loop.value for loop in Loop]),
    default=Loop.OVERLAP.value,
    show_default=True,
    help="Launch forwards ahead, or one at a time.",
)
@click.option(
    "--strategy",
    "strategy_name",
    type=click.Choice([strategy.value for strategy in CheckpointStrategy]),
    default=CheckpointStrategy.EXTRA_BUFFER.value,
    show_default=True,
    help="How prompts that begin alike share memory; none: not at all.",
)
@click.option(
    "--break",
    "rule_name",
    type=click.Choice([rule.value for rule in Rule]),
    help="Switch one rule off, and see the check fail.",
)
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("kvtide-demo"),
    show_default=True,
    help="Folder for the pictures.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of tables.")
@click.pass_context
def command(
    context: click.Context,
    *,
    names: Sequence[str],
    page_sizes: Sequence[int],
    seed: int,
    loop_name: str,
    strategy_name: str,
    rule_name: str | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Serve real hybrid models from one arena and check every token and logit."""
    _quiet_libraries()
    rule = None if rule_name is None else Rule(rule_name)
    settings = _settings(seed, Loop(loop_name), CheckpointStrategy(strategy_name), rule)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"--out {str(folder)!r}: {error.strerror or error}") from error
    runs: list[DemoRun] = []
    stderr, stdout = Console(stderr=True), Console()
    chosen = [
        model for model in MODELS.values() if (model.name in names if names else not model.is_asked_for)
    ]
    with stderr.status("starting") as status:
        for run in demo_runs(
            chosen,
            page_sizes or DEFAULT_PAGE_SIZES,
            settings=settings,
            folder=folder,
            progress=lambda text: status.update(escape(text)),
        ):
            stderr.print(_line(run), highlight=False, soft_wrap=True)
            runs.append(run)
    if as_json:
        document = {
            "broken": rule_name,
            "equal": all(run.is_right for run in runs),
            "runs": list(map(_document, runs)),
        }
        click.echo(json.dumps(document))
    else:
        if rule is not None:
            _print_rule(stdout, rule)
        _print_texts(stdout, runs)
        stdout.print(_table(runs))
        stdout.print(_TABLE_NOTES.format(requests=runs[0].request_count), highlight=False, soft_wrap=True)
        _print_differences(stdout, runs)
        if rule is not None:
            _print_unseen(stdout, rule, runs)
        stdout.print(
            f"A picture of each arena over time: {folder.resolve()}", soft_wrap=True, highlight=False
        )
        stdout.print(f"Look first at {_most_moved(runs).picture.resolve()}", soft_wrap=True, highlight=False)
    if not all(run.is_right for run in runs):
        context.exit(1)


def _settings(seed: int, loop: Loop, strategy: CheckpointStrategy, rule: Rule | None) -> DemoSettings:
    if rule is not None and loop is Loop.PLAIN:
        raise click.UsageError(
            f"--break {rule.value} needs the overlap loop: one forward at a time breaks nothing"
        )
    try:
        level = StorageSettings.from_environment(os.environ).check_level
    except StorageError as error:
        raise click.UsageError(str(error)) from error
    settings = DemoSettings(seed=seed, loop=loop, strategy=strategy, broken=rule, check_level=level)
    try:
        settings.policy  # noqa: B018  (asked for its error)
    except SizingError as error:
        raise click.UsageError(f"--strategy {strategy.value} --loop {loop.value}: {error}") from error
    return settings


def _quiet_libraries() -> None:
    """Only warnings of ours, only errors of transformers: its hints name CUDA kernels that nothing here needs."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers


def _most_moved(runs: Sequence[DemoRun]) -> DemoRun:
    return max(runs, key=lambda run: (run.rearrangements, run.moved_units))


def _verdict(run: DemoRun) -> str:
    if not run.check.is_equal:
        return "[bold red]DIFFERS[/]"
    return "[bold red]UNORDERED[/]" if run.races else "[green]equal[/]"


def _line(run: DemoRun) -> str:
    return (
        f"{run.model.name}, page size {run.page_tokens}, {run.hook.value}: {run.token_count} tokens of {run.request_count} "
        f"requests, {run.moved_units} pages moved, {_verdict(run)}, {run.seconds:.1f} s"
    )


def _table(runs: Sequence[DemoRun]) -> Table:
    """A row for each model and page size; its hooks move the same pages, and must all be equal."""
    table = Table(title="Served from one arena", box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in ("model", "bands"):
        table.add_column(heading, no_wrap=True)
    for heading in ("page", "tokens", "moved", "hits", "held", "static"):
        table.add_column(heading, justify="right")
    table.add_column("checked")
    for (model, page_tokens), group in itertools.groupby(
        runs, key=lambda run: (run.model.name, run.page_tokens)
    ):
        hooks = list(group)
        first = hooks[0]
        table.add_row(
            model,
            " ".join(first.bands),
            str(page_tokens),
            str(first.token_count),
            str(first.moved_units),
            _hits_text(first),
            str(first.held.most),
            _static_text(first.held_static),
            _verdict(next((run for run in hooks if not run.is_right), first)),
        )
    return table


def _hits_text(run: DemoRun) -> str:
    return "–" if run.sharing is None else str(run.sharing.hit_tokens)


def _static_text(held: Held) -> str:
    return str(held.most) if not held.never_fit else f"{held.most} ({held.never_fit} never fit)"


_TABLE_NOTES = """moved: pages and state slots. hits: prompt tokens restored from what others had computed, in every kind of memory. held: most of the {requests} requests in the arena at once; static: the same
where each band has fixed bytes, in proportion to the average request. checked: each token with
the model's own generate() for that request alone, each logit bit for bit with plain tensors; for every hook that
the model has (attention over gathered tokens, attention over whole pages), which served the same tokens.
"""


def _print_texts(console: Console, runs: Sequence[DemoRun]) -> None:
    """What the trained models wrote, once a model: it is the same in every run, or went wrong in the one that is shown."""
    shown: set[str] = set()
    for run in sorted(runs, key=lambda run: not _wrong(run)):
        if run.texts and run.model.name not in shown:
            shown.add(run.model.name)
            console.print(f"\n[bold]{escape(run.model.title)}[/], bytes in and bytes out:")
            most_varied = sorted(run.texts, key=lambda text: len(set(text.served.split())), reverse=True)
            for text in (_wrong(run) or most_varied)[:SHOWN_TEXTS]:
                prompt = text.prompt if len(text.prompt) <= 60 else f"…{text.prompt[-59:]}"
                line = f"{escape(prompt)}▸[bold]{_one_line(text.served)}[/]"
                if text.served != text.alone:
                    line += f"\n[red]wrong; alone it is[/] ▸[bold]{_one_line(text.alone)}[/]"
                console.print(textwrap.indent(line, "  "), soft_wrap=True, highlight=False)
    console.print()


def _wrong(run: DemoRun) -> list[Continuation]:
    return [text for text in run.texts if text.served != text.alone]


def _one_line(text: str) -> str:
    """`text` without what a terminal would act on."""
    shown = "".join("⏎" if each == "\n" else each if each.isprintable() else "␀" for each in text)
    return escape(shown)


def _print_rule(console: Console, rule: Rule) -> None:
    """What is left out, before anything that comes of it."""
    console.print(
        f"[bold]Without {rule.value}[/]: {LEFT_OUT[rule]}. Prefixes are not shared meanwhile.",
        soft_wrap=True,
        highlight=False,
    )


def _print_differences(console: Console, runs: Sequence[DemoRun]) -> None:
    found = [
        (run, str(difference))
        for run in runs
        for difference in (run.check.logits, *run.check.tokens)
        if difference is not None
    ]
    found += [
        (run, f"{len(run.races)} accesses that nothing orders, first: {run.races[0]}")
        for run in runs
        if run.races
    ]
    for where, text in _by_hooks(found):
        console.print(f"[red]{where}[/]: {escape(text)}", soft_wrap=True)


def _print_unseen(console: Console, rule: Rule, runs: Sequence[DemoRun]) -> None:
    """Where the rule was left out and nothing came of it: a check that passes in silence would look like one that cannot fail."""
    why = (
        "what was there before is written over, or hidden by a mask, before it is read"
        if rule is Rule.ZEROING
        else "try another seed or page size"
    )
    text = f"nothing went wrong without {rule.value}: {why}"
    for where, said in _by_hooks([(run, text) for run in runs if run.is_right]):
        console.print(f"[yellow]{where}[/]: {said}", soft_wrap=True, highlight=False)


def _by_hooks(said: Sequence[tuple[DemoRun, str]]) -> list[tuple[str, str]]:
    """Where something is so and what, a line each: once, with the hooks of the model that it is so with."""
    hooks: dict[tuple[str, int, str], list[str]] = {}
    for run, text in said:
        hooks.setdefault((run.model.name, run.page_tokens, text), []).append(run.hook.value)
    return [
        (f"{name}, page size {page_tokens}, {' and '.join(names)}", text)
        for (name, page_tokens, text), names in hooks.items()
    ]


def _document(run: DemoRun) -> Mapping[str, Any]:
    """The fields of `--json`, one object a run."""
    return {
        "model": run.model.name,
        "hook": run.hook.value,
        "page_tokens": run.page_tokens,
        "bands": list(run.bands),
        "arena_bytes": run.arena_bytes,
        "requests": run.request_count,
        "tokens": run.token_count,
        "pages_moved": run.moved_units,
        "rearrangements": run.rearrangements,
        "requests_held": run.held.most,
        "requests_held_static": run.held_static.most,
        "never_fit_static": run.held_static.never_fit,
        "steps": run.held.steps,
        "steps_static": run.held_static.steps,
        "equal": run.check.is_equal,
        "unordered": len(run.races),
        "prompt_tokens_known": run.sharing.matched_tokens if run.sharing is not None else 0,
        "prompt_tokens_hit": run.sharing.hit_tokens if run.sharing is not None else 0,
        "units_evicted": dict(run.sharing.evicted_units) if run.sharing is not None else {},
        "differences": [str(each) for each in (run.check.logits, *run.check.tokens) if each is not None],
        "wrong_texts": [attrs.asdict(text) for text in _wrong(run)],
        "picture": str(run.picture.resolve()),
        "seconds": round(run.seconds, 2),
    }
