"""The import contracts of pyproject.toml, each shown a tree that breaks it: a contract that cannot fail holds nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("simulation", "engine", "storage", "chain", "arena", "ledger", "sizing", "plan", "device")

# The tree under test stands in for the installed packages, wherever those come from.
LINT = """
import sys
sys.path = [sys.argv.pop(1), *(entry for entry in sys.path if not entry.endswith("src"))]
from importlinter.cli import lint_imports_command
lint_imports_command()
"""


def broken_contracts(tree: Path) -> set[str]:
    """The names of the contracts that a tree breaks."""
    ran = subprocess.run(
        [sys.executable, "-c", LINT, str(tree), "--no-cache", "--no-logo", str(ROOT / "pyproject.toml")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tree,
    )
    verdicts = re.findall(r"^(.+) (KEPT|BROKEN)(?: \(\d+ ignored imports?\))?$", ran.stdout, re.MULTILINE)
    assert verdicts, ran.stdout + ran.stderr
    broken = {name for name, verdict in verdicts if verdict == "BROKEN"}
    assert (ran.returncode != 0) == bool(broken)
    return broken


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Every package, with a face, one inner module, and the imports that the layers allow; and what one brings to the simulation."""
    for place, name in enumerate(PACKAGES):
        folder = tmp_path / "kvtide" / name
        folder.mkdir(parents=True)
        below = PACKAGES[place + 1 :] if name in {"engine", "storage"} else ()
        (folder / "__init__.py").write_text(f"from kvtide.{name}.inner import fact\n")
        (folder / "inner.py").write_text("".join(f"import kvtide.{each}\n" for each in below) + "fact = 1\n")
    brought = tmp_path / "kvtide" / "storage" / "simulated"
    brought.mkdir()
    for name in ("__init__", "operations"):
        (brought / f"{name}.py").write_text("from kvtide.simulation import fact\n")
    return tmp_path


def test_allowed_imports_break_nothing(tree: Path) -> None:
    """Without this, the cases below could pass by a contract that is always broken."""
    (tree / "kvtide" / "arena" / "inner.py").write_text("import torch\nfrom kvtide.plan import fact\n")
    assert broken_contracts(tree) == set()


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("plan", "chain"),
        ("plan", "device"),
        ("arena", "ledger"),
        ("sizing", "ledger"),
        ("storage", "engine"),
        ("simulation", "engine"),
        ("engine", "simulation"),
    ],
)
def test_imports_point_down_and_never_sideways(tree: Path, importer: str, imported: str) -> None:
    """Each package can be used, tested and read without those above it and beside it."""
    (tree / "kvtide" / importer / "more.py").write_text(f"from kvtide.{imported} import fact\n")
    assert broken_contracts(tree) == {"imports point down, and packages on one line may not see each other"}


@pytest.mark.parametrize("importer", ["storage", "engine"])
def test_nobody_imports_what_is_brought_to_the_simulation(tree: Path, importer: str) -> None:
    """It needs kvtide-simulation, which who serves a model need not have."""
    (tree / "kvtide" / importer / "more.py").write_text("from kvtide.storage.simulated import fact\n")
    assert "what is brought to the simulation is imported by nobody" in broken_contracts(tree)


def test_new_package_must_be_given_a_layer(tree: Path) -> None:
    """A package that no layer names would be held to nothing."""
    (tree / "kvtide" / "extra").mkdir()
    (tree / "kvtide" / "extra" / "__init__.py").touch()
    assert broken_contracts(tree) == {"imports point down, and packages on one line may not see each other"}


@pytest.mark.requirement("P8")
@pytest.mark.parametrize("importer", ["plan", "sizing", "ledger", "device", "chain", "simulation"])
def test_torch_stays_out_of_the_host_side(tree: Path, importer: str) -> None:
    """Decisions run on a machine without torch, and cannot come to depend on a tensor."""
    (tree / "kvtide" / importer / "more.py").write_text("def f():\n    from torch import nn\n    return nn\n")
    assert broken_contracts(tree) == {"plan, device, sizing, ledger, chain and simulation import no torch"}


@pytest.mark.parametrize(
    "package", ["plan", "device", "sizing", "ledger", "arena", "chain", "storage", "simulation"]
)
def test_outsiders_import_the_face(tree: Path, package: str) -> None:
    """What is inside a package may change without asking anybody."""
    (tree / "kvtide" / "engine" / "more.py").write_text(f"from kvtide.{package}.inner import fact\n")
    face = f"outsiders import kvtide.{package}, never a module inside it"
    beside = {"imports point down, and packages on one line may not see each other"}
    assert broken_contracts(tree) == {face} | (beside if package == "simulation" else set())
