"""`kvtide stress` as people and programs call it."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvtide.simulation import Case, Operation, RealDevice, load_case, run_seed, save_case
from kvtide.simulation.command import command
from kvtide.simulation.mutations import MUTATIONS
from kvtide.simulation.mutations.mutation import Patch
from kvtide.simulation.operations import OPERATIONS
from kvtide.simulation.real import open_device, run_seed_on
from kvtide.simulation.traces import read_trace, replay


def stress(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], terminal_width=110)


@pytest.mark.requirement("X1")
def test_seeds_that_hold_end_in_a_table_and_a_figure() -> None:
    """What the operations met is printed: a green run that met nothing says nothing."""
    result = stress("--seeds", "0:4", "--ops", 80, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert re.search(r"launch +launched", result.stdout)
    assert re.search(r"not reached: [^:]*too many in flight", " ".join(result.stdout.split())), (
        "what was declared in vain is seen"
    )
    assert re.search(r"4 seeds, 320 actions in [\d.]+ s, [\d,]+ a second: every check held", result.stdout)


@pytest.mark.requirement("X1")
def test_processes_share_seeds_and_find_what_one_finds() -> None:
    """Jobs change the time and nothing else."""
    alone, together = (stress("--seeds", "3:9", "--ops", 40, "--jobs", jobs, "--json") for jobs in (1, 2))
    assert (alone.exit_code, together.exit_code) == (0, 0)
    first, second = json.loads(alone.stdout), json.loads(together.stdout)
    assert first["coverage"] == second["coverage"]
    assert first["not_reached"] == second["not_reached"]
    assert "too many in flight" in first["not_reached"]["launch"]
    assert not set(first["not_reached"]["launch"]) & set(first["coverage"]["launch"])
    assert (first["seeds"], first["actions"], first["failures"]) == (6, 240, [])
    assert first["actions_per_second"] > 0
    assert set(first["versions"]) >= {"kvtide-chain", "kvtide-simulation"}


@pytest.mark.requirement("X1")
def test_a_failure_is_shown_kept_and_replayed(tmp_path: Path, patch: Patch) -> None:
    """Exit status 1, the minimal actions, and a file that fails alike until the fault is mended."""
    MUTATIONS["upload.rows"].plant(patch)
    result = stress("--seeds", "0", "--ops", 100, "--jobs", 1, "--minimize", "--out", tmp_path / "found")
    assert result.exit_code == 1
    assert "seed 0: stale_mirror" in result.stdout
    path = tmp_path / "found" / "seed-0.json"
    assert f"kvtide stress --replay {path}" in result.stdout.replace("\n", "")
    again = stress("--replay", path)
    assert again.exit_code == 1
    assert "the case: stale_mirror" in again.stdout
    as_json = stress("--replay", path, "--json")
    assert json.loads(as_json.stdout)["failure"]["check"] == "stale_mirror"
    patch.undo()
    mended = stress("--replay", path)
    assert mended.exit_code == 0
    assert "every check held (when the case was written, stale_mirror failed)" in mended.stdout


def test_a_case_can_be_made_minimal_later(tmp_path: Path, patch: Patch) -> None:
    """Sweeps need not spend time on it."""
    MUTATIONS["ranks.frees"].plant(patch)
    assert stress("--seeds", "0", "--ops", 100, "--jobs", 1, "--out", tmp_path).exit_code == 1
    result = stress("--replay", tmp_path / "seed-0.json", "--minimize", "--out", tmp_path)
    assert result.exit_code == 1
    smaller = json.loads((tmp_path / "seed-0-minimal.json").read_text(encoding="utf-8"))
    assert len(smaller["actions"]) <= 3


LOOKING = {"begin transfer", "end use", "lull", "pass time"}
"""Operations whose outcomes follow what hosts have seen of an end; it comes sooner on a device that ships."""


@pytest.mark.requirement("X1", "C10")
def test_the_operations_run_on_a_device_that_ships(operations: dict[str, Operation]) -> None:
    """The same table; and where no host looks at an end, the same outcomes: decisions follow no device."""
    pytest.importorskip(
        "kvtide.arena", reason="real devices are the arena's, which this package does without"
    )
    result = stress("--seeds", "1:3", "--ops", 60, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["facts"]["takes"] > 0
    blind = {name: one for name, one in operations.items() if name not in LOOKING}
    for seed in range(4):
        real = run_seed_on(partial(open_device, "cpu"), seed, 60, blind)
        assert real == run_seed(seed, 60, blind)
        assert real.failure is None


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("method", ["run_all", "synchronize"])
def test_a_device_that_gives_up_is_a_failure_of_its_seed(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's errors come late, often where a run is over; a sweep still says which seed it was."""
    pytest.importorskip(
        "kvtide.arena", reason="real devices are the arena's, which this package does without"
    )

    def give_up() -> None:
        raise RuntimeError("an illegal address")

    def opened(arena_bytes: int, seed: int) -> Any:
        device = open_device("cpu", arena_bytes, seed)
        setattr(device, method, give_up)
        return device

    blind = {
        operation.name: operation for operation in OPERATIONS if operation.name not in LOOKING | {"rest"}
    }
    run = run_seed_on(opened, 1, 20, blind)
    assert run.failure is not None
    assert (run.failure.check, run.failure.action_index) == ("unexpected_error", 20)
    assert "illegal address" in run.failure.message


@pytest.mark.requirement("X1")
def test_a_failure_of_a_real_device_is_replayed_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a device that ships does wrong shows on no modelled one: the case says where, and is run again there."""
    pytest.importorskip(
        "kvtide.arena", reason="real devices are the arena's, which this package does without"
    )
    monkeypatch.setattr(RealDevice, "zero_units", lambda *_: None)
    found = stress("--seeds", 1, "--ops", 60, "--device", "cpu", "--out", tmp_path)
    assert found.exit_code == 1, found.output
    path = tmp_path / "seed-1.json"
    assert load_case(path).device == "cpu"
    check = json.loads(path.read_text(encoding="utf-8"))["failure"]["check"]
    again = stress("--replay", path)
    assert again.exit_code == 1
    assert f"the case: {check}" in again.stdout
    assert stress("--replay", path, "--device", "modelled").exit_code == 0
    refused = stress("--replay", path, "--minimize")
    assert refused.exit_code == 2
    assert "is not made minimal" in refused.output
    assert "; --device modelled --minimize if it fails there too" in " ".join(refused.output.split())
    monkeypatch.undo()
    assert stress("--replay", path).exit_code == 0


@pytest.mark.requirement("X1")
def test_a_failure_that_needs_no_real_device_is_kept_as_one(tmp_path: Path, patch: Patch) -> None:
    """A seed that fails as it is drawn never comes to the device: its case runs, and shrinks, where there is none."""
    MUTATIONS["upload.rows"].plant(patch)
    found = stress("--seeds", 0, "--ops", 100, "--device", "cpu", "--out", tmp_path)
    assert found.exit_code == 1, found.output
    assert load_case(tmp_path / "seed-0.json").device == "modelled"


def test_a_case_of_a_device_that_is_not_here_says_how_to_run_it(
    tmp_path: Path, operations: dict[str, Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has named the device in this call; who does is told of the option."""
    path = tmp_path / "case.json"
    save_case(path, Case.of(run_seed(0, 1, operations), 0, "cuda"))

    def opened(*_: object) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setattr("kvtide.simulation.command.open_device", opened)
    refused, named = stress("--replay", path), stress("--replay", path, "--device", "cpu")
    assert (refused.exit_code, named.exit_code) == (2, 2)
    why = "the case failed on cuda: no such device; --device modelled runs it without"
    assert why in " ".join(refused.stderr.split())
    assert "--device cpu: no such device" in named.stderr


def test_without_an_arena_a_real_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is missing, not with a traceback."""
    monkeypatch.setitem(sys.modules, "kvtide.arena", None)
    result = stress("--seeds", "1", "--device", "cpu")
    assert result.exit_code == 2
    assert "--device cpu" in result.stderr


@pytest.mark.requirement("X3")
def test_a_seed_becomes_a_trace(tmp_path: Path) -> None:
    """Of one seed, with pages as large as told; and it replays."""
    path = tmp_path / "seed-4.jsonl"
    recorded = stress("--seeds", 4, "--ops", 40, "--record", path, "--page-tokens", 16)
    assert recorded.exit_code == 0, recorded.output
    header, lines = read_trace(path)
    assert f"{len(lines)} calls of seed 4" in recorded.stdout
    assert max(band.page_tokens or 0 for band in header.layout.bands) == 16
    assert replay(header, lines) is None


@pytest.mark.requirement("X3")
def test_a_seed_that_fails_becomes_a_trace_up_to_there(tmp_path: Path, patch: Patch) -> None:
    """In one line, with status 1 and the trace; not as a traceback."""
    MUTATIONS["upload.rows"].plant(patch)
    path = tmp_path / "seed-0.jsonl"
    result = stress("--seeds", 0, "--ops", 100, "--record", path)
    assert result.exit_code == 1
    _, lines = read_trace(path)
    assert result.stderr.startswith(
        f"seed 0 fails after {len(lines)} calls, which are in {path}: stale_mirror"
    )


def test_what_was_found_is_shown_though_it_cannot_be_kept(
    tmp_path: Path, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may be full by then; a sweep of hours would be lost with it."""
    MUTATIONS["upload.rows"].plant(patch)

    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtide.simulation.command.save_case", is_full)
    shown = stress("--seeds", "0:2", "--ops", 100, "--jobs", 1, "--out", tmp_path)
    assert shown.exit_code == 1
    assert "No space left on device: the case is not kept" in shown.stderr
    assert "seed 0: stale_mirror" in shown.stdout
    assert "not kept" in shown.stdout.splitlines()
    as_json = stress("--seeds", "0:2", "--ops", 100, "--jobs", 1, "--out", tmp_path, "--json")
    assert json.loads(as_json.stdout)["failures"][0]["file"] is None


BESIDE = {
    "--record x.jsonl": ["--jobs 2", "--minimize", "--out y", "--replay z", "--device cpu", "--json"],
    "--replay x.json": ["--seeds 1", "--ops 9", "--jobs 2", "--page-tokens 4", "--out y"],
    "--device cpu": ["--minimize", "--jobs 2", "--page-tokens 4"],
}
"""Option → each that would mean nothing beside it."""


@pytest.mark.parametrize(
    ("option", "other"), [(option, other) for option, others in BESIDE.items() for other in others]
)
def test_an_option_that_would_mean_nothing_is_refused(option: str, other: str) -> None:
    """Who names it expects it to count."""
    result = stress(*option.split(), *other.split())
    assert result.exit_code == 2
    assert other.split(maxsplit=1)[0] in result.stderr
    assert not Path("x.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--out", f"{__file__}/cases"], "is no folder"),
        (["--out", f"{__file__}/cases", "--replay", "{case}", "--minimize"], "is no folder"),
        (["--record", "trace.jsonl"], "the trace of one seed, found 100"),
        (["--page-tokens", "16"], "is for --record"),
        (["--seeds", "1", "--ops", "1", "--record", "no-such-folder/trace.jsonl"], "No such file"),
        (["--seeds", "5:5"], "seeds from A up to B"),
        (["--seeds", "x"], "seeds from A up to B"),
        (["--seeds", "0:99999999"], "at most 1000000"),
        (["--ops", "0"], "0"),
        (["--replay", "no-such-file.json"], "No such file"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(
    arguments: list[str], why: str, operations: dict[str, Operation], tmp_path: Path
) -> None:
    """Status 2, as every command of kvtide, before anything is run; the reason without numbers for programs."""
    case = tmp_path / "case.json"
    save_case(case, Case.of(run_seed(0, 1, operations), 0))
    result = stress(*(argument.format(case=case) for argument in arguments))
    assert result.exit_code == 2
    assert "Errno" not in result.output
    assert why in " ".join(result.output.split())


def test_a_case_of_other_versions_is_replayed_with_a_warning(tmp_path: Path, patch: Patch) -> None:
    """It may hold because the fault is mended, or because the code around it is another."""
    MUTATIONS["upload.rows"].plant(patch)
    stress("--seeds", "0:16", "--ops", 60, "--jobs", 1, "--out", tmp_path)
    path = min(tmp_path.glob("seed-*.json"))
    document = json.loads(path.read_text(encoding="utf-8"))
    document["versions"]["kvtide-chain"] = "0.0.1"
    path.write_text(json.dumps(document), encoding="utf-8")
    result = stress("--replay", path)
    assert result.exit_code == 1
    assert "'kvtide-chain': '0.0.1'" in result.stderr.replace("\n", "")
