"""A mutation: one rule of the allocator, its ledger, or of a scheduler, weakened at run time, to see that the simulation notices.

What is replaced is named by a path, `kvtide.chain.relief:Relief._recover`, and looked up when the mutation is planted: rules lie inside
packages, below their faces, and a path also reaches the worker processes that a mutation is planted in by its id. A path that
leads nowhere is an error, so a rule that moves takes its mutation along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, TypeAlias

import attrs
import numpy as np

from kvtide.device import IntArray

Replacement: TypeAlias = Callable[..., Any]
"""Stands in for a function; its arguments are that function's."""


class Patch:
    """What has been replaced, and how to undo it."""

    def __init__(self) -> None:
        """Nothing."""
        self._undo: list[Callable[[], None]] = []

    def look(self, path: str) -> Any:
        """What stands there now."""
        owner, name = _find(path)
        return getattr(owner, name)

    def replace(self, path: str, value: Any) -> None:
        """Put `value` where `path` leads. Raises `AttributeError` for no such place."""
        owner, name = _find(path)
        is_own = name in vars(owner)
        raw = vars(owner).get(name)
        setattr(owner, name, staticmethod(value) if isinstance(raw, staticmethod) else value)
        self._undo.append((lambda: setattr(owner, name, raw)) if is_own else (lambda: delattr(owner, name)))

    def around(self, path: str, make: Callable[[Replacement], Replacement]) -> None:
        """Replace a function by what `make` makes of it, called with the same arguments: a recorder reads them off its signature."""
        original = self.look(path)
        made = make(original)

        @wraps(original)
        def call(*args: Any, **named: Any) -> Any:
            return made(*args, **named)

        self.replace(path, call)

    def put(self, path: str, key: Any, value: Any) -> None:
        """Put `value` into the mapping where `path` leads; raises `KeyError` for a new key."""
        mapping = self.look(path)
        before = mapping[key]
        mapping[key] = value
        self._undo.append(lambda: mapping.__setitem__(key, before))

    def undo(self) -> None:
        """Put everything back, the newest first."""
        while self._undo:
            self._undo.pop()()


Plant: TypeAlias = Callable[[Patch], None]
"""Breaks a rule."""


@attrs.frozen(kw_only=True, eq=False)
class Mutation:
    """One rule, weakened."""

    id: str
    """Kind and place of the rule: `wait.settle`."""

    rule: str
    """What the rule says, where it holds."""

    rows: tuple[str, ...]
    """Requirements that ask for it."""

    plant: Plant
    """Breaks it."""

    unreachable: str = ""
    """Why no run can tell it from the shipped code, where another rule stands before this one; empty for all that must be found."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Within it the rule is broken, in this process."""
        patch = Patch()
        try:
            self.plant(patch)
            yield
        finally:
            patch.undo()


# ── ways to break ──


def without(path: str, answer: Any = None) -> Plant:
    """A function that does nothing."""
    return lambda patch: patch.around(path, lambda _: lambda *args, **named: answer)


def instead(path: str, replacement: Replacement) -> Plant:
    """Another function."""
    return lambda patch: patch.around(path, lambda _: replacement)


def around(path: str, make: Callable[[Replacement], Replacement]) -> Plant:
    """What is made of the function."""
    return lambda patch: patch.around(path, make)


def preceded(path: str, before: Callable[..., None]) -> Plant:
    """A function before which another is called, with the same arguments."""

    def make(original: Replacement) -> Replacement:
        def call(*args: Any, **named: Any) -> Any:
            before(*args, **named)
            return original(*args, **named)

        return call

    return around(path, make)


def during(outer: str, inner: str, replacement: Replacement) -> Plant:
    """Another function at `inner`, while the one at `outer` runs."""

    def plant(patch: Patch) -> None:
        depth = 0

        def make_outer(original: Replacement) -> Replacement:
            def call(*args: Any, **named: Any) -> Any:
                nonlocal depth
                depth += 1
                try:
                    return original(*args, **named)
                finally:
                    depth -= 1

            return call

        def make_inner(original: Replacement) -> Replacement:
            def call(*args: Any, **named: Any) -> Any:
                return (replacement if depth else original)(*args, **named)

            return call

        patch.around(outer, make_outer)
        patch.around(inner, make_inner)

    return plant


def nothing_during(outer: str, inner: str, answer: Any = None) -> Plant:
    """A function at `inner` that does nothing while the one at `outer` runs."""
    return during(outer, inner, lambda *args, **named: answer)


def all_of(*plants: Plant) -> Plant:
    """One rule that stands in several places."""

    def plant(patch: Patch) -> None:
        for each in plants:
            each(patch)

    return plant


def _find(path: str) -> tuple[Any, str]:
    """The owner of what a path names, and its name there."""
    module, _, inside = path.partition(":")
    *parents, name = inside.split(".")
    owner: Any = import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    if not hasattr(owner, name):
        raise AttributeError(f"{path} leads nowhere: {owner!r} has no {name!r}")
    return owner, name


def nowhere(_: object, units: IntArray) -> Any:
    """What a question about units is answered with: none of them."""
    return np.zeros(len(units), np.bool_)
