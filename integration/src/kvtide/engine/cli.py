"""`kvtide`: one program whose commands are found by name and loaded only when called.

A command is an entry point of the group `kvtide.commands`, so a package may bring one without anything below it importing
upward, and `kvtide plan` starts without the demo and its torch. Every error a user can cause ends as one line.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

COMMAND_GROUP = "kvtide.commands"
"""Entry-point group of the commands; each names a `click.Command`."""

CANCELLED_STATUS = 130
"""Exit status after an interrupt, as shells report it."""


def installed_commands() -> Mapping[str, importlib.metadata.EntryPoint]:
    """Entry points of every installed command by name, none of them loaded."""
    found = importlib.metadata.entry_points(group=COMMAND_GROUP)
    return {entry_point.name: entry_point for entry_point in sorted(found, key=lambda one: one.name)}


class CommandsByName(click.Group):
    """A group that imports a command when it is called, and not to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of what is installed."""
        return list(installed_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, loaded; refuses an unknown name with the known ones."""
        commands = installed_commands()
        if cmd_name not in commands:
            known = ", ".join(commands) or "none is installed"
            raise click.UsageError(f"no command {cmd_name!r}; commands are: {known}")
        try:
            command = commands[cmd_name].load()
        except ImportError as error:
            raise click.ClickException(f"command {cmd_name!r} cannot be loaded: {error}") from error
        if not isinstance(command, click.Command):
            raise click.ClickException(
                f"command {cmd_name!r} is a {type(command).__name__}, no click command"
            )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One row a command: its name, and its module's first line."""
        rows = [(name, _first_line(entry_point)) for name, entry_point in installed_commands().items()]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = "kvtide",
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the program; in standalone mode every error is one line on stderr, 2 where the call was wrong."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        try:
            result = super().main(args, prog_name, complete_var, False, **extra)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            program = context.command_path if context is not None else prog_name
            click.echo(f"{program}: {' '.join(error.format_message().split())}", err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo(f"{prog_name}: cancelled", err=True)
            sys.exit(CANCELLED_STATUS)
        sys.exit(result if isinstance(result, int) else 0)


def _first_line(entry_point: importlib.metadata.EntryPoint) -> str:
    """The first line of the docstring of a command's module, read from its source without running it."""
    try:
        spec = importlib.util.find_spec(entry_point.module)
    except ImportError:
        return ""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return docstring.splitlines()[0] if docstring else ""


@click.group(
    cls=CommandsByName,
    name="kvtide",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="kvtide", prog_name="kvtide", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Every kind of KV cache and recurrent state of a hybrid model in one byte arena."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


if __name__ == "__main__":
    main()
