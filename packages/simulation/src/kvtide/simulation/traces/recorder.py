"""Recording: what is called on an allocator, its uses and its forwards goes into a trace, call by call.

Whoever drives an allocator is handed stand-ins for it and for its `ForwardSteps`; they pass everything on, and write what a trace
holds. Calls that the allocator makes itself are its own affair: of a relief that waits for transfers the trace says which.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from kvtide.chain import ChainAllocator, Taken
from kvtide.ledger import ForwardSteps
from kvtide.simulation.traces.tables import TableChanges, tables_of
from kvtide.simulation.traces.trace_calls import ERRORS, Names, encoded_answer, encoded_error
from kvtide.simulation.traces.trace_format import TraceHeader, TraceLine, TraceWriter
from kvtide.simulation.traces.trace_schema import CALLS, TraceError


class TraceRecorder:
    """Writes the life of one allocator, from its first call on."""

    def __init__(self, out: TextIO, header: TraceHeader, chain: ChainAllocator) -> None:
        """`chain` must be new: a trace begins with empty bands."""
        self._writer = TraceWriter(out, header)
        self._names = Names()
        self._chain = chain
        self._changes = TableChanges(tables_of(chain))
        self._depth = 0
        self._waited: list[str] = []
        self.steps: Any = _Recorded(self, "steps", chain.steps)
        """Stands in for the `ForwardSteps`."""
        uses = _Recorded(self, "uses", chain.uses)
        self.chain: Any = _Recorded(self, "chain", chain, uses=uses, steps=self.steps)
        """Stands in for the allocator."""

    @property
    def line_count(self) -> int:
        """Calls written so far."""
        return self._writer.line_count

    def call(self, name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call, and write what came of it. Raises what the call raises, and `TraceError` for one that no trace can hold."""
        if self._depth:
            if name == "uses.end":
                self._waited.append(self._names.encoded("owner", args[0]))
            return function(*args, **named)
        arguments, refusal = self._arguments(name, function, args, named)
        self._depth += 1
        self._waited = []
        try:
            result = function(*args, **named)
        except ERRORS as error:
            if refusal is None:
                self._write(name, arguments, encoded_error(error))
            # What a trace cannot hold and the allocator refuses has changed nothing: it is left out.
            raise
        finally:
            self._depth -= 1
        if refusal is not None:
            raise refusal
        self._write(name, arguments, encoded_answer(result, len(self._names.takes)))
        if isinstance(result, Taken):
            self._names.takes.append(result)
        return result

    def _arguments(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[dict[str, Any], TraceError | None]:
        bound = inspect.signature(function).bind(*args, **named)
        bound.apply_defaults()
        if name in ("steps.forward_recorded", "steps.completion_recorded"):
            record, event = bound.args
            whose = "forward" if name == "steps.forward_recorded" else "completion"
            self._names.event_name(event, f"{whose} {record.forward}")
        try:
            return {
                parameter: self._names.encoded(kind, bound.arguments[parameter])
                for parameter, kind in CALLS[name].items()
            }, None
        except TraceError as error:
            return {}, error

    def _write(self, name: str, arguments: dict[str, Any], answer: dict[str, Any]) -> None:
        if self._waited:
            answer = {**answer, "waited": self._waited}
        rebound = self._changes.since_last(tables_of(self._chain))
        self._writer.write(TraceLine(name, arguments, answer, state_of(self._chain), rebound))


class _Recorded:
    """Stands in for an object of which some calls are recorded."""

    def __init__(self, recorder: TraceRecorder, prefix: str, target: object, **parts: object) -> None:
        self._recorder, self._prefix, self._target, self._parts = recorder, prefix, target, parts

    def __getattr__(self, name: str) -> Any:
        if name in self._parts:
            return self._parts[name]
        value = getattr(self._target, name)
        call = f"{self._prefix}.{name}"
        return partial(self._recorder.call, call, value) if call in CALLS else value


def state_of(chain: ChainAllocator) -> dict[str, Any]:
    """An allocator's state as a trace tells it: figures by band, and a digest of every id table.

    By band: first and end page of the span, then units that are live, holes, pending, vacated, withheld, and moved since the start.
    """
    figures = {}
    digest = hashlib.blake2b(digest_size=8)
    for band in chain.statistics().bands:
        span = chain.span(band.name)
        figures[band.name] = [
            span.first_page,
            span.end_page,
            band.live_units,
            band.hole_units,
            band.pending_units,
            band.vacated_units,
            band.withheld_units,
            band.moved_units,
        ]
    for table in tables_of(chain).values():
        digest.update(table.astype("<i8").tobytes())
    steps: ForwardSteps = chain.steps
    return {"bands": figures, "retired": steps.retired_through, "tables": digest.hexdigest()}
