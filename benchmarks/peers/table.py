"""One run of ours, a floor, SGLang's unified and static pools and vLLM over the same work; prints markdown tables.

    python benchmarks/peers/table.py --environment FOLDER [--rounds 3] [--only speed|capacity]

Programs run one after another, on one core, and the round is repeated, so that a busy moment falls on all of them; a cell is the
median over rounds. Peers run in an environment of their own (`environment.py`); where it cannot be made, the reason is printed, and the
rest is measured.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from environment import WHEELS, Environment, peers_environment

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path.append(str(BENCHMARKS))

from models import BUDGET_BYTES, MODELS, Model, ideal_count, mixed_lengths  # noqa: E402 – found by the line above

Key: TypeAlias = tuple[str, int]
"""Operation and tokens a page."""

Programs: TypeAlias = Mapping[str, Sequence[tuple[str, ...]]]
"""Programs of each column; a peer's name among the arguments stands for the folder of its wheel."""

SPEED: Programs = {
    "floor": [("chain.py", "--json", "floor"), ("chain_moves.py", "--json", "floor")],
    "ours": [("chain.py", "--json", "ours"), ("chain_moves.py", "--json", "ours")],
    "SGLang unified": [("peers/sglang_books.py", "sglang", "unified")],
    "SGLang static": [("peers/sglang_books.py", "sglang", "static")],
    "vLLM": [("peers/vllm_books.py", "vllm")],
}
CAPACITY: Programs = {
    "ours": [("capacity.py", "--json")],
    "SGLang unified": [("peers/sglang_capacity.py", "sglang", "unified")],
    "SGLang static": [("peers/sglang_capacity.py", "sglang", "static")],
    "vLLM": [("peers/vllm_capacity.py", "vllm")],
}


def figures(environment: Environment, program: tuple[str, ...]) -> Iterator[tuple[Key, float]]:
    """What a program prints; nothing where its peer is missing."""
    path, *arguments = program
    peer = arguments[0] if path.startswith("peers/") else None
    if peer is not None and peer not in environment.wheels:
        return
    python = sys.executable
    variables = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if peer is not None:
        python, arguments = str(environment.python), [str(environment.wheels[peer]), *arguments[1:]]
        variables["PYTHONPATH"] = str(BENCHMARKS)
    command = [python, str(BENCHMARKS / path), *arguments]
    run = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith('["')]
    if run.returncode:
        last = (run.stderr.splitlines() or ["it said nothing"])[-1]
        print(
            f"{path} {' '.join(arguments[1:])} ended early, after {len(lines)} figures: {last}\n", flush=True
        )
    for line in lines:
        operation, page_tokens, value = json.loads(line)
        yield (operation, page_tokens), value


def columns(environment: Environment, programs: Programs, rounds: int) -> dict[str, dict[Key, float]]:
    """Medians over rounds, by column and row."""
    samples: dict[str, dict[Key, list[float]]] = {name: {} for name in programs}
    for _ in range(rounds):
        for name, column in programs.items():
            for program in column:
                for key, value in figures(environment, program):
                    samples[name].setdefault(key, []).append(value)
    return {
        name: {key: statistics.median(found) for key, found in column.items()}
        for name, column in samples.items()
    }


def print_speed(found: Mapping[str, Mapping[Key, float]]) -> None:
    """Rows are operations, columns systems; then what ours takes of each peer's time."""
    peers = ["SGLang unified", "SGLang static", "vLLM"]
    names = ["floor", "ours", *peers]
    print(f"| | page | {' | '.join(names)} | {' | '.join(f'ours / {name}' for name in ['floor', *peers])} |")
    print("| - | -: |" + " -: |" * (len(names) + 4))
    for operation, page_tokens in sorted(found["ours"], key=_order(found["ours"])):
        row = [found[name].get((operation, page_tokens)) for name in names]
        is_time = not operation.endswith(("bytes", "moves"))
        ratios = [_ratio(row[1], other) if is_time else "–" for other in (row[0], *row[2:])]
        print(f"| {operation} | {page_tokens} | {' | '.join([*map(_number, row), *ratios])} |")


def print_capacity(found: Mapping[str, Mapping[Key, float]]) -> None:
    """Requests held, and what they need at the least of all bytes."""
    print(
        "| | tokens | ideal | ours, page 1 / 64 / suggested | SGLang unified, 1 / 64 | SGLang static, 1 / 64 | vLLM, 16 / 64 |"
    )
    print("| - | -: | -: | -: | -: | -: | -: |")
    for model in MODELS:
        for case in ("1024", "8192", "65536", "mix"):
            lengths = mixed_lengths() if case == "mix" else [int(case)] * 4000
            row = f"{model.name}, {case}"
            cells = [
                _held(model, lengths, found[name], row, sizes)
                for name, sizes in (
                    ("ours", (1, 64, 0)), ("SGLang unified", (1, 64)), ("SGLang static", (1, 64)), ("vLLM", (16, 64)),
                )
            ]  # fmt: skip
            ideal = ideal_count(model, lengths)
            print(
                f"| {model.name} | {case} | {ideal} ({_useful(model, lengths, ideal)}) | {' | '.join(cells)} |"
            )


def _order(ours: Mapping[Key, float]) -> Callable[[Key], tuple[int, int]]:
    """Operations as they were measured, each with its page sizes together."""
    places = {operation: place for place, operation in enumerate(dict.fromkeys(key[0] for key in ours))}
    return lambda key: (places[key[0]], key[1])


def _held(
    model: Model, lengths: Sequence[int], column: Mapping[Key, float], row: str, sizes: Sequence[int]
) -> str:
    counts = [int(column[row, size]) for size in sizes if (row, size) in column]
    if len(counts) < len(sizes):
        return "–"
    shares = dict.fromkeys(_useful(model, lengths, count) for count in counts)
    return f"{' / '.join(map(str, counts))} ({' / '.join(shares)})"


def _useful(model: Model, lengths: Sequence[int], count: int) -> str:
    return f"{sum(map(model.needed_bytes, lengths[:count])) / BUDGET_BYTES:.1%}"


def _ratio(ours: float | None, other: float | None) -> str:
    return f"{ours / other:.2f}" if ours and other else "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--environment", type=Path, required=True, help="folder of the peers' environment")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    parser.add_argument("--only", choices=("speed", "capacity"), help="one of the two tables")
    arguments = parser.parse_args()
    environment = peers_environment(arguments.environment.resolve())
    for reason in environment.missing:
        print(f"not measured: {reason}\n")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    versions = ", ".join(f"{name} {version}" for name, version in WHEELS.values())
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {load}, Python {platform.python_version()}; {versions}\n"
    )
    if arguments.only != "capacity":
        print_speed(columns(environment, SPEED, arguments.rounds))
    if arguments.only != "speed":
        print()
        print_capacity(columns(environment, CAPACITY, 1))


if __name__ == "__main__":
    main()
