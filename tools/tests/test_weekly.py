"""The weekly workflow and its sessions: other seeds every week, and what was found is kept."""

from __future__ import annotations

import importlib.util
import re
from datetime import date, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nox", reason="the development environment has it")

ROOT = Path(__file__).resolve().parent.parent.parent
WORKFLOW = (ROOT / ".github" / "workflows" / "weekly.yml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands_of(noxfile: ModuleType, name: str) -> tuple[list[list[str]], list[str]]:
    """What a session would run, and what it says."""
    ran: list[list[str]] = []
    said: list[str] = []
    session: Any = SimpleNamespace(
        posargs=["--more"], log=said.append, run=lambda *command, **_: ran.append([*command]), name=name
    )
    session_of = getattr(noxfile, name)
    getattr(session_of, "func", session_of)(session)
    return ran, said


def seeds(noxfile: ModuleType, day: date) -> range:
    first, end = map(int, noxfile.seeds_of_week(day).split(":"))
    return range(first, end)


@pytest.mark.requirement("X1")
def test_each_week_has_seeds_of_its_own(noxfile: ModuleType) -> None:
    """On unchanged code the same seeds find nothing new; a day of the same week finds the same again."""
    monday = date(2026, 11, 30)
    days = [seeds(noxfile, monday + timedelta(days=day)) for day in range(7)]
    assert set(days) == {days[0]}
    assert len(days[0]) == 4000
    for weeks in (1, 2, 52):
        later = seeds(noxfile, monday + timedelta(weeks=weeks))
        assert later.start == days[0].start + 4000 * weeks
    # Those of CI's slice and of the page of mutations are others.
    assert seeds(noxfile, date(2024, 1, 1)).start >= 1000


@pytest.mark.requirement("X1")
def test_the_sweep_says_which_seeds_it_runs(noxfile: ModuleType) -> None:
    """Whoever reads the log a month later runs them again."""
    (*_, command), (said,) = commands_of(noxfile, "nightly_simulate")
    assert command[command.index("--seeds") + 1] == said.removeprefix("this week's seeds: ")
    assert command[-1] == "--more"


@pytest.mark.requirement("X1", "X2", "X4")
def test_what_is_found_is_kept(noxfile: ModuleType) -> None:
    """Failing cases, bad sequences, the table: the workflow uploads each folder that a session writes to."""
    matrix = re.search(r"session: \[(.*)\]", WORKFLOW)
    assert matrix is not None
    assert {"nightly_simulate", "nightly_mutations", "nightly_exhaustive"} <= set(matrix[1].split(", "))
    for name in ("nightly_simulate", "nightly_mutations", "nightly_exhaustive"):
        (*_, command), _ = commands_of(noxfile, name)
        out = Path(command[command.index("--out") + 1])
        folder = out.parent if out.suffix else out
        assert f"            {folder.relative_to(ROOT)}\n" in WORKFLOW, name
    assert "if: always()\n        uses: actions/upload-artifact" in WORKFLOW
