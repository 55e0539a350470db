"""One request, lived token by token in every way a scheduler may choose: the dumbest model of what it holds.

Nothing here is arithmetic over runs: tokens are held because some query may still read them, and pages because of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

Reads = Callable[[int, int], bool]
"""Whether the query at the first position reads the token at the second."""

HORIZON = 40
"""Queries further ahead than this read none of the tokens that matter."""


@attrs.frozen(kw_only=True)
class Request:
    """What is asked."""

    prompt: int
    output: int
    chunk: int
    page: int
    begin: int = 0
    credited: int = 0
    grid: int | None = None
    draft: int = 0
    overlap: bool = False
    activations: bool = False


@attrs.frozen
class Forward:
    """One launched forward: where its tokens begin at most, how many it writes, and how many of them may stay."""

    start: int
    written: int
    kept: range
    is_chunk: bool


@attrs.frozen
class State:
    """Tokens processed, and forwards that are launched and not processed."""

    processed: int
    in_flight: tuple[Forward, ...] = ()


def full(query: int, token: int) -> bool:
    return token <= query


def window(tokens: int) -> Reads:
    return lambda query, token: query - tokens < token <= query


def chunks(tokens: int) -> Reads:
    return lambda query, token: token <= query and token // tokens == query // tokens


def launches(request: Request, state: State) -> Iterator[Forward]:
    """Every forward that a scheduler may launch next."""
    if len(state.in_flight) > (1 if request.overlap else 0):
        return
    end = state.processed + sum(forward.written for forward in state.in_flight)
    certain = state.processed + sum(forward.kept.start for forward in state.in_flight)
    if end < request.prompt:
        for count in range(1, min(request.chunk, request.prompt - end) + 1):
            is_last = end + count == request.prompt
            if request.grid is None or is_last or (end + count) % request.grid == 0:
                yield Forward(end, count, range(count, count + 1), True)
    elif certain < request.prompt + request.output - 1:
        yield Forward(end, 1 + request.draft, range(1, 2 + request.draft), False)


def results(request: Request, state: State) -> Iterator[State]:
    """Every way in which the oldest forward in flight may end."""
    oldest, *others = state.in_flight
    for count in oldest.kept:
        if state.processed + count <= request.prompt + request.output - 1:
            yield State(state.processed + count, tuple(others))


def first_query(request: Request, length: int) -> int:
    """The first position from which something may go on: the next token, or a hit on the latest checkpoint."""
    return length if request.grid is None else length - length % request.grid


def needed(reads: Reads, first: int, token: int) -> bool:
    return any(reads(query, token) for query in range(first, first + HORIZON))


def held_pages(request: Request, state: State, reads: Reads) -> int:
    """Pages that the request's own row holds while its newest forward runs."""
    first = first_query(request, state.processed)
    tokens = {token for token in range(state.processed) if needed(reads, first, token)}
    for forward in state.in_flight:
        end = forward.start + forward.written
        written = set(range(forward.start, end))
        if request.activations and forward.is_chunk and reads is not full:
            written = {token for token in written if needed(reads, first_query(request, end), token)}
        tokens |= written
    pages = {token // request.page for token in tokens if token >= request.credited}
    # A page that is begun is held for the tokens that fill it, needed or not those before them are.
    ends = [state.processed, *(forward.start + forward.written for forward in state.in_flight)]
    pages |= {end // request.page for end in ends if end % request.page and end > request.credited}
    return len(pages)


def every_state(request: Request) -> Iterator[tuple[State, list[State]]]:
    """Every state that some life passes through, with those that may follow it."""
    waiting, seen = [State(request.begin)], {State(request.begin)}
    while waiting:
        state = waiting.pop()
        following = [
            attrs.evolve(state, in_flight=(*state.in_flight, forward)) for forward in launches(request, state)
        ]
        if state.in_flight:
            following += results(request, state)
        yield state, following
        waiting += [one for one in following if one not in seen]
        seen.update(following)


def most_pages(request: Request, reads: Reads) -> int:
    """The most pages that any life holds."""
    return max(held_pages(request, state, reads) for state, _ in every_state(request))


def most_slots(request: Request, running: int, handing_over: int, *, on_grid: bool) -> int:
    """The most state slots that any life holds: `running` all along, `handing_over` while the tree takes a state."""
    most = running
    for state, following in every_state(request):
        verifies = any(not forward.is_chunk for forward in state.in_flight) and request.draft
        most = max(most, running + (1 + request.draft if verifies else 0))
        for after in following:
            if after.processed == state.processed:
                continue
            if on_grid and request.grid is not None:
                hands_over = after.processed // request.grid > state.processed // request.grid
            else:
                hands_over = after.processed < request.prompt + request.output - 1
            if hands_over:
                # The states of a verify forward are there until one of them has been taken.
                most = max(most, handing_over + (1 + request.draft if verifies else 0))
    return most
