"""Thresholds of the code under test, made small for the length of a run.

Arenas here hold tens to a few hundred units. What serves arenas of millions, blocks of holes, lists that are looked at as runs, arrays
that are made anew, begins at hundreds of them, and no run would ever come there. So in some scenarios those thresholds are few units.
All but one bear on what things cost, and change no decision: a run is the same with them and without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from types import MappingProxyType

from kvtide.simulation.scenario import Scenario

SMALL: Mapping[str, int] = MappingProxyType(
    {
        "kvtide.chain.hole_set._BLOCK_PAGES": 4,
        "kvtide.chain.hole_set._FIRST_BLOCKS": 1,
        "kvtide.chain.hole_set._RESERVE_PAGES": 6,
        "kvtide.chain.id_space._FIRST_PIECE": 2,
        "kvtide.chain.units._WORTH_A_LOOK": 2,
        "kvtide.ledger.clearing._FEW": 2,
        "kvtide.ledger.fenced_bytes._FEW": 0,
        "kvtide.ledger.signal_uses._FEW": 1,
        "kvtide.ledger.signal_uses._FIRST_USES": 1,
        "kvtide.ledger.use_index._FIRST_NODES": 2,
        "kvtide.ledger.vacated_pages._FEW": 0,
    }
)
"""Module and constant → what it is where thresholds are small."""

_FLUSH_REACH = "kvtide.chain.relief.FLUSH_REACH"


def sized_for(scenario: Scenario) -> AbstractContextManager[None]:
    """Within it, thresholds are what the scenario says, in this process; everything is made and used within it."""
    return _set({_FLUSH_REACH: scenario.flush_reach, **(SMALL if scenario.small_thresholds else {})})


def flushing_so_far(flush_reach: int) -> AbstractContextManager[None]:
    """Within it, flushes retreat so many times as far as a take needs: the one size here that decisions follow."""
    return _set({_FLUSH_REACH: flush_reach})


@contextmanager
def _set(values: Mapping[str, int]) -> Iterator[None]:
    before = {}
    for path, value in values.items():
        module, _, name = path.rpartition(".")
        before[path] = getattr(import_module(module), name)
        setattr(import_module(module), name, value)
    try:
        yield
    finally:
        for path, value in before.items():
            module, _, name = path.rpartition(".")
            setattr(import_module(module), name, value)
