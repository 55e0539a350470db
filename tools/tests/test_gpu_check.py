"""`gpu_check.sh` is run on a GPU seldom: rehearsed on a CPU, it must work up to what only a GPU can show."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gpu_check

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
    rehearsed = ["copy_units", "zero_units", "translate_ids", "write_tokens, gather_tokens, gather_pages"]
    rehearsed += [
        "the device beside NumPy's",
        "pages past 2^34 bytes",
        "storage walk, seed 0",
        "decode as one CUDA graph",
    ]
    assert {verdicts[name] for name in rehearsed} == {"ok"}
    skipped = [
        "memcheck of a small walk",
        "fault noticed: moves wait for no forward",
        "64 MiB in units of 2 KiB",
    ]
    assert {verdicts[name] for name in skipped} == {"skipped"}


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


def test_a_group_that_breaks_is_a_failed_row_beside_those_it_had_got_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's context that is lost takes its process along; a table that ended before it would look green."""
    row = gpu_check.ROW + json.dumps(["first", "ok", "fine", 1.0])
    for program, found in (
        (f"print({row!r}); raise SystemExit(3)", "ended with status 3, after 1 checks"),
        (f"print({row!r}, flush=True); import time; time.sleep(60)", "stopped after 2 s, after 1 checks"),
        ("pass", "ended with status 0, after 0 checks"),
    ):
        command = [sys.executable, "-c", program]
        monkeypatch.setattr(gpu_check, "group_command", lambda name, rehearse, command=command: command)
        rows = gpu_check.group_rows("far", rehearse=True, seconds=2)
        assert (rows[-1].verdict, rows[-1].found) == ("FAILED", found)
        assert [each.name for each in rows[:-1]] == ["first"] * (len(rows) - 1)
    monkeypatch.setattr(gpu_check, "GROUPS", {"far": (lambda rehearse: [], 2)})
    assert gpu_check.run_all(rehearse=True) == 1


def test_a_process_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    """The sanitizer starts a Python of its own, which would go on using the GPU that the next check is timed on."""
    note = tmp_path / "pid"
    program = f"import subprocess; subprocess.run(['bash', '-c', 'echo $$ > {note}; sleep 60'])"
    status, _ = gpu_check.run_process([sys.executable, "-c", program], 2)
    assert status is None
    child = int(note.read_text())
    for _ in range(100):
        # Whoever adopts it may take a moment to see that it is dead.
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child runs on")
