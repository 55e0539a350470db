"""Replaying: a trace's calls on an implementation, and where its answers or states first differ from the recorded ones.

An implementation takes part through a `TraceAdapter`. `ChainAdapter` is that of the allocator that ships; another, say an older
checkout's or one written in another language, is named on the command line as `module:factory`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvtide.chain import ChainAllocator, Taken
from kvtide.device import Event, NumpyDevice
from kvtide.ledger import ForwardSteps, NetworkTransfer
from kvtide.simulation.traces.recorder import state_of
from kvtide.simulation.traces.trace_calls import CALLS, ERRORS, Names, encoded_answer, encoded_error
from kvtide.simulation.traces.trace_format import TraceError, TraceHeader, TraceLine


class TraceAdapter(Protocol):
    """An implementation that traces can be replayed on."""

    def perform(self, call: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """Make one call of `CALLS`, with arguments as the trace has them; its answer as a trace would have it."""

    def state(self) -> dict[str, Any]:
        """The state as a trace would have it; what is left out is not compared."""


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
        self._names = Names()
        self._waited: list[str] = []

    def perform(self, call: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """See `TraceAdapter.perform`; raises `TraceError` for a call that no trace holds."""
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


def replayed(
    header: TraceHeader, lines: Sequence[TraceLine], adapter: AdapterFactory = ChainAdapter
) -> Iterator[TraceLine]:
    """The same calls on an implementation, with its own answers and states."""
    implementation = adapter(header)
    for line in lines:
        answer = implementation.perform(line.call, line.args)
        yield TraceLine(line.call, line.args, answer, implementation.state())


def replay(
    header: TraceHeader, lines: Sequence[TraceLine], adapter: AdapterFactory = ChainAdapter
) -> Divergence | None:
    """Replay until an answer or a state differs from the recorded one; `None` when none does."""
    found = replayed(header, lines, adapter)
    for place, (recorded, own) in enumerate(zip(lines, found, strict=True)):
        difference = _difference(place, recorded, own)
        if difference is not None:
            return difference
    return None


def first_divergence(first: Sequence[TraceLine], second: Sequence[TraceLine]) -> Divergence | None:
    """Where two traces first differ in a call, its answer, or the state behind it."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if (one.call, one.args) != (other.call, other.args):
            return Divergence(place, "call", [one.call, one.args], [other.call, other.args])
        difference = _difference(place, one, other)
        if difference is not None:
            return difference
    if len(first) != len(second):
        place = min(len(first), len(second))
        ends = [lines[place].call if place < len(lines) else None for lines in (first, second)]
        return Divergence(place, "length", *ends)
    return None


def adapter_named(name: str) -> AdapterFactory:
    """The factory that `module:factory` names; raises `TraceError` where there is none."""
    module, _, attribute = name.partition(":")
    try:
        factory: AdapterFactory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise TraceError(f"no adapter {name!r}, which should be module:factory: {error}") from error
    return factory


def _difference(place: int, one: TraceLine, other: TraceLine) -> Divergence | None:
    if one.answer != other.answer:
        return Divergence(place, "answer", one.answer, other.answer)
    # An implementation may know less of itself than the allocator that ships.
    if any(one.state[key] != other.state[key] for key in one.state.keys() & other.state.keys()):
        return Divergence(place, "state", one.state, other.state)
    return None
