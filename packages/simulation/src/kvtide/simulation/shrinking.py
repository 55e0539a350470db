"""From a failing run to a minimal one: fewer actions, then smaller numbers, then a simpler scenario, until nothing helps.

Every step is a whole run, kept when the same check fails in it for the same cause. Actions mean something in any state, so any part of a sequence
can be run; halves go first, then quarters, down to single actions (delta debugging).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from kvtide.plan import PlanError
from kvtide.simulation.actions import Action, Operation
from kvtide.simulation.run import Run, run_actions
from kvtide.simulation.scenario import Scenario

MOST_TRIES = 3_000
"""Runs that one shrink may cost."""


class _Shrink:
    """The best failing run so far."""

    def __init__(self, run: Run, operations: Mapping[str, Operation], most_tries: int) -> None:
        assert run.failure is not None, "only a failing run is shrunk"
        self.best = run
        self.tries_left = most_tries
        self._failure = run.failure
        self._operations = operations

    def is_kept(self, scenario: Scenario, actions: Sequence[Action]) -> bool:
        """Whether it fails alike in this run, which then is the best; false once no try is left."""
        if self.tries_left <= 0:
            return False
        self.tries_left -= 1
        try:
            run = run_actions(scenario, actions, self._operations)
        except PlanError:
            return False
        if run.failure is None or not run.failure.is_like(self._failure):
            return False
        self.best = run
        return True

    def drop_actions(self) -> bool:
        """Take out runs of actions, from halves down to single ones; whether any went."""
        before = len(self.best.actions)
        size = max(1, before // 2)
        while True:
            start = 0
            while start < len(self.best.actions):
                actions = self.best.actions
                if not self.is_kept(self.best.scenario, actions[:start] + actions[start + size :]):
                    start += size
            if size == 1:
                return len(self.best.actions) < before
            size //= 2

    def shrink_numbers(self) -> bool:
        """Make numbers smaller, one at a time; whether any became so."""
        has_shrunk = False
        place = 0
        while place < len(self.best.actions):
            for name in list(self.best.actions[place].numbers):
                while any(self._is_kept_with(place, name, value) for value in self._smaller(place, name)):
                    has_shrunk = True
                    if place >= len(self.best.actions):
                        return True
            place += 1
        return has_shrunk

    def simplify_scenario(self) -> bool:
        """Take the first simpler scenario in which it still fails; whether there was one."""
        return any(
            self.is_kept(scenario, self.best.actions) for scenario in list(self.best.scenario.simpler())
        )

    def _smaller(self, place: int, name: str) -> Iterator[int]:
        value = self.best.actions[place].numbers[name]
        tried = {value}
        for smaller in (0, 1, value // 2, value & (value - 1), value - 1):
            if 0 <= smaller < value and smaller not in tried:
                tried.add(smaller)
                yield smaller

    def _is_kept_with(self, place: int, name: str, value: int) -> bool:
        actions = list(self.best.actions)
        actions[place] = attrs.evolve(actions[place], numbers={**actions[place].numbers, name: value})
        return self.is_kept(self.best.scenario, actions)


def shrink(run: Run, operations: Mapping[str, Operation], *, most_tries: int = MOST_TRIES) -> Run:
    """A run that fails alike, with no action, number or band left that it does without, tries permitting."""
    state = _Shrink(run, operations, most_tries)
    helps = True
    while helps:
        helps = state.drop_actions()
        helps |= state.simplify_scenario()
        if not helps:
            helps = state.shrink_numbers()
    return state.best
