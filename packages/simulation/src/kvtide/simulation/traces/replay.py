"""Replaying: a trace's calls on an implementation, and where its answers or states first differ from the recorded ones.

An implementation takes part through a `TraceAdapter`. `ChainAdapter` is that of the allocator that ships; another, say an older
checkout's or one written in another language, is named on the command line as `module:factory`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvtide.chain import ChainAllocator, Taken
from kvtide.device import Event, NumpyDevice
from kvtide.ledger import ForwardSteps, NetworkTransfer
from kvtide.simulation.sizes import flushing_so_far
from kvtide.simulation.traces.recorder import state_of
from kvtide.simulation.traces.tables import (
    TableChanges,
    Tables,
    UnitDifference,
    tables_of,
    units_that_differ,
)
from kvtide.simulation.traces.trace_calls import (
    ERRORS,
    Names,
    encoded_answer,
    encoded_error,
    encoded_fault,
)
from kvtide.simulation.traces.trace_format import TraceHeader, TraceLine
from kvtide.simulation.traces.trace_schema import CALLS, TraceError


class TraceAdapter(Protocol):
    """An implementation that traces can be replayed on."""

    def perform(self, call: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """Make one call of `CALLS`, with arguments as the trace has them; its answer as a trace would have it."""

    def state(self) -> dict[str, Any]:
        """The state as a trace would have it; what is left out is not compared.

        An implementation may also have `tables()`: band → physical unit of every virtual one, as arrays. Where states differ, it
        is by them that units are named.
        """


UNITS_NAMED = 4
"""Of those that two lives bind otherwise."""

AdapterFactory: TypeAlias = Callable[[TraceHeader], TraceAdapter]
"""Makes a new implementation with empty bands."""


class ChainAdapter:
    """The allocator that ships, over a device without bytes whose work is over at once: no decision follows the device."""

    def __init__(self, header: TraceHeader) -> None:
        """Empty bands over the header's layout."""
        layout = header.layout
        self._device = NumpyDevice(layout.arena_bytes, byte_work=False)
        lengths = {f"ids:{band.name}": layout.id_count(band) for band in layout.bands}
        self._chain = ChainAllocator(
            layout,
            self._device,
            self._device.create_mirrors(lengths),
            ForwardSteps(),
            wait_for_transfers=self._wait if header.waits_for_transfers else None,
        )
        self._targets = {"chain": self._chain, "uses": self._chain.uses, "steps": self._chain.steps}
        self._flush_reach = header.flush_reach
        self._names = Names()
        self._waited: list[str] = []

    def perform(self, call: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """See `TraceAdapter.perform`; raises `TraceError` for a call that no trace holds, and what is no answer of an allocator."""
        if call not in CALLS:
            raise TraceError(f"no call {call!r}; a trace holds {list(CALLS)}")
        target, _, name = call.partition(".")
        named = {
            parameter: self._names.decoded(kind, args[parameter], self._record_event)
            for parameter, kind in CALLS[call].items()
        }
        self._waited = []
        # Positions, since some parameters are positional in one version and named in another; a take's are named.
        function = getattr(self._targets[target], name)
        try:
            with flushing_so_far(self._flush_reach):
                result = function(**named) if call == "chain.take" else function(*named.values())
        except ERRORS as error:
            answer = encoded_error(error)
        else:
            answer = encoded_answer(result, len(self._names.takes))
            if isinstance(result, Taken):
                self._names.takes.append(result)
        return {**answer, "waited": self._waited} if self._waited else answer

    def state(self) -> dict[str, Any]:
        """See `TraceAdapter.state`."""
        return state_of(self._chain)

    def tables(self) -> Tables:
        """See `TraceAdapter.state`."""
        return tables_of(self._chain)

    def _record_event(self) -> Event:
        return self._device.record_event(self._device.forward_stream)

    def _wait(self, transfers: Sequence[NetworkTransfer]) -> None:
        for transfer in transfers:
            self._chain.uses.end(transfer)
            self._waited.append(transfer.name)


class Divergence(NamedTuple):
    """Where two lives of one trace first differ."""

    place: int
    """Of the call, from 0."""

    what: str
    """`call`, `answer` or `state`, or `length` where one ends before the other."""

    first: Any
    """What the first has there, or `None` where it has ended."""

    second: Any
    """What the second has."""

    units: tuple[UnitDifference, ...] = ()
    """Where both tell what they bind: the first units that they bind otherwise."""


def replayed(
    header: TraceHeader, lines: Sequence[TraceLine], adapter: AdapterFactory = ChainAdapter
) -> Iterator[TraceLine]:
    """The same calls on an implementation, with its own answers and states.

    Whatever it raises is its answer to that call, and the last: nobody knows what it has done by then.
    """
    told = 0
    try:
        for found in _lived(lines, adapter(header)):
            yield found
            told += 1
    except Exception as error:
        if told == len(lines):
            raise
        yield TraceLine(lines[told].call, lines[told].args, encoded_fault(error), {})


def _lived(lines: Sequence[TraceLine], implementation: TraceAdapter) -> Iterator[TraceLine]:
    tables: Callable[[], Tables] | None = getattr(implementation, "tables", None)
    changes = None if tables is None else TableChanges(tables())
    for line in lines:
        answer = implementation.perform(line.call, line.args)
        rebound = {} if tables is None or changes is None else changes.since_last(tables())
        yield TraceLine(line.call, line.args, answer, implementation.state(), rebound)


def replay(
    header: TraceHeader, lines: Sequence[TraceLine], adapter: AdapterFactory = ChainAdapter
) -> Divergence | None:
    """Replay until an answer or a state differs from the recorded one; `None` when none does."""
    found: list[TraceLine] = []
    for line, own in zip(lines, replayed(header, lines, adapter), strict=False):
        found.append(own)
        if differs(line, own):
            break
    return first_divergence(lines[: len(found)], found)


def first_divergence(first: Sequence[TraceLine], second: Sequence[TraceLine]) -> Divergence | None:
    """Where two traces first differ in a call, its answer, or the state behind it."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if (one.call, one.args) != (other.call, other.args):
            return Divergence(place, "call", [one.call, one.args], [other.call, other.args])
        if one.answer != other.answer:
            return Divergence(place, "answer", one.answer, other.answer)
        if differs(one, other):
            units = units_that_differ(first[: place + 1], second[: place + 1])
            return Divergence(place, "state", one.state, other.state, tuple(islice(units, UNITS_NAMED)))
    if len(first) != len(second):
        place = min(len(first), len(second))
        one_end, other_end = (lines[place].call if place < len(lines) else None for lines in (first, second))
        return Divergence(place, "length", one_end, other_end)
    return None


def differs(one: TraceLine, other: TraceLine) -> bool:
    """Whether a call is answered otherwise, or leaves another state."""
    # An implementation may know less of itself than the allocator that ships.
    known = one.state.keys() & other.state.keys()
    return one.answer != other.answer or any(one.state[key] != other.state[key] for key in known)


def adapter_named(name: str) -> AdapterFactory:
    """The factory that `module:factory` names; raises `TraceError` where there is none."""
    module, _, attribute = name.partition(":")
    try:
        factory: AdapterFactory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise TraceError(f"no adapter {name!r}, which should be module:factory: {error}") from error
    return factory
