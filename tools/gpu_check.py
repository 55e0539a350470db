"""Every check of kvtide on a GPU, one after another, and a table of what they found; `gpu_check.sh` starts it.

Checks run in groups, each in a process of its own with a limit: what one breaks, a GPU's context among it, no other meets. All
together take under ten minutes, or are stopped and fail.

`--rehearse` runs what can run without a GPU, on a CPU, and says so: it shows that this program works, and nothing of a GPU.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs

MOVE_GOAL, ZERO_GOAL = 0.85, 0.90
ALL_SECONDS = 570
KILLED_SECONDS = 5
"""For a process that was killed to be gone."""

UNWANTED = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")
"""Of the caller's environment: with them streams would not overlap."""

ROW = "row of the table: "
"""What a line of a group's output begins with that is one."""


@attrs.frozen
class Check:
    """One row of the table."""

    name: str
    run: Callable[[], str]
    """What it found, in words; raises when that is wrong."""

    needs_gpu: bool = False


@attrs.frozen
class Row:
    """What became of a check."""

    name: str
    verdict: str
    found: str
    seconds: float


# --- what is checked --------------------------------------------------------------------------------------------------
# A group imports what it needs after the choice between Triton's compiler and its interpreter.


def programs(rehearse: bool) -> list[Check]:
    """Triton's programs, and the device over them, beside their references."""
    from gpu_place import Place  # noqa: PLC0415
    from gpu_programs import CASES, compare  # noqa: PLC0415

    return [Check(what, partial(compare, Place(not rehearse), what)) for what in CASES]


def far(rehearse: bool) -> list[Check]:
    """Addresses that 32 bits cannot hold."""
    from gpu_far import far_pages  # noqa: PLC0415
    from gpu_place import Place  # noqa: PLC0415

    return [Check("pages past 2^34 bytes", partial(far_pages, Place(not rehearse)))]


def host(rehearse: bool) -> list[Check]:
    """What the host does beside the device."""
    from gpu_host import (  # noqa: PLC0415
        faults_are_counted,
        host_does_not_wait,
        pages_on_the_host,
        row_to_the_host_and_back,
    )
    from gpu_place import Place  # noqa: PLC0415

    place = Place(not rehearse)
    return [
        Check("the host never waits", partial(host_does_not_wait, place), needs_gpu=True),
        Check("ids outside their tables are counted", partial(faults_are_counted, place)),
        Check("pages of the host", partial(pages_on_the_host, place)),
        Check("a row to the host and back", partial(row_to_the_host_and_back, place)),
    ]


def walks(rehearse: bool) -> list[Check]:
    """A storage whose forwards overlap, and the same with waits left out."""
    from gpu_late import Fault  # noqa: PLC0415
    from gpu_place import Place  # noqa: PLC0415
    from gpu_walk import walk, walk_with_fault  # noqa: PLC0415

    place, turns = Place(not rehearse), 60 if rehearse else 150
    faults = [fault for fault in Fault if fault is not Fault.NONE]
    return [
        *[Check(f"storage walk, seed {seed}", partial(walk, place, turns, seed)) for seed in range(3)],
        Check(
            "storage walk on a given stream", partial(walk, attrs.evolve(place, gives_stream=True), turns, 3)
        ),
        *[
            Check(
                f"fault noticed: {fault.value}", partial(walk_with_fault, place, 100, fault), needs_gpu=True
            )
            for fault in faults
        ],
    ]


def simulation(rehearse: bool) -> list[Check]:
    """The simulation's operations on real streams, and without what orders them."""
    from gpu_place import Place  # noqa: PLC0415
    from gpu_simulation import simulate, simulate_without_waits  # noqa: PLC0415

    place = Place(not rehearse)
    return [
        *[Check(f"simulation, seed {seed}", partial(simulate, place, seed)) for seed in (1, 4, 7)],
        Check("fault noticed: no stream waits", partial(simulate_without_waits, place), needs_gpu=True),
    ]


def graph(rehearse: bool) -> list[Check]:
    """A decode step, captured and replayed."""
    from gpu_graph import decode_under_moves  # noqa: PLC0415
    from gpu_place import Place  # noqa: PLC0415

    return [Check("decode as one CUDA graph", partial(decode_under_moves, Place(not rehearse), 100, 1))]


def attention(rehearse: bool) -> list[Check]:
    """Attention over pages beside its torch reference, and how fast it reads."""
    from gpu_attention import CASES, compare, rates  # noqa: PLC0415
    from gpu_place import Place  # noqa: PLC0415

    place = Place(not rehearse)
    return [
        *[Check(f"attention over pages: {name}", partial(compare, place, name)) for name in CASES],
        Check("attention over pages: rates", partial(rates, place), needs_gpu=True),
    ]


def small_walk(rehearse: bool) -> list[Check]:
    """What the sanitizer watches: a dozen forwards, and moves, without delays."""
    from gpu_place import Place  # noqa: PLC0415
    from gpu_walk import walk  # noqa: PLC0415

    return [Check("small walk", partial(walk, Place(not rehearse, has_delays=False), 12, 2))]


def bandwidth(rehearse: bool) -> list[Check]:
    """How fast pages move, and what that costs a forward."""
    from gpu_bandwidth import FORWARDS, UNIT_BYTES, measure, slowdown  # noqa: PLC0415
    from gpu_place import Place  # noqa: PLC0415

    place = Place(not rehearse)

    def check(unit_bytes: int) -> str:
        rates = measure(place, unit_bytes)
        move, zero = rates.move / rates.copy, rates.zero / rates.copy
        text = (
            f"move {rates.move:.0f} GB/s = {move:.0%} of a copy, over itself {rates.overlapping / rates.copy:.0%}; "
            f"zero {rates.zero:.0f} GB/s = {zero:.0%} of a copy, {rates.zero / rates.fill:.0%} of a fill; "
            f"host {rates.host_us:.0f} µs a move of {(64 << 20) // unit_bytes} units"
        )
        assert move >= MOVE_GOAL, f"below {MOVE_GOAL:.0%}: {text}"
        assert zero >= ZERO_GOAL, f"below {ZERO_GOAL:.0%}: {text}"
        return text

    return [
        *[Check(f"64 MiB in units of {unit >> 10} KiB", partial(check, unit), True) for unit in UNIT_BYTES],
        *[Check(f"beside moves: {what}", partial(slowdown, place, what), True) for what in FORWARDS],
    ]


GROUPS = {
    "programs": (programs, 200),
    "far": (far, 60),
    "host": (host, 40),
    "walks": (walks, 150),
    "simulation": (simulation, 90),
    "graph": (graph, 60),
    "bandwidth": (bandwidth, 120),
    "attention": (attention, 90),
    "small walk": (small_walk, 120),
}
"""By name: the checks, and the seconds that they may take, together with a process's start.

More than there are in all, since none should need its own; if all do, the last, the sanitizer's, is the one that gets less.
"""

TRY_SANITIZER = "import torch; torch.zeros(1, device='cuda').item()"
TRY_SECONDS = 45
"""What a sanitizer that works is through with, long before; what comes after is the checks' own."""

# --- one group, in a process of its own -------------------------------------------------------------------------------


def run(check: Check, rehearse: bool) -> Row:
    """Run a check to its very end: what it left on the GPU must not come out in the next."""
    if rehearse and check.needs_gpu:
        return Row(check.name, "skipped", "needs a GPU", 0)
    begun = time.perf_counter()
    try:
        try:
            found = check.run()
        finally:
            if not rehearse:
                import torch  # noqa: PLC0415  # after the choice of interpreter

                torch.cuda.synchronize()
        verdict = "ok"
    except Exception as error:  # noqa: BLE001  # one check that fails stops no other
        verdict, found = "FAILED", f"{type(error).__name__}: {error}"
    return Row(check.name, verdict, " ".join(found.split()), time.perf_counter() - begun)


def run_group(name: str, rehearse: bool) -> int:
    """Run the checks of one group and print a row for each; 0 if none failed."""
    import structlog  # noqa: PLC0415  # may be a stand-in

    if hasattr(structlog, "make_filtering_bound_logger"):
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    failed = False
    for check in GROUPS[name][0](rehearse):
        row = run(check, rehearse)
        failed |= row.verdict == "FAILED"
        # A line of its own, whatever a library has written before.
        print(f"\n{ROW}{json.dumps(attrs.astuple(row))}", flush=True)
    return int(failed)


# --- all groups -------------------------------------------------------------------------------------------------------


def run_process(command: list[str], seconds: float, **environment: str) -> tuple[int | None, str]:
    """Exit status, `None` if it was stopped at its limit, and everything it printed.

    Whatever ends this, nothing that was started goes on.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        try:
            return None, process.communicate(timeout=KILLED_SECONDS)[0]
        except subprocess.TimeoutExpired as stuck:
            # In the GPU's driver, which heeds no signal.
            return None, (stuck.output or b"").decode(errors="replace")
    finally:
        _kill(process)
    return process.returncode, output


def _kill(process: subprocess.Popen[str]) -> None:
    """And all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_with_what_was_started(number: int, _: object) -> None:
    """Handle a signal: leave by way of what stops the processes."""
    raise SystemExit(128 + number)


def group_command(name: str, rehearse: bool) -> list[str]:
    """Of the process that runs one."""
    return [sys.executable, __file__, "--group", name, *(["--rehearse"] if rehearse else [])]


def group_rows(name: str, rehearse: bool, seconds: float) -> list[Row]:
    """The rows of one group, and one more if its process did not end as it should."""
    begun = time.perf_counter()
    status, output = run_process(group_command(name, rehearse), seconds)
    lines = output.splitlines()
    rows = [Row(*json.loads(line.removeprefix(ROW))) for line in lines if line.startswith(ROW)]
    failed = any(row.verdict == "FAILED" for row in rows)
    if status is None or not rows or status != int(failed):
        what = f"stopped after {seconds:.0f} s" if status is None else f"ended with status {status}"
        rows.append(
            Row(
                f"{name}: the rest",
                "FAILED",
                f"{what}, after {len(rows)} checks",
                time.perf_counter() - begun,
            )
        )
        failed = True
    if failed:
        print("\n".join([line for line in lines if not line.startswith(ROW)][-40:]))
    return rows


def sanitized_rows(rehearse: bool, seconds: float) -> list[Row]:
    """A small walk under compute-sanitizer's memcheck; skipped where that cannot watch even one tensor being made."""
    name = "memcheck of a small walk"
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if rehearse or not Path(program).exists():
        return [
            Row(name, "skipped", "needs a GPU" if rehearse else "compute-sanitizer is not installed here", 0)
        ]
    begun = time.perf_counter()
    # Torch and Triton probe the driver with calls that may fail; a call that must not raises in torch.
    memcheck = [program, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]

    def sanitized(command: list[str], limit: float) -> tuple[bool, str, str]:
        status, output = run_process([*memcheck, *command], limit, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        lines = [line.strip("= ") for line in output.splitlines()]
        summary = next((line for line in lines if "ERROR SUMMARY" in line), " ".join(lines[-3:]))
        ended = f"not through after {limit:.0f} s" if status is None else f"status {status}"
        return status == 0, summary if status == 0 else f"{ended}; {summary}", output

    works, found, _ = sanitized([sys.executable, "-c", TRY_SANITIZER], min(TRY_SECONDS, seconds))
    if not works:
        verdict, found = "skipped", f"compute-sanitizer does not work here: {found}"
    else:
        left = max(1.0, seconds - (time.perf_counter() - begun))
        passed, found, output = sanitized(group_command("small walk", rehearse), left)
        verdict = "ok" if passed else "FAILED"
        if not passed:
            print(output[-4000:])
    return [Row(name, verdict, " ".join(found.split()), time.perf_counter() - begun)]


def run_all(rehearse: bool) -> int:
    """Run every group, print the table; 0 if nothing failed."""
    begun = time.perf_counter()
    rows: list[Row] = []
    for name, (_, limit) in GROUPS.items():
        seconds = min(limit, ALL_SECONDS - (time.perf_counter() - begun))
        if seconds <= 0:
            new = [Row(name, "FAILED", f"not begun: {ALL_SECONDS} s are over", 0)]
        elif name == "small walk":
            new = sanitized_rows(rehearse, seconds)
        else:
            new = group_rows(name, rehearse, seconds)
        for row in new:
            print(f"{row.verdict:8}{row.name} ({row.seconds:.0f} s): {row.found}", flush=True)
        rows += new
    print("\n| check | verdict | found | s |\n| - | - | - | -: |")
    for row in rows:
        print(f"| {row.name} | {row.verdict} | {row.found.replace('|', '/')} | {row.seconds:.0f} |")
    failed = sum(row.verdict == "FAILED" for row in rows)
    print(f"\n{failed} of {len(rows)} checks failed, in {time.perf_counter() - begun:.0f} s")
    return int(failed > 0)


def settle_environment(*, rehearse: bool, is_group: bool) -> None:
    """Let nothing of the caller's decide what is checked; a group has its environment from whoever started it."""
    os.environ.pop("TRITON_INTERPRET", None)
    if rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    for name in () if is_group else UNWANTED:
        os.environ.pop(name, None)


def main() -> int:
    """Run one group, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU what can run there")
    parser.add_argument("--group", choices=GROUPS, help="run one group, in this process")
    parsed = parser.parse_args()
    settle_environment(rehearse=parsed.rehearse, is_group=parsed.group is not None)
    if parsed.group:
        return run_group(parsed.group, parsed.rehearse)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_with_what_was_started)
    import torch  # noqa: PLC0415  # after the choice of interpreter

    if not parsed.rehearse and not torch.cuda.is_available():
        print(
            f"torch sees no GPU here ({sys.executable}, torch {torch.__version__}): PYTHON names another interpreter, --rehearse "
            "runs on a CPU what can run there"
        )
        return 2
    where = (
        "rehearsed on a CPU: this says nothing of a GPU" if parsed.rehearse else torch.cuda.get_device_name()
    )
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else "none"
    print(
        f"{where}; torch {torch.__version__}, Triton {triton}, Python {platform.python_version()}\n",
        flush=True,
    )
    return run_all(parsed.rehearse)


if __name__ == "__main__":
    sys.exit(main())
