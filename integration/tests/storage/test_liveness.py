"""Whoever is admitted finishes, and nothing waits while nothing will free: every order in small scopes (K5)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from kvtide.chain import Taken
from kvtide.sizing import ServingPolicy
from kvtide.storage import AdmissionRefusal, KVStorage, PreparedStep

from .liveness import (
    Lengths,
    Path,
    Rule,
    Scope,
    State,
    Verdict,
    explore,
    guaranteed,
    held,
    peak,
    steps,
    units_of,
)
from .tiny import tiny_plan, tiny_storage

KINDS = {
    "full": Scope(units=0, requests=(), chunk=2),
    "full and state": Scope(units=0, requests=(), chunk=2, has_state=True),
    "window and full": Scope(units=0, requests=(), chunk=3, window=2),
    "window, full and state": Scope(units=0, requests=(), chunk=2, window=2, has_state=True),
}
LENGTHS = [Lengths(1, 2), Lengths(3, 1), Lengths(2, 2)]
"""Their requests: short and long prompts, with and without decoding."""


def scopes(kind: str, in_flight: int) -> Iterator[Scope]:
    """Pools of 3 to 6 units, one in which a request would fit beside another in shorter chunks only, and one in which it fits beside
    withheld units in those only; every three requests.
    """
    base = KINDS[kind]
    sizes = [(3, 0), (4, 0), (5, 0), (6, 0), (8, 3)] + ([(9, 0)] if base.window else [])
    for units, withheld in sizes:
        for requests in itertools.combinations_with_replacement(LENGTHS, 3):
            yield Scope(
                units=units,
                requests=requests,
                chunk=base.chunk,
                window=base.window,
                has_state=base.has_state,
                withheld=withheld,
                in_flight=in_flight,
                rows=2 if units == 6 else 3,
            )


@pytest.mark.requirement("K5")
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_in_guaranteed_mode_no_take_is_refused_and_no_request_waits_for_ever(
    kind: str, in_flight: int
) -> None:
    """A model of the rule, before any storage: all arrival orders, all interleavings, early ends among them."""
    states = 0
    for scope in scopes(kind, in_flight):
        paths, faults = explore(scope, guaranteed)
        assert not faults, f"{scope}: {faults[0]}"
        states += len(paths)
    assert states > 1000


def by_free_units(scope: Scope, state: State, request: Lengths) -> int | Verdict:
    """Admit whoever fits beside what is held now."""
    if not state.running or units_of(scope, state) + sum(peak(scope, request, scope.chunk)) <= scope.units:
        return scope.chunk if len(state.running) < scope.rows else Verdict.WAIT
    return Verdict.WAIT


def by_longest_chunks(scope: Scope, state: State, request: Lengths) -> int | Verdict:
    """Never admit with shorter chunks."""
    verdict = guaranteed(scope, state, request)
    return Verdict.WAIT if verdict != scope.chunk and verdict is not Verdict.TURNED_AWAY else verdict


@pytest.mark.requirement("K5")
@pytest.mark.parametrize(
    ("rule", "fault"), [(by_free_units, "a take found no unit"), (by_longest_chunks, "somebody waits")]
)
def test_the_model_finds_what_weaker_rules_do(rule: Rule, fault: str) -> None:
    """Each is what some engine does: ask what is free now, or never shorten a chunk."""
    found = [text for scope in scopes("window and full", 1) for text in explore(scope, rule)[1]]
    assert any(text.startswith(fault) for text in found)


class Driven:
    """A real storage of a scope's size, driven step by step beside the model."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.storage: KVStorage = tiny_storage(
            tiny_plan(window=scope.window, state=scope.has_state),
            scope.units,
            rows=scope.rows,
            chunk_tokens=scope.chunk,
            policy=ServingPolicy(overlap=scope.in_flight > 1),
        )
        if scope.withheld:
            taken = self.storage.chain.take(pages=scope.withheld)
            assert isinstance(taken, Taken)
            self.storage.chain.uses.fix("a failed transfer", {"full": taken.pages})
            if scope.window:
                self.storage.chain.free_pages(f"window-{scope.window}", taken.pages)
            self.storage.chain.free_pages("full", taken.pages)
        self.rows: dict[int, int] = {}
        self.flying: list[PreparedStep] = []

    def verdict(self, index: int) -> int | Verdict:
        """What the storage says to a request; admitted, it has its row."""
        request = self.scope.requests[index]
        arrived = self.storage.arrival_refusal(request.prompt, request.output)
        rows = self.storage.admit([request.prompt], [request.output])
        if isinstance(rows, AdmissionRefusal):
            assert rows.is_final or arrived is None, "what waits fits alone"
            assert not rows.is_final or arrived is not None or self.scope.withheld, "what fits alone waits"
            return Verdict.TURNED_AWAY if rows.is_final else Verdict.WAIT
        self.rows[index] = int(rows[0])
        return int(self.storage.requests.chunk_limits[rows[0]])

    def run(self, path: Path) -> None:
        for step in path:
            match step.what:
                case "admit":
                    assert self.verdict(step.request) == step.tokens
                case "turn away":
                    assert self.verdict(step.request) is Verdict.TURNED_AWAY
                case "launch":
                    prepared = self.storage.prepare_step([self.rows[step.request]], [step.tokens])
                    assert isinstance(prepared, PreparedStep), f"{prepared}"
                    self.storage.launch_forward(prepared)
                    self.storage.record_forward(prepared)
                    self.flying.append(prepared)
                case "process" | "process and end":
                    prepared = self.flying.pop(0)
                    self.storage.forward_processed(prepared)
                    self.storage.advance(prepared)
                    if step.what == "process and end":
                        self.storage.release([self.rows.pop(step.request)])

    def check(self, state: State) -> None:
        """The storage holds what the model holds, and says to the next in the queue what the model says."""
        units = np.zeros(len(self.storage.layout.bands), np.int64)
        for _, row in state.running:
            units += held(self.scope, row.written, row.flying)
        assert list(self.storage.resident_now().values()) == units.tolist()
        if state.queue:
            expected = guaranteed(self.scope, state, self.scope.requests[state.queue[0]])
            assert self.verdict(state.queue[0]) == expected


@pytest.mark.requirement("K5", "C5")
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_storage_does_what_the_model_does(kind: str, in_flight: int) -> None:
    """Real prices, real layouts, real takes, moves among them: in a dozen states of each scope, spread over them, the storage holds what
    the model holds, says the same to whoever is next, chunk limit included, and refuses no launch that the model makes.
    """
    tried = 0
    for scope in scopes(kind, in_flight):
        if len(set(scope.requests)) < 2:
            continue
        paths, _ = explore(scope, guaranteed)
        for state, path in sorted(paths.items(), key=lambda entry: entry[1])[:: 1 + len(paths) // 12]:
            driven = Driven(scope)
            driven.run(path)
            for step, _ in steps(scope, guaranteed, state):
                if step.what == "launch":
                    again = Driven(scope)
                    again.run((*path, step))
            driven.check(state)
            tried += 1
    assert tried > 50
