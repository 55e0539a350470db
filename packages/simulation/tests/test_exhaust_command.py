"""`kvtide exhaust` as people and programs call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtide.simulation.exhaustive import SHAPES, repeat
from kvtide.simulation.exhaustive.command import command
from kvtide.simulation.exhaustive.small_steps import WORDS
from kvtide.simulation.failures import CHECKS

from .small_canaries import SMALL_CANARIES


def exhausted(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], terminal_width=110)


@pytest.mark.requirement("X4")
def test_the_command_says_how_far_it_came_and_stops_in_time() -> None:
    """People get a table, programs the figures."""
    shown = exhausted("two-bands", "float", "--depth", 2, "--only", "take", "--only", "make room")
    assert shown.exit_code == 0, shown.output
    assert "two-bands" in shown.stdout
    assert "every check held" in shown.stdout
    result = exhausted("two-bands", "--seconds", 0.5, "--json")
    (shape,) = json.loads(result.stdout)["shapes"]
    assert shape["failure"] is None
    assert shape["states"] == sum(shape["layers"])
    assert shape["depth"] < 8
    assert shape["outcomes"]["take"]["taken"] > 0


@pytest.mark.requirement("X4")
def test_the_command_shows_and_keeps_the_first_bad_sequence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit status 1, in words, and as what `repeat` takes; a file of it for who looks later."""
    SMALL_CANARIES["settles wait for nothing"].plant(monkeypatch)
    shown = exhausted("two-bands", "--depth", 4)
    assert shown.exit_code == 1
    assert "two-bands: unordered_overlap" in shown.stdout
    assert "; looking for a shorter sequence" in shown.stderr
    assert CHECKS["unordered_overlap"] in shown.stdout
    assert (
        "   1 launch a forward that writes all it may\n   2 free unit 5 of band 'full'\n   3 take a page"
        in shown.stdout
    )
    folder = tmp_path / "kept"
    as_json = json.loads(exhausted("two-bands", "--depth", 4, "--json", "--out", folder).stdout)
    kept = json.loads((folder / "exhaust-two-bands.json").read_text(encoding="utf-8"))
    assert kept["described"][3] == "take a page"
    assert kept["failure"] == as_json["shapes"][0]["failure"]
    sequence = [tuple(action) for action in kept["failure"]["sequence"]]
    failure = repeat(SHAPES["two-bands"], sequence)
    assert failure is not None
    assert failure.check == "unordered_overlap"
    assert exhausted("no-such-shape").exit_code == 2


@pytest.mark.requirement("X4")
def test_a_search_that_tries_nothing_is_no_search_that_holds() -> None:
    """Of words that need others before them nothing is tried: that is said, and what of several was never tried."""
    nothing = exhausted("two-bands", "--only", "submit")
    assert nothing.exit_code == 2
    assert "nothing was tried" in nothing.stderr
    assert "every check held" not in nothing.output
    some = exhausted("two-bands", "--depth", 2, "--only", "take", "--only", "submit")
    assert some.exit_code == 0
    assert "every check held; never tried: submit" in some.stdout


def test_a_bad_sequence_is_shown_though_it_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder that cannot be made is refused before the search, a disk that is full then costs the file alone."""
    SMALL_CANARIES["everything is said to fit"].plant(monkeypatch)
    refused = exhausted("window-only", "--depth", 1, "--out", f"{__file__}/kept")
    assert refused.exit_code == 2
    assert "is no folder" in refused.stderr

    def is_full(*_: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", is_full)
    shown = exhausted("window-only", "--depth", 1, "--out", tmp_path)
    assert shown.exit_code == 1
    assert "No space left on device: the sequence is not kept" in shown.stderr
    assert "window-only: capacity_answer" in shown.stdout


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_a_time_that_is_none_is_refused(seconds: str) -> None:
    """A search without a depth would never end."""
    assert exhausted("--seconds", seconds).exit_code == 2


def test_help_names_what_there_is() -> None:
    """Every shape and every word, as they are called for."""
    shown = " ".join(exhausted("--help").stdout.split())
    for name in (*SHAPES, *WORDS):
        assert name in shown
