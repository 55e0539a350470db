"""`kvtide mutations` as people and programs call it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtide.simulation import MUTATIONS, Failure, Hunt
from kvtide.simulation.mutations.command import command


def mutations(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], terminal_width=140)


@pytest.mark.requirement("X2")
def test_what_was_found_is_a_table_or_a_document() -> None:
    """By whom, and after how many seeds."""
    few = ("upload.rows", "zero.taken", "--seeds", "0:3", "--ops", 60, "--jobs", 1)
    result = mutations(*few)
    assert result.exit_code == 0, result.output
    assert re.search(r"upload\.rows +rows are staged when they change +1 +stale_mirror", result.stdout)
    assert re.search(r"2 mutations in \d+ s: every one as it should be", result.stdout)
    document = json.loads(mutations(*few, "--json").stdout)
    assert [each["id"] for each in document["mutations"]] == ["zero.taken", "upload.rows"]
    assert document["mutations"][1]["failure"]["check"] == "stale_mirror"
    assert document["mutations"][1]["rows"] == ["K1"]


@pytest.mark.requirement("X2")
def test_a_mutation_that_nobody_notices_is_a_failure() -> None:
    """One action notices nothing; where another rule stands before a cell, nobody can."""
    result = mutations("pending.newest", "clearance.zero.fixed", "--seeds", "0", "--ops", 1, "--jobs", 1)
    assert result.exit_code == 1
    assert re.search(r"pending\.newest .* 1 +survived", result.stdout)
    assert re.search(r"clearance\.zero\.fixed .* 1 +behind another rule", result.stdout)
    assert "not as they should be: pending.newest" in result.stdout


@pytest.mark.requirement("X2")
def test_the_page_is_written_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the weekly run does: what is old, or edited, is no longer the page."""

    def hunted(names: Sequence[str], seeds: range, action_count: int, *, jobs: int) -> Iterator[Hunt]:
        for name in names:
            found = Failure(check="lost_write", action_index=3, message="…")
            yield Hunt(mutation=name, seeds_run=2, failure=None if MUTATIONS[name].unreachable else found)

    monkeypatch.setattr("kvtide.simulation.mutations.command.hunt", hunted)
    path = tmp_path / "mutations.md"
    assert mutations("--out", path).exit_code == 0
    assert mutations("--check", path).exit_code == 0
    assert path.read_text(encoding="utf-8").count("| 2 | `lost_write` |") == sum(
        not mutation.unreachable for mutation in MUTATIONS.values()
    )
    path.write_text(path.read_text(encoding="utf-8").replace("| 2 |", "| 3 |", 1), encoding="utf-8")
    result = mutations("--check", path)
    assert result.exit_code == 1
    assert "is not what `kvtide mutations --out" in result.stderr


@pytest.mark.requirement("X2")
def test_survivors_are_compared_with_those_that_the_page_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weekly run that is red of one would not show the second, nor one that is found again; what is found is kept all the same."""
    survivors = {"wait.settle"}

    def hunted(names: Sequence[str], seeds: range, action_count: int, *, jobs: int) -> Iterator[Hunt]:
        for name in names:
            found = Failure(check="lost_write", action_index=3, message="…")
            is_found = name not in survivors and not MUTATIONS[name].unreachable
            yield Hunt(
                mutation=name, seeds_run=2 if is_found else len(seeds), failure=found if is_found else None
            )

    monkeypatch.setattr("kvtide.simulation.mutations.command.hunt", hunted)
    path, found = tmp_path / "mutations.md", tmp_path / "found.md"
    assert mutations("--out", path).exit_code == 1
    known = mutations("--check", path)
    assert (known.exit_code, known.stderr) == (0, "")
    assert "not as they should be: wait.settle" in known.stdout
    survivors.add("upload.rows")
    second = mutations("--check", path, "--out", found)
    assert second.exit_code == 1
    assert re.search(
        r"^-\| `upload.rows` .*\| 2 \| `lost_write` \|\n\+\| `upload.rows` .*\| none \|",
        second.stderr,
        re.MULTILINE,
    )
    assert "wait.settle" not in second.stderr
    assert "| `upload.rows` " in found.read_text(encoding="utf-8")
    survivors.clear()
    assert mutations("--check", path).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nonsense"], "no mutation is called 'nonsense'"),
        (["gate", "--out", "page.md"], "are for the whole table"),
        (["--seeds", "0:10", "--check", "page.md"], "are for the whole table"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(arguments: list[str], why: str) -> None:
    """Status 2, as every command of kvtide."""
    result = mutations(*arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("option", "path"),
    [("--out", "nowhere/page.md"), ("--out", f"{__file__}/page.md"), ("--check", "nowhere.md")],
)
def test_a_page_that_cannot_be_written_or_read_is_refused_first(
    option: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hunt takes half an hour, and would be lost."""
    monkeypatch.setattr("kvtide.simulation.mutations.command.hunt", None)
    result = mutations(option, path)
    assert result.exit_code == 2
    assert f"{option} '{path}'" in " ".join(result.stderr.split())
