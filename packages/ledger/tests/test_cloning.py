"""Copies of books: what of an object a clone has of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtide.ledger import clone_of


class Books:
    """Attributes of every sort; what is there is asked of the class only now and then."""

    def __init__(self) -> None:
        self.count = 3
        self.array = np.zeros(2, np.int64)
        self.entries: dict[int, int] = {}
        self.units: list[int] = []
        self.batches: deque[int] = deque()
        self.later: Any = None
        self.part: Any = object()


def changed(books: Books) -> None:
    books.array[0] += 1
    books.entries[1] = 1
    books.units.append(1)
    books.batches.append(1)


def contents(books: Books) -> list[Any]:
    return [books.array.tolist(), dict(books.entries), list(books.units), list(books.batches)]


@pytest.mark.requirement("C13")
def test_a_clone_has_containers_of_its_own_and_shares_the_rest() -> None:
    """One level deep; what is given as a part is taken as it is, containers too."""
    books, entries = Books(), {5: 5}
    clone = clone_of(books, entries=entries)
    assert clone.entries is entries
    assert (clone.count, clone.part) == (3, books.part)
    clone = clone_of(books)
    before = contents(books)
    changed(clone)
    assert contents(books) == before
    changed(books)
    assert contents(books) == contents(clone)


@pytest.mark.requirement("C13")
@pytest.mark.parametrize("make", [lambda: np.zeros(2, np.int64), dict, list, deque])
def test_what_was_nothing_or_not_there_at_first_is_copied_once_it_is_a_container(
    make: Callable[[], Any],
) -> None:
    """What an object of a class looks like is remembered from one of them; a part that came later must not be shared."""
    books = Books()
    clone_of(books)
    books.later = make()
    clone = clone_of(books)
    assert clone.later is not books.later
    assert type(clone.later) is type(books.later)
    books.more = make()  # type: ignore[attr-defined]  # that is the point
    assert clone_of(books).more is not books.more  # type: ignore[attr-defined]
    assert clone_of(Books()).later is None
