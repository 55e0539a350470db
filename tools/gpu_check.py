"""Every check of kvtide on a GPU, one after another, and a table of what they found; `gpu_check.sh` starts it.

`--rehearse` runs what can run without a GPU, on a CPU, and says so: it shows that this program works, and nothing of a GPU.
"""

import argparse
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
MOVE_GOAL, ZERO_GOAL = 0.85, 0.90
SANITIZER_SECONDS = 150


class Skipped(Exception):  # noqa: N818  # nothing is wrong
    """A check that cannot run here; its text says why."""


@attrs.frozen
class Check:
    """One row of the table."""

    name: str
    run: Callable[[], str]
    """What it found, in words; raises when that is wrong."""

    needs_gpu: bool = True


def kernel_tests() -> str:
    """The package's own tests of every program against the torch reference."""
    for tool in ("pytest", "hypothesis"):
        if importlib.util.find_spec(tool) is None:
            raise Skipped(f"{tool} is not installed")
    tests = [f"packages/arena/tests/{name}" for name in ("test_triton_kernels.py", "test_copy_plan.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        print("\n".join(lines[-60:]))
    assert not done.returncode, lines[-1] if lines else "no output"
    return lines[-1].strip("= ")


def sanitizer() -> str:
    """A short walk under compute-sanitizer's memcheck."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        raise Skipped("compute-sanitizer is not installed")
    command = [
        program,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        sys.executable,
        __file__,
        "--only",
        "small walk",
    ]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SANITIZER_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        raise Skipped(f"not through after {SANITIZER_SECONDS} s") from None
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        raise Skipped("compute-sanitizer does not support this machine's runtime")
    summary = next((line for line in output.splitlines() if "ERROR SUMMARY" in line), output[-200:])
    if done.returncode:
        print(output[-4000:])
    assert done.returncode == 0, summary
    return summary.strip("= ")


def bandwidth(rehearse: bool) -> list[Check]:
    """One check for each size of unit."""
    from gpu_bandwidth import UNIT_BYTES, measure, slowdown  # noqa: PLC0415  # after the choice of interpreter
    from gpu_place import Place  # noqa: PLC0415  # as above

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

    checks = [Check(f"64 MiB in units of {unit >> 10} KiB", partial(check, unit)) for unit in UNIT_BYTES]
    return [*checks, Check("a forward beside moves", partial(slowdown, place))]


def all_checks(rehearse: bool) -> list[Check]:
    """In the order they run."""
    from gpu_place import Place  # noqa: PLC0415  # after the choice of interpreter
    from gpu_walk import decode_under_moves, walk  # noqa: PLC0415  # as above

    place = Place(not rehearse)
    turns = 60 if rehearse else 600
    return [
        Check("programs equal torch", kernel_tests, needs_gpu=False),
        *[
            Check(f"storage walk, seed {seed}", partial(walk, place, turns, seed), needs_gpu=False)
            for seed in range(4)
        ],
        Check("decode as one CUDA graph", partial(decode_under_moves, place, 150, 1), needs_gpu=False),
        Check("memcheck of a small walk", sanitizer),
        *bandwidth(rehearse),
    ]


def run(check: Check, rehearse: bool) -> tuple[str, str, float]:
    """Verdict, what was found, and seconds."""
    begun = time.perf_counter()
    try:
        verdict, found = ("skipped", "needs a GPU") if rehearse and check.needs_gpu else ("ok", check.run())
    except Skipped as reason:
        verdict, found = "skipped", str(reason)
    except Exception as error:  # noqa: BLE001  # one check that fails stops no other
        verdict, found = "FAILED", f"{type(error).__name__}: {error}"
    return verdict, found, time.perf_counter() - begun


def main() -> int:
    """Run them, print the table; 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU what can run there")
    parser.add_argument("--only", metavar="NAME", help="'small walk': what the sanitizer runs")
    parsed = parser.parse_args()
    if parsed.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    import structlog  # noqa: PLC0415  # may come as a wheel
    import torch  # noqa: PLC0415  # after the choice of interpreter

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if not parsed.rehearse and not torch.cuda.is_available():
        print("torch sees no GPU here; --rehearse runs on a CPU what can run there")
        return 2
    if parsed.only:
        from gpu_place import Place  # noqa: PLC0415  # as above
        from gpu_walk import walk  # noqa: PLC0415  # as above

        print(walk(Place(not parsed.rehearse), 30, 5))
        return 0
    where = (
        "rehearsed on a CPU: this says nothing of a GPU" if parsed.rehearse else torch.cuda.get_device_name()
    )
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else "none"
    print(
        f"{where}; torch {torch.__version__}, Triton {triton}, Python {platform.python_version()}\n",
        flush=True,
    )
    rows = []
    for check in all_checks(parsed.rehearse):
        verdict, found, seconds = run(check, parsed.rehearse)
        rows.append((check.name, verdict, found, seconds))
        print(f"{verdict:8}{check.name} ({seconds:.0f} s)", flush=True)
    print("\n| check | verdict | found | s |\n| - | - | - | -: |")
    for name, verdict, found, seconds in rows:
        print(f"| {name} | {verdict} | {' '.join(found.split())} | {seconds:.0f} |")
    return int(any(verdict == "FAILED" for _, verdict, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
