"""Operations as plug-ins: found by entry point, matched by what they can do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from kvtide.simulation import OPERATION_GROUP, Operation, installed_operations, run_seed, shrink
from kvtide.simulation.cases import installed_versions

from .entry_points import write_entry_points

BACKUP = """
class Backup:
    name = "backup"
    weight = 50
    outcomes = frozenset({"copied", "nobody"})

    def generate(self, rng, world):
        return {"request": rng.randrange(8)} if world.requests else None

    def apply(self, world, numbers):
        return "copied" if world.requests else "nobody"


class Silent(Backup):
    outcomes = None


class Misspoken(Backup):
    outcomes = frozenset({"copies"})


class Older:
    name, weight, generate, apply = "older", 50, Backup.generate, Backup.apply


OPERATIONS = [Backup()]
TWICE = [Backup(), Backup()]
NONE = [print]
SILENT = [Silent()]
OLDER = [Older()]
MISSPOKEN = [Misspoken()]
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A distribution that brings what `value` names."""
    (folder / "backup_operations.py").write_text(BACKUP)
    write_entry_points(folder, "kvtide-backup", {OPERATION_GROUP: {"backup": value}})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "backup_operations", raising=False)
    importlib.invalidate_caches()


@pytest.mark.requirement("X1")
def test_another_package_brings_operations_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operations: dict[str, Operation]
) -> None:
    """Host copies and transfers live in packages that know the simulation; the simulation knows none of them."""
    install(tmp_path, monkeypatch, "backup_operations:OPERATIONS")
    found = installed_operations()
    assert {*operations, "backup"} <= set(found)
    assert list(found) == sorted(found)
    # Whatever else is installed where this runs.
    run = run_seed(0, 100, {name: one for name, one in found.items() if name in {*operations, "backup"}})
    assert run.failure is None
    assert run.coverage["backup", "copied"] > 5


@pytest.mark.requirement("X1")
def test_what_an_operation_has_not_declared_is_a_failure_where_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an outcome that nobody reaches would hide behind one that nobody has heard of; and the failure shrinks like any other."""
    install(tmp_path, monkeypatch, "backup_operations:MISSPOKEN")
    found = {name: one for name, one in installed_operations().items() if name in {"admit", "backup"}}
    run = run_seed(1, 100, found)
    assert run.failure is not None
    assert run.failure.check == "undeclared_outcome"
    assert run.failure.message == "'backup' says 'copied', which is none of its outcomes; declared: copies"
    assert ("backup", "copied") not in run.coverage
    small = shrink(run, found)
    assert [action.operation for action in small.actions] == ["backup"]


@pytest.mark.requirement("X1", "X3")
def test_a_case_names_whoever_brought_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that another package's operations found may be that package's: its version says which code failed."""
    before = installed_versions()
    install(tmp_path, monkeypatch, "backup_operations:OPERATIONS")
    assert installed_versions() == before | {"kvtide-backup": "0.0"}


@pytest.mark.parametrize(
    ("value", "error", "why"),
    [
        ("backup_operations:TWICE", ValueError, "two operations are called 'backup'"),
        ("backup_operations:NONE", TypeError, "is no operation"),
        ("backup_operations:OLDER", TypeError, "is no operation: it needs name, weight, outcomes"),
        ("backup_operations:SILENT", TypeError, r"outcomes \(a frozenset"),
    ],
)
def test_what_cannot_be_an_operation_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, error: type[Exception], why: str
) -> None:
    """Where it comes from is in the message."""
    install(tmp_path, monkeypatch, value)
    with pytest.raises(error, match=why):
        installed_operations()


def test_without_any_operation_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source tree on the path has no entry points."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    with pytest.raises(ValueError, match="install kvtide-simulation"):
        installed_operations()
