"""What the checks of markdown files and faces find, and what they leave alone."""

from pathlib import Path

import pytest

import docs
import faces


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[gone](missing.md)", "README.md:3: link to missing.md: no such file"),
        ("[gone](guide.md#no-such)", "README.md:3: link to guide.md#no-such: no such heading"),
        ("[gone](#no-such)", "README.md:3: link to #no-such: no such heading"),
        ("[out](../elsewhere.md)", "README.md:3: link to ../elsewhere.md leaves the repository"),
        ("[there](guide.md) [too](guide.md#two-words-c6 'title') [self](#top)", None),
        ("[web](https://example.org/x.md) `[code](missing.md)`", None),
        ("```text\n[block](missing.md)\n```", None),
    ],
)
def test_links(tmp_path: Path, line: str, problem: str | None) -> None:
    """A link that leads nowhere is found with its line; code and the web are left alone."""
    write(tmp_path / "README.md", f"# Top\n\n{line}\n")
    write(tmp_path / "guide.md", "## Two words: `C6`\n")
    write(tmp_path / ".venv" / "lib" / "other.md", "[not ours](missing.md)\n")
    assert list(docs.broken_links(tmp_path)) == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("readme", "problem"),
    [
        ("```python\nassert 1 + 1 == 2\n```\n```pycon\n>>> shown, not run\n```\n", None),
        ("```python\nraise SystemExit(3)\n```\n", "ended with status 3"),
        ("```pycon\n>>> 1\n```\n", "has 0 blocks"),
        ("```python\n```\n```python\n```\n", "has 2 blocks"),
    ],
)
def test_readme_example_runs(tmp_path: Path, readme: str, problem: str | None) -> None:
    """An example that does not run is worse than none."""
    write(tmp_path / "README.md", readme)
    found = docs.readme_problem(tmp_path / "README.md")
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_missing_readme_is_reported(tmp_path: Path) -> None:
    """A package is whole only with its README."""
    write(tmp_path / "packages" / "plan" / "pyproject.toml", "")
    for readme in (tmp_path / "integration" / "README.md", tmp_path / "README.md"):
        write(readme, "```python\n```\n")
    assert list(docs.broken_examples(tmp_path)) == ["packages/plan/README.md: missing"]


@pytest.mark.parametrize(
    ("last", "problem"), [("assert half * 2 == 4", None), ("assert half == 3", "line 9")]
)
def test_a_pages_blocks_are_one_program(tmp_path: Path, last: str, problem: str | None) -> None:
    """A page that builds a program step by step runs whole, and a failure names the page's line."""
    for readme in (tmp_path / "integration" / "README.md", tmp_path / "README.md"):
        write(readme, "```python\n```\n")
    shown = "```py\nshown, not run\n```\n"
    write(
        tmp_path / "docs" / "page.md", f"# Steps\n```python\nhalf = 2\n```\n{shown}```python\n{last}\n```\n"
    )
    found = list(docs.broken_examples(tmp_path))
    assert len(found) == (0 if problem is None else 1)
    assert problem is None or (found[0].startswith("docs/page.md: ") and problem in found[0])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import kvtide.plan.grouping", True),
        ("from kvtide.plan.grouping import group", True),
        ("from kvtide.plan import grouping", True),
        ("from kvtide.plan import plan_kv_storage", False),
        ("from kvtide.chain.bands import Band", False),
        ("import kvtide.plan", False),
    ],
)
def test_outsiders_reach_faces_only(tmp_path: Path, source: str, found: bool) -> None:
    """A package's tests may look inside it, and inside no other."""
    write(tmp_path / "packages" / "plan" / "src" / "kvtide" / "plan" / "grouping.py", "")
    write(tmp_path / "packages" / "chain" / "src" / "kvtide" / "chain" / "bands.py", "")
    write(tmp_path / "packages" / "chain" / "tests" / "test_it.py", source)
    expected = ["packages/chain/tests/test_it.py:1: imports kvtide.plan.grouping, which is not a face"]
    assert list(faces.problems(tmp_path)) == (expected if found else [])


def test_examples_reach_faces_only(tmp_path: Path) -> None:
    """A README shows outsiders how: it may not look inside even its own package."""
    write(tmp_path / "packages" / "plan" / "src" / "kvtide" / "plan" / "grouping.py", "")
    write(
        tmp_path / "packages" / "plan" / "README.md", "# Plan\n```python\nimport kvtide.plan.grouping\n```\n"
    )
    assert list(faces.problems(tmp_path)) == [
        "packages/plan/README.md:3: imports kvtide.plan.grouping, which is not a face"
    ]


def test_kvtide_stays_a_namespace(tmp_path: Path) -> None:
    """One `__init__.py` would hide every other distribution's packages."""
    write(tmp_path / "packages" / "plan" / "src" / "kvtide" / "__init__.py", "")
    assert list(faces.problems(tmp_path)) == [
        "packages/plan/src/kvtide/__init__.py: kvtide is a namespace and has no face"
    ]


def test_every_distribution_carries_the_license() -> None:
    """A wheel holds no file from above its own folder, so each folder has a copy."""
    copies = [*docs.ROOT.glob("packages/*/LICENSE"), docs.ROOT / "integration" / "LICENSE"]
    assert len(copies) == len(list(docs.ROOT.glob("packages/*/pyproject.toml"))) + 1
    assert {copy.read_bytes() for copy in copies} == {(docs.ROOT / "LICENSE").read_bytes()}
