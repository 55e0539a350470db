"""The work that every bookkeeper of a comparison does, and the figures taken from it.

NumPy only, and nothing of kvtide: peers run this file in an environment of their own. Whoever is compared, ours, a floor or a
peer, implements `Books` and counts the thread CPU time of its own calls, so that what a scheduler does between them is charged
to nobody. Figures leave a program as lines of JSON.
"""

import enum
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]

WINDOW_TOKENS = 128
POOL_TOKENS = 1_085_069
"""Tokens that the pools of one layer kind hold: 40 GB of gpt-oss-120b."""
REQUESTS, CONTEXT_TOKENS = 256, 16_384
PREFILL_TOKENS = 8192
PAGE_SIZES = (1, 16, 64)


class Shape(enum.Enum):
    """Which kinds of memory the model has."""

    WINDOW = "full + window"
    STATE = "full + state"
    THREE = "full + window + state"


class Books(Protocol):
    """What is compared: a scheduler's memory, whose requests are rows."""

    spent_ns: int
    """Thread CPU time of its calls so far."""
    token_bytes: int
    """Bytes that one token writes in all layers."""

    @property
    def zeroed_bytes(self) -> int:
        """Bytes zeroed on hand-out so far, by the count of units handed over for it."""
        ...

    @property
    def moved_bytes(self) -> int:
        """Bytes moved so far."""
        ...

    def admit(self, prompt_tokens: int) -> int:
        """Take the pages of a prompt; the request's row."""
        ...

    def decode(self, rows: IntArray) -> None:
        """One token for each row: take, retire what fell out of windows, note the new pages in the request table."""
        ...

    def finish(self, row: int) -> None:
        """Free what a row holds."""
        ...

    def fragment(self) -> None:
        """Take eight tenths of the pools' pages, and free half of them in random order."""
        ...


class Figure(NamedTuple):
    """One cell of a table."""

    operation: str
    page_tokens: int
    value: float


def print_figures(figures: Iterator[Figure]) -> None:
    """One JSON list a line, as soon as it is there."""
    for figure in figures:
        print(json.dumps(figure), flush=True)


def settle() -> None:
    """Keep the collector of garbage from what was built so far."""
    gc.collect()
    gc.freeze()


def thread_us(action: Callable[[], object]) -> float:
    """µs of thread CPU time of one call."""
    before = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - before) / 1000


def running_rows(books: Books) -> IntArray:
    """256 requests of 400 to 1,200 tokens, decoded until windows are full and pages come and go."""
    lengths = np.random.default_rng(0).integers(400, 1200, REQUESTS).tolist()
    rows = np.array([books.admit(length) for length in lengths])
    for _ in range(300):
        books.decode(rows)
    return rows


def decode_us(books: Books, rows: IntArray, *, samples: int = 5, steps: int = 128) -> float:
    """Median of a decode step over all rows."""
    found = []
    for _ in range(samples):
        before = books.spent_ns
        for _ in range(steps):
            books.decode(rows)
        found.append((books.spent_ns - before) / steps / 1000)
    return statistics.median(found)


def prefill_us(books: Books, *, samples: int = 25) -> tuple[float, float]:
    """Medians of taking the pages of 8,192 tokens, and of freeing them, among 100 other requests."""
    for length in np.random.default_rng(0).integers(400, 1200, 100).tolist():
        books.admit(length)
    takes, frees = [], []
    for _ in range(samples + 2):
        start = books.spent_ns
        row = books.admit(PREFILL_TOKENS)
        taken = books.spent_ns
        books.finish(row)
        takes.append((taken - start) / 1000)
        frees.append((books.spent_ns - taken) / 1000)
    return statistics.median(takes[2:]), statistics.median(frees[2:])


def churn_requests(count: int) -> list[tuple[int, int]]:
    """Prompt and output tokens, log-normal, of which the first `count` of 2,000."""
    draw = np.random.default_rng(1)
    prompts = np.clip(draw.lognormal(np.log(512), 1.0, 2000), 16, 8192).astype(int).tolist()
    outputs = np.clip(draw.lognormal(np.log(160), 0.8, 2000), 8, 1024).astype(int).tolist()
    return list(zip(prompts, outputs, strict=True))[:count]


def run_churn(books: Books, requests: Sequence[tuple[int, int]], *, prefill_budget: int = 8192) -> int:
    """Serve all requests, 256 at once, a step's prompts within a budget of tokens; how many tokens were generated."""
    waiting = list(reversed(requests))
    left: dict[int, int] = {}
    rows: IntArray = np.empty(0, np.int64)
    generated = 0
    while waiting or left:
        budget, admitted = prefill_budget, False
        while waiting and len(left) < REQUESTS:
            prompt, output = waiting[-1]
            if prompt > budget and budget < prefill_budget:
                break
            waiting.pop()
            budget -= prompt
            left[books.admit(prompt)] = output
            admitted = True
        if admitted:
            rows = np.fromiter(left, np.int64, len(left))
        books.decode(rows)
        generated += len(rows)
        finished = [row for row in left if left[row] == 1]
        for row in left:
            left[row] -= 1
        for row in finished:
            del left[row]
            books.finish(row)
        if finished:
            rows = np.fromiter(left, np.int64, len(left))
    return generated


def measure(
    books_of: Callable[[Shape, int], Books | None], page_sizes: Sequence[int], parts: Sequence[str]
) -> Iterator[Figure]:
    """Figures of `decode`, `prefill` and `churn`, whichever are in `parts`; `books_of` says `None` to what a system lacks."""
    for page_tokens in page_sizes:
        if "decode" in parts:
            yield from _decode_figures(books_of, page_tokens)
        if "prefill" in parts:
            yield from _prefill_figures(books_of, page_tokens)
        if "churn" in parts:
            yield from _churn_figures(books_of, page_tokens)


def _decode_figures(books_of: Callable[[Shape, int], Books | None], page_tokens: int) -> Iterator[Figure]:
    for shape in Shape:
        books = books_of(shape, page_tokens)
        if books is not None:
            rows = running_rows(books)
            settle()
            yield Figure(f"decode, {shape.value}", page_tokens, decode_us(books, rows))
    books = books_of(Shape.WINDOW, page_tokens)
    if books is not None:
        books.fragment()
        rows = running_rows(books)
        settle()
        # Fewer samples: what is left of the pools would not hold more tokens.
        yield Figure("decode, fragmented", page_tokens, decode_us(books, rows, samples=3))


def _prefill_figures(books_of: Callable[[Shape, int], Books | None], page_tokens: int) -> Iterator[Figure]:
    for where in ("", ", fragmented"):
        books = books_of(Shape.WINDOW, page_tokens)
        if books is None:
            return
        if where:
            books.fragment()
        settle()
        take, free = prefill_us(books)
        yield Figure(f"take of 8,192 tokens{where}", page_tokens, take)
        yield Figure(f"free of 8,192 tokens{where}", page_tokens, free)


def _churn_figures(books_of: Callable[[Shape, int], Books | None], page_tokens: int) -> Iterator[Figure]:
    warm_up = books_of(Shape.WINDOW, page_tokens)
    if warm_up is None:
        return
    run_churn(warm_up, churn_requests(200))
    del warm_up
    books = books_of(Shape.WINDOW, page_tokens)
    assert books is not None, "the same question has the same answer"
    settle()
    requests = churn_requests(2000)
    before = books.spent_ns, books.zeroed_bytes, books.moved_bytes
    generated = run_churn(books, requests)
    written = books.token_bytes * sum(prompt + output for prompt, output in requests)
    yield Figure("churn, a generated token", page_tokens, (books.spent_ns - before[0]) / generated / 1000)
    yield Figure("churn, zeroed / KV bytes", page_tokens, (books.zeroed_bytes - before[1]) / written)
    yield Figure("churn, moved / KV bytes", page_tokens, (books.moved_bytes - before[2]) / written)
