"""Operations are found by entry point, also where the package is not installed and its source lies on the path."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.simulation import Operation
from kvtide.simulation.mutations.hunting import own_operations
from kvtide.simulation.mutations.mutation import Patch
from kvtide.simulation.sweep import quiet_logs

from .entry_points import write_entry_points

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


@pytest.fixture(scope="session", autouse=True)
def found_operations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    quiet_logs()
    try:
        importlib.metadata.distribution("kvtide-simulation")
    except importlib.metadata.PackageNotFoundError:
        folder = tmp_path_factory.mktemp("metadata")
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        write_entry_points(folder, project["name"], project["entry-points"])
        sys.path.append(str(folder))
        yield
        sys.path.remove(str(folder))
    else:
        yield


@pytest.fixture(scope="session")
def operations() -> dict[str, Operation]:
    """Those of this package, whatever else is installed: seeds that a test names draw the same everywhere."""
    return dict(own_operations())


@pytest.fixture
def patch() -> Iterator[Patch]:
    """What a mutation is planted with, for one test."""
    patch = Patch()
    yield patch
    patch.undo()
