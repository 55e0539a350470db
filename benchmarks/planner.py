"""How long the planner takes: import, then planning and sizing each config of a folder.

    python benchmarks/planner.py FOLDER      a folder of Hugging Face config.json files

The floor of an import is an empty interpreter's; planning has none, so its times stand alone. Exits with 1 where a model takes
over 100 ms, or a process that imports a package over 200.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from kvtide.plan import ConfigError, from_config, page_multiple, plan_kv_storage
from kvtide.sizing import requests_that_fit, size_plan

RUNS = 7
MODEL_LIMIT_SECONDS = 0.1
IMPORT_LIMIT_SECONDS = 0.2


def process_seconds(code: str) -> float:
    """Median wall time of a fresh interpreter that runs `code`."""
    spent = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def planning_seconds(config: dict[str, object]) -> float:
    """Median CPU time of one capacity question: layers, sub-pools, bytes of a whole GPU, requests of 8k tokens."""
    spent = []
    for _ in range(RUNS):
        began = time.thread_time()
        layers = from_config(config)
        plan = plan_kv_storage(layers, page_tokens=max(16, page_multiple(layers)))
        sized = size_plan(
            plan,
            budget_bytes=140 * 2**30,
            max_running_requests=1024,
            max_context_tokens=2**20,
            chunk_tokens=8192,
        )
        requests_that_fit(sized.layout, sized.context_demand(8192))
        spent.append(time.thread_time() - began)
    return statistics.median(spent)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: planner.py FOLDER", file=sys.stderr)
        return 2
    floor = process_seconds("")
    slow: list[str] = []
    for package in ("kvtide.plan", "kvtide.sizing"):
        took = process_seconds(f"import {package}")
        if took > IMPORT_LIMIT_SECONDS:
            slow.append(f"import {package}")
        print(f"{took * 1e3:8.1f} ms  a process that imports {package} ({took / floor:.1f} x an empty one)")
    for path in sorted(Path(arguments[0]).glob("*.json")):
        try:
            took = planning_seconds(json.loads(path.read_text()))
        except ConfigError as error:
            print(f"       -     {path.stem}: {error}")
            continue
        print(f"{took * 1e3:8.1f} ms  {path.stem}")
        if took > MODEL_LIMIT_SECONDS:
            slow.append(path.stem)
    if slow:
        print(f"over the limit: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
