"""What the workspace declares as entry points is what is installed, or nothing that relies on it is green."""

from pathlib import Path

import pytest

import installed

DECLARED = """
[project]
name = "kvtide-declared"
[project.entry-points."kvtide.simulation.operations"]
prefix-tree = "kvtide.declared:OPERATIONS"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "integration").mkdir()
    (tmp_path / "integration" / "pyproject.toml").write_text(DECLARED)
    return tmp_path


def install(folder: Path, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = folder / "kvtide_declared-0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.3\nName: kvtide-declared\nVersion: 0.0\n")
    (metadata / "entry_points.txt").write_text(f"[kvtide.simulation.operations]\nprefix-tree = {value}\n")
    monkeypatch.setattr("sys.path", [str(folder)])


def test_what_is_declared_and_installed_is_no_problem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `tools/dev.py` leaves it."""
    install(root, "kvtide.declared:OPERATIONS", monkeypatch)
    assert installed.main(root) == 0


def test_metadata_from_before_an_entry_point_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The simulation would draw none of its operations, and say that all is well."""
    monkeypatch.setattr("sys.path", [str(root)])
    assert installed.main(root) == 1
    assert "kvtide.declared:OPERATIONS, 'prefix-tree' of group" in capsys.readouterr().out


def test_an_entry_point_that_leads_elsewhere_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was renamed since."""
    install(root, "kvtide.before:OPERATIONS", monkeypatch)
    assert installed.main(root) == 1
    assert "is kvtide.before:OPERATIONS" in capsys.readouterr().out
