"""`gpu_check.sh` is run on a GPU seldom: rehearsed on a CPU, it must work up to what only a GPU can show."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_gpu_check_can_be_rehearsed_without_an_environment_or_a_gpu() -> None:
    """It finds the packages by itself, and says that a rehearsal proves nothing of a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh"), "--rehearse"],
        cwd="/",
        env={**environment, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this says nothing of a GPU" in done.stdout
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    verdicts = {row[0].removeprefix("| "): row[1] for row in rows}
    assert verdicts["storage walk, seed 0"] == verdicts["decode as one CUDA graph"] == "ok"
    assert verdicts["memcheck of a small walk"] == verdicts["a forward beside moves"] == "skipped"


def test_without_a_gpu_the_check_does_not_pass() -> None:
    """A green check that saw no GPU would be believed."""
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh")],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "torch sees no GPU here" in done.stdout
