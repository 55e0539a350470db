"""What commands that run seeds are told of them: which, how long each, on how many processes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

MOST_SEEDS = 1_000_000
"""Of one call."""


def seed_options(seeds: range, action_count: int) -> Callable[[Command], Command]:
    """`--seeds`, `--ops` and `--jobs`, as `seeds`, `action_count` and `jobs`, with these defaults for the first two."""
    options = (
        click.option(
            "--seeds",
            default=f"{seeds.start}:{seeds.stop}",
            show_default=True,
            metavar="A:B",
            callback=_parse_seeds,
            help="Seeds A to B − 1.",
        ),
        click.option(
            "--ops",
            "action_count",
            type=click.IntRange(1, 100_000),
            default=action_count,
            show_default=True,
            help="Actions a seed.",
        ),
        click.option(
            "--jobs",
            type=click.IntRange(1, 1_024),
            default=os.cpu_count() or 1,
            help="Processes.  [default: one a core]",
        ),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _parse_seeds(_ctx: click.Context, _param: click.Parameter, value: str) -> range:
    """`A:B` as a range, or `A` alone."""
    found = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", value.strip(), re.ASCII)
    seeds = range(0)
    if found is not None:
        first = int(found[1])
        seeds = range(first, first + 1 if found[2] is None else int(found[2]))
    if not 0 < len(seeds) <= MOST_SEEDS:
        raise click.BadParameter(
            f"must be A:B, seeds from A up to B, at least one and at most {MOST_SEEDS}, found {value[:40]!r}"
        )
    return seeds
