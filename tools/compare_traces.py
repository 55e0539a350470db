"""Where two lives of an allocator first differ: `python tools/compare_traces.py ONE.jsonl TWO.jsonl`.

    compare_traces.py ONE TWO                         two traces
    compare_traces.py ONE                             a trace and what this checkout does with it
    compare_traces.py ONE --checkout A --checkout B   what two checkouts do with a trace; one: against what was recorded
    compare_traces.py ONE --adapter M:F --adapter N:G what two implementations do with it; one: against what was recorded

A checkout is a folder with `packages/`; each replays in a process of its own, with its own sources. Prints the first divergence with
the calls and the state around it; one that raises differs there from one that does not. Exit status: 0 the same, 1 they differ,
2 something cannot be read or run, 3 a file is no trace.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAIN_ADAPTER = "kvtide.simulation:ChainAdapter"
NO_TRACE = 3
"""Exit status, also of `kvtide replay`."""


class NoTraceError(ValueError):
    """A file is no trace."""


def sources_of(checkout: Path) -> list[str]:
    """Folders of a checkout that Python finds its packages in; raises `ValueError` for a folder that is none."""
    found = sorted(
        str(path) for path in [*checkout.glob("packages/*/src"), *checkout.glob("integration/src")]
    )
    if not found:
        raise ValueError(f"{checkout} is no checkout: it has no packages/*/src")
    return found


def replay_in(checkout: Path, trace: Path, written: Path, adapter: str = CHAIN_ADAPTER) -> None:
    """Replay with a checkout's sources, and write what it answers; raises `ValueError` with what it said if it could not.

    `NoTraceError` if the file is none.
    """
    beside = os.environ.get("PYTHONPATH", "").split(os.pathsep) if checkout == ROOT else []
    path = os.pathsep.join([*sources_of(checkout), *filter(None, beside)])
    program = "from kvtide.simulation.traces.command import command; command()"
    arguments = [str(trace), "--adapter", adapter, "--write", str(written), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == NO_TRACE:
        raise NoTraceError(done.stderr.strip())
    # 1 says that it differs from the recording, which is what is compared below.
    if done.returncode not in (0, 1) or not written.exists():
        # Above the last line stands how the command is called, or where it was when it raised.
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise ValueError(f"{checkout} could not replay {trace}: {''.join(said).removeprefix('Error: ')}")


def _count(text: str) -> int:
    """A number of calls."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, found {text!r}")
    return int(text)


def compared(names: tuple[str, str], paths: tuple[Path, Path], around: int) -> int:
    """Print where two traces first differ; the exit status."""
    # This checkout's own sources come first, whatever is installed.
    sys.path[:0] = sources_of(ROOT)
    from kvtide.simulation import TraceError, first_divergence, read_trace, told  # noqa: PLC0415  (the path is set here)

    try:
        (first_header, first), (second_header, second) = (read_trace(path) for path in paths)
    except TraceError as error:
        raise NoTraceError(str(error)) from error
    if first_header.layout != second_header.layout:
        print(f"the arenas differ: {first_header.layout}\n{second_header.layout}")
        return 1
    divergence = first_divergence(first, second)
    if divergence is None:
        raised = first[-1].answer if first and "raised" in first[-1].answer else None
        end = f"; there both raise {raised['raised']}: {raised['message']}" if raised else ""
        print(f"{len(first)} calls, every answer and state the same{end}: {names[0]}, {names[1]}")
        return 0
    print("\n".join(told(divergence, first, around=around, first=names[0], second=names[1])))
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--checkout", action="append", default=[], type=Path, metavar="FOLDER")
    parser.add_argument("--adapter", action="append", default=[], metavar="MODULE:FACTORY")
    parser.add_argument("--around", type=_count, default=5, metavar="CALLS", help="shown around a divergence")
    given = parser.parse_args(arguments)
    checkouts = [checkout.resolve() for checkout in given.checkout]
    sides = [(str(each), each, CHAIN_ADAPTER) for each in checkouts]
    sides += [(each, ROOT, each) for each in given.adapter]
    if len(given.traces) == 1 and not sides:
        sides = [("this checkout", ROOT, CHAIN_ADAPTER)]
    if len(given.traces) > 2 or len(sides) > 2 or (len(given.traces) == 2 and sides):
        parser.error("two lives are compared: two traces, or one trace and at most two checkouts or adapters")
    try:
        for trace in given.traces:
            trace.open("rb").close()
        with tempfile.TemporaryDirectory() as folder:
            names, paths = [str(trace) for trace in given.traces], list(given.traces)
            for number, (name, checkout, adapter) in enumerate(sides):
                written = Path(folder) / f"{number}.jsonl"
                replay_in(checkout, given.traces[0].resolve(), written, adapter)
                names.append(name)
                paths.append(written)
            return compared((names[-2], names[-1]), (paths[-2], paths[-1]), given.around)
    except OSError as error:
        # A full disk's error may name no file.
        reason = error.strerror or str(error)
        print(f"{error.filename}: {reason}" if error.filename else reason, file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return NO_TRACE if isinstance(error, NoTraceError) else 2


if __name__ == "__main__":
    sys.exit(main())
