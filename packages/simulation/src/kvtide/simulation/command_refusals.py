"""What commands refuse before they begin: options that would be passed over, places that cannot be written.

A search may take an hour; what it finds is not to be lost to a folder that could not be made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click
from click.core import ParameterSource


def refuse_beside(context: click.Context, chosen: str, others: Mapping[str, str]) -> None:
    """Raise `click.UsageError` if any of `others` was given, parameter → option, which mean nothing beside `chosen`."""
    given = [
        option
        for name, option in others.items()
        if context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)} would change nothing beside {chosen}")


def check_folder(option: str, folder: Path) -> None:
    """Raise `click.UsageError` unless files can be written in a folder, which need not be there yet."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    _check_writable(option, folder, there)


def check_file(option: str, path: Path) -> None:
    """Raise `click.UsageError` unless a file can be written; its folder must be there."""
    _check_writable(option, path, path if path.exists() else path.absolute().parent)


def reason_of(error: Exception) -> str:
    """Why a file could not be read or written, without numbers that mean something to programs alone."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _check_writable(option: str, asked: Path, there: Path) -> None:
    why = None
    if not there.exists():
        why = "No such file or directory"
    elif there is not asked and not there.is_dir():
        why = f"{str(there)!r} is no folder"
    elif not os.access(there, os.W_OK | (os.X_OK if there.is_dir() else 0)):
        why = "Permission denied"
    if why is not None:
        raise click.UsageError(f"{option} {str(asked)!r}: {why}")
