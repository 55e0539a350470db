"""`docs/life-of-a-page.md` tells what `PAGE_LIFE` holds; that the code makes these arrows is tested with the chain."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtide.ledger
from kvtide.ledger import PAGE_LIFE, PageState

PAGE = Path(__file__).resolve().parents[3] / "docs" / "life-of-a-page.md"


def rows_under(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its two head lines."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.requirement("L4")
def test_the_page_lists_every_arrow_with_its_function() -> None:
    """A reader who follows an arrow lands in the code that makes it."""
    expected = [[a.source.value, a.target.value, a.when, f"`{a.made_by}`"] for a in PAGE_LIFE]
    assert rows_under("Every arrow") == expected


@pytest.mark.requirement("L4")
def test_every_state_can_be_entered_and_left() -> None:
    """A state without a way out is a leak; one without a way in is dead text."""
    assert {arrow.source for arrow in PAGE_LIFE} == set(PageState)
    assert {arrow.target for arrow in PAGE_LIFE} == set(PageState)


@pytest.mark.requirement("L4")
def test_the_functions_of_the_ledger_are_found_where_the_page_says() -> None:
    """By the package's face, as any engine would call them."""
    for arrow in PAGE_LIFE:
        if not arrow.made_by.startswith("kvtide.ledger."):
            continue
        found: object = kvtide.ledger
        for name in arrow.made_by.removeprefix("kvtide.ledger.").split("."):
            found = getattr(found, name)
        assert callable(found)
        assert found.__doc__
