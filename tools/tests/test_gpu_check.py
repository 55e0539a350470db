"""`gpu_check.sh` is run on a GPU seldom: rehearsed on a CPU, it must work up to what only a GPU can show."""

import json
import os
import re
import signal
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
        "ids outside their tables are counted",
        "pages of the host",
        "storage walk on a given stream",
        "storage walk, seed 0",
        "simulation, seed 1",
        "decode as one CUDA graph",
        "attention over pages: window with sinks",
    ]
    assert {verdicts[name] for name in rehearsed} == {"ok"}
    skipped = [
        "memcheck of a small walk",
        "fault noticed: moves wait for no forward",
        "fault noticed: no stream waits",
        "64 MiB in units of 2 KiB",
    ]
    assert {verdicts[name] for name in skipped} == {"skipped"}


def test_without_a_gpu_the_check_does_not_pass() -> None:
    """A green check that saw no GPU would be believed. The interpreter may be named from where the caller stands."""
    interpreter = Path(sys.executable)
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh")],
        cwd=interpreter.parent.parent,
        env={
            **os.environ,
            "PYTHON": f"{interpreter.parent.name}/{interpreter.name}",
            "CUDA_VISIBLE_DEVICES": "",
        },
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


def test_text_without_an_end_hides_no_row(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A library's warning before a row would make the row part of its line, and a failure with it."""

    def wrong() -> str:
        print("a warning", end="")
        raise AssertionError("wrong")

    checks = [gpu_check.Check("first", wrong), gpu_check.Check("second", lambda: "fine")]
    monkeypatch.setattr(gpu_check, "GROUPS", {"far": (lambda rehearse: checks, 2)})
    assert gpu_check.run_group("far", rehearse=True) == 1
    printed = capfd.readouterr().out
    monkeypatch.setattr(gpu_check, "run_process", lambda command, seconds: (1, printed))
    rows = gpu_check.group_rows("far", rehearse=True, seconds=2)
    assert [(row.name, row.verdict) for row in rows] == [("first", "FAILED"), ("second", "ok")]


SANITIZER = """#!/bin/bash
# What is known of compute-sanitizer: it counts calls of the driver that fail, unless told not to.
echo "$@" >>{folder}/asked
case "$*" in
*--group*) {walk} ;;
*) {attempt} ;;
esac
case "$*" in
*"--report-api-errors no"*) echo "========= ERROR SUMMARY: 0 errors" ;;
*) echo "========= ERROR SUMMARY: 34 errors"; exit 9 ;;
esac
"""


@pytest.mark.parametrize(
    ("programs", "verdict", "found"),
    [
        (("true", "true"), "ok", "ERROR SUMMARY: 0 errors"),
        (
            ("true", "echo '===== ERROR SUMMARY: 2 errors'; exit 9"),
            "FAILED",
            "status 9; ERROR SUMMARY: 2 errors",
        ),
        (("true", "echo half; sleep 60"), "FAILED", "not through after . s; half"),
        (
            ("echo Device not supported; exit 1", "true"),
            "skipped",
            "does not work here: status 1; Device not supported",
        ),
        (("echo slow; sleep 60", "true"), "skipped", "does not work here: not through after . s; slow"),
    ],
)
def test_the_sanitizer_fails_a_walk_only_where_it_works_and_only_for_the_walks_own_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: tuple[str, str], verdict: str, found: str
) -> None:
    """Torch's probes of a driver are no errors of ours, and a walk that hangs under it is not one that was never watched."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        SANITIZER.format(folder=tmp_path, attempt=programs[0], walk=programs[1]), encoding="utf-8"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (row,) = gpu_check.sanitized_rows(rehearse=False, seconds=3)
    assert row.verdict == verdict
    assert re.search(found, row.found)
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert [line.endswith("--group small walk") for line in asked] == [False, True][
        : 1 + (verdict != "skipped")
    ]


def test_what_the_sanitizer_watches_moves_pages() -> None:
    """It takes a second a forward under it, so they are few."""
    (check,) = gpu_check.small_walk(rehearse=True)
    found = check.run()
    assert found.startswith("12 forwards of")
    assert "units moved" in found


def test_an_environment_that_would_change_what_is_checked_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter's variable, left in a shell, would have it checked in place of the GPU; launches that block never overlap."""
    names = ("TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")
    for rehearse, is_group, expected in (
        (False, False, [None, None, None]),
        # The sanitizer's group is told the last.
        (False, True, [None, "1", "1"]),
        (True, False, ["1", None, None]),
        (True, True, ["1", "1", "1"]),
    ):
        for name in names:
            monkeypatch.setenv(name, "1")
        gpu_check.settle_environment(rehearse=rehearse, is_group=is_group)
        assert [os.environ.get(name) for name in names] == expected


def test_what_was_started_ends_with_the_check(tmp_path: Path) -> None:
    """A check that is stopped from outside must not leave a walk on the GPU."""
    note = tmp_path / "pid"
    inner = f"echo $$ >{note}.new; mv {note}.new {note}; sleep 60"
    program = (
        "import gpu_check, signal; "
        "signal.signal(signal.SIGTERM, gpu_check.end_with_what_was_started); "
        f"gpu_check.run_process(['bash', '-c', {inner!r}], 60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT / "tools")
    while not note.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert_gone(int(note.read_text()))


def assert_gone(child: int) -> None:
    """Whoever adopts it may take a moment to see that it is dead."""
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    pytest.fail("the child runs on")


def test_a_process_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    """The sanitizer starts a Python of its own, which would go on using the GPU that the next check is timed on."""
    note = tmp_path / "pid"
    program = f"import subprocess; subprocess.run(['bash', '-c', 'echo $$ > {note}; sleep 60'])"
    status, _ = gpu_check.run_process([sys.executable, "-c", program], 2)
    assert status is None
    assert_gone(int(note.read_text()))
