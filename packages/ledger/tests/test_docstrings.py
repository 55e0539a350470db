"""Every public docstring says who waits, host or stream, if anyone does (V3): a reader must not have to guess."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import kvtide.ledger


def public_docstrings() -> Iterator[tuple[str, str]]:
    """What the package exports, and the public methods and properties that it defines."""
    for name in kvtide.ledger.__all__:
        exported = getattr(kvtide.ledger, name)
        if not inspect.isclass(exported) and not inspect.isfunction(exported):
            continue  # tables and type aliases have no docstring of their own
        yield name, exported.__doc__ or ""
        for member, value in vars(exported).items() if inspect.isclass(exported) else ():
            documented = value.fget if isinstance(value, property) else value
            if inspect.isfunction(documented) and not member.startswith("_"):
                yield f"{name}.{member}", documented.__doc__ or ""


def test_every_public_docstring_says_who_waits() -> None:
    """Calls that keep books and calls that wait look alike from outside."""
    found = dict(public_docstrings())
    assert len(found) > 60
    silent = [name for name, text in found.items() if "wait" not in text]
    assert silent == []
