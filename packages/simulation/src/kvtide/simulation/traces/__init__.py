"""Traces of an allocator's life: recorded, replayed on any implementation, compared to the first divergence (row X3).

`TraceRecorder` hands out stand-ins that write what is called; `replay` repeats it on a `TraceAdapter`; `docs/traces.md` is the
schema. Traces of the cases that matter lie in `STORIES`.
"""

from pathlib import Path

from kvtide.simulation.traces.recorder import TraceRecorder, state_of
from kvtide.simulation.traces.replay import (
    AdapterFactory,
    ChainAdapter,
    Divergence,
    TraceAdapter,
    adapter_named,
    first_divergence,
    replay,
    replayed,
)
from kvtide.simulation.traces.seeds import Recorded, record_seed, with_page_tokens
from kvtide.simulation.traces.tables import UnitDifference
from kvtide.simulation.traces.telling import document, told
from kvtide.simulation.traces.trace_format import (
    VERSION,
    TraceHeader,
    TraceLine,
    TraceWriter,
    parse_trace,
    read_trace,
)
from kvtide.simulation.traces.trace_schema import CALLS, TraceError

STORIES = Path(__file__).parent / "stories"
"""Folder of traces of cases that matter, one file each."""

__all__ = [
    "CALLS",
    "STORIES",
    "VERSION",
    "AdapterFactory",
    "ChainAdapter",
    "Divergence",
    "Recorded",
    "TraceAdapter",
    "TraceError",
    "TraceHeader",
    "TraceLine",
    "TraceRecorder",
    "TraceWriter",
    "UnitDifference",
    "adapter_named",
    "document",
    "first_divergence",
    "parse_trace",
    "read_trace",
    "record_seed",
    "replay",
    "replayed",
    "state_of",
    "told",
    "with_page_tokens",
]
