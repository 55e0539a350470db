"""The page of invariants says what the registry and the sources say, and notices an id that nobody registered."""

from pathlib import Path

import pytest

import invariants
from kvtide.ledger import INVARIANTS, CheckLevel, Invariant

TWO = {
    "band.one": Invariant(id="band.one", holds="One holds.", guard="chain"),
    "band.two": Invariant(
        id="band.two", holds="Two holds.", guard="host", checked_from=CheckLevel.WARN, fatal=False
    ),
}


def source(root: Path, text: str) -> None:
    path = root / "packages" / "chain" / "src" / "kvtide" / "chain" / "band.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.requirement("L8")
def test_the_page_has_a_line_for_each_invariant_with_the_places_that_check_it(tmp_path: Path) -> None:
    """A reader finds the code from the id in a log, and sees what nobody checks yet."""
    source(tmp_path, "raise InvariantError('band.one', f'{1}', 'x')\nother.broken\nbroken(name)\n")
    page = invariants.page(TWO, invariants.find_checks(tmp_path, TWO))
    assert "Checked so far: 1 of 2" in page
    assert (
        "| `band.one` | One holds. | always | raises | chain | [band](../packages/chain/src/kvtide/chain/band.py) |"
        in page
    )
    assert (
        "| `band.two` | Two holds. | from warn | is logged at warn, raises at strict | host | not yet |"
        in page
    )


@pytest.mark.requirement("L8")
@pytest.mark.parametrize(
    "call", ["InvariantError('band.three', 'x', 'y')", "checks.broken('band.three', 'x', 'y')"]
)
def test_an_id_that_is_not_registered_is_refused(tmp_path: Path, call: str) -> None:
    """Its error would carry an id that no page explains."""
    source(tmp_path, call)
    with pytest.raises(invariants.InvariantTableError, match=r"band.py: 'band.three' is not registered"):
        invariants.find_checks(tmp_path, TWO)


@pytest.mark.requirement("L8")
def test_check_tells_a_stale_page_and_leaves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CI compares; only a person writes."""
    assert invariants.main(["--check"], tmp_path) == 1
    assert "docs/invariants.md is out of date" in capsys.readouterr().err
    assert invariants.main([], tmp_path) == 0
    assert invariants.main(["--check"], tmp_path) == 0
    target = tmp_path / "docs" / "invariants.md"
    target.write_text(target.read_text() + "edited\n")
    assert invariants.main(["--check"], tmp_path) == 1
    assert target.read_text().endswith("edited\n")


@pytest.mark.requirement("L8")
def test_every_id_that_the_sources_raise_is_registered_and_ours_are_all_checked() -> None:
    """The registry is kept with the ledger: what the ledger guards, its own code checks."""
    checks = invariants.find_checks(invariants.ROOT, INVARIANTS)
    ours = {invariant.id for invariant in INVARIANTS.values() if invariant.guard == "ledger"}
    assert ours <= set(checks)
    assert all(place.startswith("packages/ledger/") for invariant in ours for place in checks[invariant])
