"""The page of requirements says which tests prove a row, and nothing that the tests do not say."""

from pathlib import Path

import pytest

import requirements

ROWS = """
[chain]
title = "chain"
[chain.rows]
C1 = "ids are minted"
C2 = "takes are ordered"
"C13+" = "state can be cloned"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "requirement_rows.toml").write_text(ROWS)
    (tmp_path / "packages" / "chain" / "tests").mkdir(parents=True)
    return tmp_path


def write_test(root: Path, source: str) -> None:
    (root / "packages" / "chain" / "tests" / "test_it.py").write_text("import pytest\n" + source)


def written_page(root: Path) -> str:
    assert requirements.main([], root) == 0
    return (root / "docs" / "requirements.md").read_text()


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ('@pytest.mark.requirement("C2", "C1")\ndef test_a(): ...', "test_a"),
        ('@pytest.mark.slow\n@pytest.mark.requirement("C1")\nasync def test_a(): ...', "test_a"),
        ('pytestmark = pytest.mark.requirement("C1")\ndef test_a(): ...', "test_a"),
        ('def test_a(): ...\npytestmark = [pytest.mark.x, pytest.mark.requirement("C1")]', "test_a"),
        ('@pytest.mark.requirement("C1")\nclass TestIt:\n    def test_a(self): ...', "TestIt::test_a"),
        (
            'class TestIt:\n    pytestmark = pytest.mark.requirement("C1")\n    def test_a(self): ...',
            "TestIt::test_a",
        ),
        (
            '@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.requirement("C1"))])\ndef test_a(n): ...',
            "test_a",
        ),
    ],
)
def test_every_place_of_a_marker_is_read(root: Path, source: str, test: str) -> None:
    """A marker that pytest honours and the page overlooks would show a proven row as unproven."""
    write_test(root, source)
    assert f"| C1 | ids are minted | [{test}](../packages/chain/tests/test_it.py) |" in written_page(root)


def test_rows_without_a_test_are_shown_plainly(root: Path) -> None:
    """The page must not look better than the tests are."""
    write_test(root, '@pytest.mark.requirement("C1")\ndef helper(): ...\ndef test_b(): ...')
    page = written_page(root)
    assert page.count("| not yet |") == 3
    assert "Of 3 rows, 0 are proved, 0 in part, 3 not yet." in page


def test_a_row_that_is_built_in_part_says_what_is_missing(root: Path) -> None:
    """A test of one clause must not make the whole row look done."""
    rows = root / "tools" / "requirement_rows.toml"
    rows.write_text(ROWS + '\n[partial]\nC1 = "the ids of state slots"\n')
    write_test(root, '@pytest.mark.requirement("C1")\ndef test_a(): ...')
    page = written_page(root)
    assert "**in part**; missing: the ids of state slots<br>[test_a]" in page
    assert "Of 3 rows, 0 are proved, 1 in part, 2 not yet." in page


@pytest.mark.parametrize("row", ["C2", "C99"])
def test_what_is_missing_of_an_unbuilt_or_unknown_row_is_refused(root: Path, row: str) -> None:
    """Such an entry is a left-over, and would be read as progress."""
    (root / "tools" / "requirement_rows.toml").write_text(ROWS + f'\n[partial]\n{row} = "all of it"\n')
    write_test(root, '@pytest.mark.requirement("C1")\ndef test_a(): ...')
    assert requirements.main([], root) == 1


def test_plus_belongs_to_the_row_and_not_to_the_marker(root: Path) -> None:
    """One spelling, so that a search for an id finds all of its tests."""
    write_test(root, '@pytest.mark.requirement("C13")\ndef test_a(): ...')
    assert "| C13+ | state can be cloned | [test_a]" in written_page(root)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ('@pytest.mark.requirement("C99")\ndef test_a(): ...', "names 'C99', which is no row"),
        ('@pytest.mark.requirement("C13+")\ndef test_a(): ...', "write C13"),
        ("@pytest.mark.requirement(C1)\ndef test_a(): ...", "a row id in quotes"),
        ("@pytest.mark.requirement()\ndef test_a(): ...", "names no row"),
    ],
)
def test_marker_that_names_no_row_is_refused(
    root: Path, source: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt id would otherwise leave its row unproven in silence."""
    write_test(root, source)
    assert requirements.main([], root) == 1
    assert told in capsys.readouterr().err
    assert not (root / "docs").exists()


def test_check_compares_and_writes_nothing(root: Path) -> None:
    """CI must fail on a stale page, and leave it as it found it."""
    write_test(root, "def test_a(): ...")
    assert requirements.main(["--check"], root) == 1
    page = written_page(root)
    assert requirements.main(["--check"], root) == 0
    write_test(root, '@pytest.mark.requirement("C2")\ndef test_a(): ...')
    assert requirements.main(["--check"], root) == 1
    assert (root / "docs" / "requirements.md").read_text() == page


def test_the_projects_rows_are_whole() -> None:
    """Ids are unique within a section by TOML's own rule; across sections only by this one."""
    sections, partial = requirements.load_rows(requirements.ROOT / "tools" / "requirement_rows.toml")
    ids = [row.rstrip("+") for rows in sections.values() for row in rows]
    assert len(ids) == len(set(ids)) == 78
    assert all("|" not in statement for rows in sections.values() for statement in rows.values())
    assert set(partial) <= set(ids)
