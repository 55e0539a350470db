"""Admission, reduced to what its liveness depends on: requests that take and give back units of one pool, in every order.

The pool has so many units, which any band may take; pages hold one token. A request of `prompt` and `output` tokens writes
`prompt + output − 1`, first in chunks, then one by one; it holds a unit of full attention a token, a window's units of the last
`window − 1` tokens it has processed and of all those in flight, and a state. Nothing here knows the storage, its prices or its
layouts: a peak is found by trying every way to serve a request.

`explore` walks every order of arrivals, admissions, launches of every length, processing and early ends, and reports what must
not be: a take that finds no unit, and a moment at which somebody waits and nothing can happen any more.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import attrs


class Lengths(NamedTuple):
    """A request."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output - 1


@attrs.frozen
class Scope:
    """What is explored."""

    units: int
    """Of the pool."""
    requests: tuple[Lengths, ...]
    chunk: int
    window: int | None = None
    has_state: bool = False
    withheld: int = 0
    """Of the units, those that a failed transfer may touch for ever: nobody gets them, and nothing is known to give them back."""
    in_flight: int = 1
    """Forwards at once: 2 with overlap."""
    rows: int = 3


class Row(NamedTuple):
    """A running request."""

    written: int
    """Tokens processed."""
    flying: int
    """Tokens in flight."""
    limit: int
    """Most tokens of a chunk."""
    promised: tuple[int, ...]


class State(NamedTuple):
    """Everything at one moment."""

    away: frozenset[int]
    """Requests that have not arrived."""
    queue: tuple[int, ...]
    running: tuple[tuple[int, Row], ...]
    """Ascending."""
    flights: tuple[tuple[int, int], ...]
    """Request and tokens of each forward in flight, the oldest first; one whose request is over has −1."""


class Verdict(enum.Enum):
    WAIT = "wait"
    TURNED_AWAY = "turned away"


Rule = Callable[[Scope, State, Lengths], "int | Verdict"]
"""The chunk limit that a request is admitted with, or what becomes of it."""


def held(scope: Scope, written: int, flying: int) -> tuple[int, ...]:
    """Units by band, in chain order: state, window, full."""
    units = [1] if scope.has_state else []
    if scope.window is not None:
        units.append(min(written, scope.window - 1) + flying)
    return (*units, written + flying)


@cache
def peak(scope: Scope, request: Lengths, limit: int) -> tuple[int, ...]:
    """The most units of each band over every way to serve a request in chunks of at most `limit`."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    most = [0] * len(held(scope, 0, 0))

    def walk(written: int, flights: tuple[int, ...]) -> None:
        if (written, flights) in seen:
            return
        seen.add((written, flights))
        for place, units in enumerate(held(scope, written, sum(flights))):
            most[place] = max(most[place], units)
        if flights:
            walk(written + flights[0], flights[1:])
        if len(flights) < scope.in_flight:
            for count in counts(request, written + sum(flights), limit):
                walk(written, (*flights, count))

    walk(0, ())
    return tuple(most)


def counts(request: Lengths, prepared: int, limit: int) -> range:
    """How many tokens a forward may write."""
    if prepared >= request.total:
        return range(0)
    return range(1, 1 + (min(limit, request.prompt - prepared) if prepared < request.prompt else 1))


def units_of(scope: Scope, state: State) -> int:
    """Units in use."""
    return sum(sum(held(scope, row.written, row.flying)) for _, row in state.running)


def outstanding(scope: Scope, state: State) -> int:
    """Units promised and not held."""
    return sum(
        max(0, promised - units)
        for _, row in state.running
        for promised, units in zip(row.promised, held(scope, row.written, row.flying), strict=True)
    )


def guaranteed(scope: Scope, state: State, request: Lengths) -> int | Verdict:
    """The rule as the requirement states it."""
    taken = scope.withheld + units_of(scope, state) + outstanding(scope, state)
    alone = [limit for limit in range(1, scope.chunk + 1) if sum(peak(scope, request, limit)) <= scope.units]
    now = [limit for limit in alone if taken + sum(peak(scope, request, limit)) <= scope.units]
    if not alone:
        return Verdict.TURNED_AWAY
    if len(state.running) < scope.rows and alone[-1] in now:
        return alone[-1]
    if state.running or state.flights:
        return Verdict.WAIT
    return now[-1] if now else Verdict.TURNED_AWAY


class Step(NamedTuple):
    """One thing that happens."""

    what: str
    request: int = -1
    tokens: int = 0


def steps(scope: Scope, rule: Rule, state: State) -> Iterator[tuple[Step, State | str]]:
    """Everything that can happen next, and the state behind it, or what went wrong."""
    for index in sorted(state.away):
        yield Step("arrive", index), state._replace(away=state.away - {index}, queue=(*state.queue, index))
    if state.queue:
        index, *rest = state.queue
        verdict = rule(scope, state, scope.requests[index])
        if verdict is Verdict.TURNED_AWAY:
            yield Step("turn away", index), state._replace(queue=tuple(rest))
        elif not isinstance(verdict, Verdict):
            row = Row(0, 0, verdict, peak(scope, scope.requests[index], verdict))
            yield (
                Step("admit", index, verdict),
                _checked(
                    scope,
                    state._replace(queue=tuple(rest), running=tuple(sorted((*state.running, (index, row))))),
                ),
            )
    if len(state.flights) < scope.in_flight:
        for index, row in state.running:
            for count in counts(scope.requests[index], row.written + row.flying, row.limit):
                flown = row._replace(flying=row.flying + count)
                after = _with(state, index, flown)._replace(flights=(*state.flights, (index, count)))
                yield Step("launch", index, count), _checked(scope, after)
    if state.flights:
        (index, count), *later = state.flights
        landed = state._replace(flights=tuple(later))
        if index < 0:
            yield Step("process"), landed
            return
        row = dict(state.running)[index]
        row = row._replace(written=row.written + count, flying=row.flying - count)
        if row.written < scope.requests[index].total:
            yield Step("process", index), _with(landed, index, row)
        if row.written >= scope.requests[index].prompt:
            yield Step("process and end", index), _ended(landed, index)


def _checked(scope: Scope, state: State) -> State | str:
    if scope.withheld + units_of(scope, state) > scope.units:
        return f"a take found no unit: {state}"
    return state


def _with(state: State, index: int, row: Row) -> State:
    return state._replace(
        running=tuple((other, row if other == index else old) for other, old in state.running)
    )


def _ended(state: State, index: int) -> State:
    """The request is over; what is in flight of it runs to its end, for nothing."""
    return state._replace(
        running=tuple(entry for entry in state.running if entry[0] != index),
        flights=tuple((-1 if other == index else other, count) for other, count in state.flights),
    )


Path = tuple[Step, ...]


def explore(scope: Scope, rule: Rule) -> tuple[dict[State, Path], list[str]]:
    """Every state that can be reached, with one way there, and everything that went wrong."""
    start = State(frozenset(range(len(scope.requests))), (), (), ())
    paths: dict[State, Path] = {start: ()}
    faults: list[str] = []
    todo = [start]
    while todo:
        state = todo.pop()
        happened = False
        for step, after in steps(scope, rule, state):
            happened = True
            if isinstance(after, str):
                faults.append(after)
            elif after not in paths:
                paths[after] = (*paths[state], step)
                todo.append(after)
        if not happened and (state.queue or state.running):
            faults.append(f"somebody waits and nothing will free anything: {state}")
    return paths, faults
