"""`kvtide replay` as people and programs call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtide.simulation.traces import STORIES
from kvtide.simulation.traces.command import command


def invoked(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.mark.requirement("X3")
def test_the_command_replays_compares_and_writes(tmp_path: Path) -> None:
    """Exit status 0 for a life as recorded, 1 with the divergence, 2 for what cannot be read, 3 for what is no trace."""
    trace = STORIES / "quarantined-pages.jsonl"
    same = invoked(trace)
    assert (same.exit_code, same.stdout) == (0, "11 calls, every answer and state as recorded\n")
    lines = trace.read_text(encoding="utf-8").splitlines()
    changed = tmp_path / "changed.jsonl"
    place = next(place for place, line in enumerate(lines) if '"refused"' in line)
    changed.write_text(
        "\n".join([*lines[:place], lines[place].replace('"live":0', '"live":1'), *lines[place + 1 :]])
    )
    shown = invoked(changed, "--around", 1)
    assert shown.exit_code == 1
    assert f">{place + 1:7} chain.take" in shown.stdout
    assert "answer recorded" in shown.stdout
    assert json.loads(invoked(changed, "--json").stdout)["divergence"]["line"] == place + 1
    written = tmp_path / "written.jsonl"
    assert invoked(changed, "--write", written).exit_code == 1
    assert written.read_text(encoding="utf-8").splitlines() == lines
    assert invoked(tmp_path / "none.jsonl").exit_code == 2
    none = tmp_path / "is-none.jsonl"
    none.write_text("\n".join([*lines[:3], lines[3].replace('"args":{', '"args":{"other":1},"more":{')]))
    refused = invoked(none)
    assert refused.exit_code == 3
    assert re.search(r"is-none.jsonl, line 4: the args of [\w.]+ are without", refused.stderr)
    assert invoked(trace, "--adapter", "kvtide.simulation:nobody").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["no-such.jsonl"], "no-such.jsonl: No such file or directory"),
        ([STORIES / "float-in-the-way.jsonl", "--write", "nowhere/x"], "--write 'nowhere/x': No such file"),
        ([STORIES / "float-in-the-way.jsonl", "--json", "--around", 3], "--around would change nothing"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(
    arguments: list[object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that is meant, not another, and no number that only a program reads; before anything is replayed."""
    monkeypatch.setattr("kvtide.simulation.traces.command.replayed", None)
    result = invoked(*arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.stderr.split())
    assert "Errno" not in result.stderr
