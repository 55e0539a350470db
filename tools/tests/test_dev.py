"""dev.py, run as its users run it, in a small checkout whose interpreter makes fake environments.

Only two things are faked: `python -m venv` makes a folder with one script, and that script plays `pip`, as the file
`pip-plays` in the checkout says. Everything else (processes, signals, locks, exit statuses) is real.
"""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the fake interpreters are POSIX scripts")

DEV = Path(__file__).resolve().parent.parent / "dev.py"

FAKE_PYTHON = f"""#!{sys.executable} -IS
import os, pathlib, shutil, sys, time
root = pathlib.Path({{root!r}})
with open(root / "calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
if sys.argv[1:3] == ["-m", "venv"]:
    folder = pathlib.Path(sys.argv[3]) / "bin"
    folder.mkdir(parents=True)
    shutil.copy(__file__, folder / "python")
    (folder / "kvtide").write_text("#!/bin/sh\\necho kvtide \\"$@\\"\\nexit 7\\n")
    (folder / "kvtide").chmod(0o755)
    sys.exit(0)
plays = (root / "pip-plays").read_text() if (root / "pip-plays").exists() else "success"
if plays == "slow":
    (root / "pip-started").touch()
    time.sleep(60 if not (root / "pip-hurry").exists() else 0.5)
elif plays != "success":
    sys.exit(plays)
"""

DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path({dev!r}).parent))
sys._base_executable = {python!r}
import dev
dev.NEEDED_BYTES = {needed_bytes}
sys.exit(dev.main(sys.argv[1:], dev.Workspace(Path({root!r}))))
"""


class Checkout:
    """A checkout small enough to see through, and ways to run dev.py in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.needed_bytes = 0
        for folder in ("tools", "packages/plan", "integration"):
            (root / folder).mkdir(parents=True)
            (root / folder / "pyproject.toml").write_text("[project]\n")
        (root / "pyproject.toml").write_text(
            '[dependency-groups]\ntest = ["pytest"]\ndev = [{ include-group = "test" }, "nox"]\n'
        )
        (root / "tools" / "constraints.txt").write_text("numpy==2.0\ntorch==2.13.0  # pinned\n")
        (root / "tools" / "constraints-cpu.txt").write_text("triton==3.6.0\n")
        self.python = root / "fake-python"
        self.python.write_text(FAKE_PYTHON.format(root=str(root)))
        self.python.chmod(0o755)

    def pip_plays(self, part: str) -> None:
        (self.root / "pip-plays").write_text(part)

    def calls(self) -> list[str]:
        """The fake interpreter's calls since this was last asked."""
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        script = DRIVER.format(
            dev=str(DEV), python=str(self.python), root=str(self.root), needed_bytes=self.needed_bytes
        )
        return subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def run(self, *arguments: str) -> tuple[int, str, list[str]]:
        """Status, standard output, lines of standard error."""
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=30)
        return process.returncode, output, errors.splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_first_run_installs_torch_by_its_pin_and_then_the_rest(checkout: Checkout) -> None:
    """A range of torch with none present could fetch gigabytes of CUDA; and each pip call costs seconds."""
    status, _, _ = checkout.run("run", "true")
    assert status == 0
    venv, torch, rest = checkout.calls()
    assert venv == f"-m venv {checkout.venv}"
    assert torch.endswith("torch==2.13.0 hatchling")
    assert f"--editable {checkout.root}/packages/plan --editable {checkout.root}/integration[models]" in rest
    assert rest.endswith("pytest nox")
    assert "--no-build-isolation" in rest
    assert all(f"--constraint {checkout.root}/tools/constraints.txt" in call for call in (torch, rest))


def test_triton_is_pinned_unless_torch_brings_its_own(checkout: Checkout) -> None:
    """A CUDA build of torch asks for one exact Triton: a pin beside it could not be installed."""
    pin = f"--constraint {checkout.root}/tools/constraints-cpu.txt"
    checkout.run("run", "true")
    _, torch, rest = checkout.calls()
    assert pin not in torch
    assert pin in rest
    metadata = checkout.venv / "lib" / "python3.12" / "site-packages" / "torch-2.13.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Name: torch\nRequires-Dist: sympy\nRequires-Dist: triton==3.9.0\n")
    (checkout.root / "tools" / "constraints-cpu.txt").write_text("triton==3.6.1\n")
    checkout.run("run", "true")
    assert pin not in " ".join(checkout.calls())


def test_second_run_starts_no_interpreter(checkout: Checkout) -> None:
    """Quick the second time, and no false alarm."""
    checkout.run("run", "true")
    checkout.calls()
    assert checkout.run("run", "true") == (0, "", [])
    assert checkout.calls() == []


def test_torch_index_reaches_pip(checkout: Checkout) -> None:
    """The user's own index settings stay; the further one may hold a CPU build."""
    checkout.run("--torch-index", "https://example.org/cpu", "run", "true")
    assert "--extra-index-url https://example.org/cpu torch==2.13.0" in checkout.calls()[1]


@pytest.mark.parametrize(
    ("changed", "before", "after"),
    [
        ("packages/plan/pyproject.toml", "[project]", "[project]\nname = 'kvtide-plan'"),
        ("tools/constraints.txt", "numpy==2.0", "numpy==2.1"),
        ("pyproject.toml", '"nox"', '"nox", "mypy"'),
    ],
)
def test_changed_declarations_update_in_place(
    checkout: Checkout, changed: str, before: str, after: str
) -> None:
    """Torch is not installed again because a package gained a dependency."""
    checkout.run("run", "true")
    (checkout.venv / "kept").touch()
    checkout.calls()
    path = checkout.root / changed
    path.write_text(path.read_text().replace(before, after))
    assert checkout.run("run", "true")[0] == 0
    assert [call.split()[:3] for call in checkout.calls()] == [["-m", "pip", "install"]] * 2
    assert (checkout.venv / "kept").exists()
    assert checkout.run("run", "true") == (0, "", [])


def test_other_tool_settings_change_nothing(checkout: Checkout) -> None:
    """The root pyproject.toml changes often, and almost never in what is installed."""
    checkout.run("run", "true")
    with (checkout.root / "pyproject.toml").open("a") as settings:
        settings.write("[tool.ruff]\nline-length = 80\n")
    assert checkout.run("run", "true") == (0, "", [])


def damage_stamp(checkout: Checkout) -> None:
    (checkout.venv / "kvtide-dev.json").write_text("{")


def damage_missing_stamp(checkout: Checkout) -> None:
    (checkout.venv / "kvtide-dev.json").unlink()


def damage_python(checkout: Checkout) -> None:
    (checkout.venv / "bin" / "python").unlink()


def damage_dangling_python(checkout: Checkout) -> None:
    damage_python(checkout)
    (checkout.venv / "bin" / "python").symlink_to("/nowhere/python3")


def damage_other_python(checkout: Checkout) -> None:
    stamp = checkout.venv / "kvtide-dev.json"
    keys = json.loads(stamp.read_text())
    stamp.write_text(json.dumps({**keys, "interpreter": "cpython-310 of old"}))


def damage_by_a_file(checkout: Checkout) -> None:
    shutil.rmtree(checkout.venv)
    checkout.venv.write_text("not a folder")


@pytest.mark.parametrize(
    "damage",
    [
        damage_stamp,
        damage_missing_stamp,
        damage_python,
        damage_dangling_python,
        damage_other_python,
        damage_by_a_file,
    ],
)
def test_broken_environment_is_made_again(checkout: Checkout, damage: Callable[[Checkout], None]) -> None:
    """A half-made environment fails in ways that nobody should have to read."""
    checkout.run("run", "true")
    if checkout.venv.is_dir():
        (checkout.venv / "leftover").touch()
    damage(checkout)
    checkout.calls()
    status, _, errors = checkout.run("run", "true")
    assert status == 0
    assert errors[0].startswith("dev.py: removing .venv")
    assert len(checkout.calls()) == 3
    assert not (checkout.venv / "leftover").exists()
    assert checkout.run("run", "true") == (0, "", [])


@pytest.mark.parametrize(
    ("pip_says", "told"),
    [
        ("NewConnectionError: Temporary failure in name resolution", "could not reach its package index"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk became full"),
        ("ERROR: something nobody has seen before", "installing torch 2.13.0 failed with status 1"),
    ],
)
def test_failed_pip_ends_in_one_clear_line_and_the_next_run_recovers(
    checkout: Checkout, pip_says: str, told: str
) -> None:
    """The last line says what to do; pip's own last lines and the path of the rest stand above it."""
    checkout.pip_plays(pip_says)
    status, output, errors = checkout.run("run", "true")
    assert (status, output) == (70, "")
    assert told in errors[-1]
    assert errors[-1].endswith(f"{checkout.venv}/kvtide-dev.log")
    assert errors[-2] == "    " + pip_says
    checkout.pip_plays("success")
    assert checkout.run("run", "true")[0] == 0


def test_failed_update_is_tried_again_in_place(checkout: Checkout) -> None:
    """Losing the network over a changed pyproject.toml costs no new environment."""
    checkout.run("run", "true")
    (checkout.root / "tools" / "constraints.txt").write_text("torch==2.14.0\n")
    checkout.pip_plays("ReadTimeout")
    assert checkout.run("run", "true")[0] == 70
    checkout.pip_plays("success")
    checkout.calls()
    assert checkout.run("run", "true")[0] == 0
    assert len(checkout.calls()) == 2


def test_too_little_space_is_said_before_anything_is_made(checkout: Checkout) -> None:
    """Minutes of download into a full disk help nobody."""
    checkout.needed_bytes = 2**60
    status, _, errors = checkout.run("run", "true")
    assert status == 70
    assert "not enough disk space" in errors[-1]
    assert checkout.calls() == []
    assert not checkout.venv.exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_set_up_leaves_no_pip_and_is_made_again(checkout: Checkout, sent: signal.Signals) -> None:
    """A pip left behind would go on writing into the next run's environment."""
    checkout.pip_plays("slow")
    process = checkout.start("run", "true")
    wait_for(checkout.root / "pip-started")
    process.send_signal(sent)
    # The pipe closes when the last process that holds it ends: the fake pip would hold it for a minute.
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted" in errors.splitlines()[-1]
    checkout.pip_plays("success")
    checkout.calls()
    assert checkout.run("run", "true")[0] == 0
    assert len(checkout.calls()) == 3


def test_two_at_once_make_one_environment(checkout: Checkout) -> None:
    """The second waits, says for whom, and finds the work done."""
    checkout.pip_plays("slow")
    (checkout.root / "pip-hurry").touch()
    first = checkout.start("run", "true")
    wait_for(checkout.root / "pip-started")
    status, _, errors = checkout.run("run", "true")
    first.communicate(timeout=20)
    assert (first.returncode, status) == (0, 0)
    assert errors == [f"dev.py: waiting: process {first.pid} is preparing .venv"]
    assert len(checkout.calls()) == 3


def test_a_killed_holder_leaves_no_lock(checkout: Checkout) -> None:
    """The kernel frees it; a stale lock file would have to be found and removed by hand."""
    checkout.pip_plays("slow")
    process = checkout.start("run", "true")
    wait_for(checkout.root / "pip-started")
    process.kill()
    process.wait()
    checkout.pip_plays("success")
    assert checkout.run("run", "true")[0] == 0


def test_command_runs_inside_and_its_status_is_passed_on(checkout: Checkout) -> None:
    """`run` keeps the caller's folder and adds nothing to what the command prints."""
    shell = 'echo "$VIRTUAL_ENV ${PATH%%:*} $PWD"; exit 5'
    status, output, _ = checkout.run("run", "sh", "-c", shell)
    assert (status, output) == (5, f"{checkout.venv} {checkout.venv}/bin /\n")


def test_demo_is_kvtide_demo_with_every_argument(checkout: Checkout) -> None:
    """Options after the subcommand belong to it, those dev.py knows among them."""
    assert checkout.run("demo", "--torch-index", "-h")[:2] == (7, "kvtide demo --torch-index -h\n")


def test_unknown_command_is_one_line(checkout: Checkout) -> None:
    """As a shell would, 127."""
    status, _, errors = checkout.run("run", "no-such-command")
    assert (status, errors[-1]) == (127, "dev.py: no command 'no-such-command' in .venv or on the PATH")


@pytest.mark.parametrize("minor", range(6, 12))
def test_file_parses_on_old_pythons(minor: int) -> None:
    """An old Python must get as far as saying that it is old."""
    ast.parse(DEV.read_text(encoding="utf-8"), feature_version=(3, minor))


def test_old_python_is_told_so(checkout: Checkout) -> None:
    """The message names what was found and what is needed, and nothing is made."""
    script = DRIVER.format(dev=str(DEV), python=str(checkout.python), root=str(checkout.root), needed_bytes=0)
    script = script.replace("import dev\n", "import dev\ndev.OLDEST_PYTHON = (99, 0)\n")
    ran = subprocess.run([sys.executable, "-c", script, "test"], capture_output=True, text=True, check=False)
    assert ran.returncode == 70
    assert ran.stderr.startswith("dev.py: kvtide needs Python 99.0 or newer, and this is ")
    assert ran.stderr.count("\n") == 1
    assert checkout.calls() == []
