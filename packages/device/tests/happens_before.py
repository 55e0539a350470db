"""Random device programs, and the dumbest model of what orders them: a graph of everything, searched."""

from __future__ import annotations

import attrs
import numpy as np
from hypothesis import strategies as st

from kvtide.device import Buffer, ByteSpan, ModelledDevice, ModelledEvent, RunningWork

BYTES = 24
STREAMS = 3

Ranges = tuple[tuple[int, int], ...]


@attrs.frozen
class Step:
    """One call of the host."""

    kind: str
    """Name of a method of `Program`."""

    stream: int = 0
    """Where."""

    event: int = 0
    """Which of the events recorded so far, counted from the newest and around."""

    reads: Ranges = ()
    writes: Ranges = ()
    discovers: bool = False
    """Half of what it touches is found only when it runs."""


RANGES = st.lists(
    st.tuples(st.integers(0, BYTES - 1), st.integers(1, 8)).map(lambda r: (r[0], min(BYTES, r[0] + r[1]))),
    max_size=2,
).map(tuple)
TOUCHING = {"reads": RANGES, "writes": RANGES}
STEPS = st.lists(
    st.one_of(
        st.builds(
            Step,
            kind=st.just("work"),
            stream=st.integers(0, STREAMS - 1),
            discovers=st.booleans(),
            **TOUCHING,
        ),
        st.builds(Step, kind=st.just("transfer"), **TOUCHING),
        st.builds(Step, kind=st.just("host_access"), **TOUCHING),
        st.builds(
            Step,
            kind=st.sampled_from(["record", "wait", "wait", "host_wait", "query", "run"]),
            stream=st.integers(0, STREAMS - 1),
            event=st.integers(0, 4),
        ),
    ),
    max_size=30,
)


class Graph:
    """Nodes are host calls and pieces of work; an edge means "is over before the other begins"."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []

    def node(self, *before: int | None) -> int:
        self.before.append({node for node in before if node is not None})
        return len(self.before) - 1

    def is_ordered(self, first: int, second: int) -> bool:
        return self.is_before(first, second) or self.is_before(second, first)

    def is_before(self, first: int, second: int) -> bool:
        todo, seen = [second], set()
        while todo:
            node = todo.pop()
            if node == first:
                return True
            if node not in seen:
                seen.add(node)
                todo.extend(self.before[node])
        return False


class Program:
    """Runs steps on a modelled device and notes the same in a graph."""

    def __init__(
        self,
        steps: list[Step],
        seed: int | None,
        *,
        random_queries: bool = False,
        add_missing_waits: bool = False,
    ) -> None:
        self.device = ModelledDevice(BYTES, seed=seed, raise_races=False, random_queries=random_queries)
        self.buffer: Buffer = self.device.arena_buffer
        self.streams = [
            self.device.schedule_stream,
            self.device.forward_stream,
            self.device.create_stream("copy"),
        ]
        self.graph = Graph()
        self.host_node = self.graph.node()
        self.last: list[int] = [self.graph.node() for _ in self.streams]
        """Newest node of each stream; a wait is a node of its own."""
        self.events: list[tuple[ModelledEvent, int]] = []
        self.touched: dict[int, tuple[str, Ranges, Ranges]] = {}
        self.sequential = np.full(BYTES, 0xFF, np.uint8)
        """The bytes, if each call did its work at once."""
        self.ends: dict[int, ModelledEvent] = {}
        """Behind each work that touched bytes."""
        for place, step in enumerate(steps):
            if add_missing_waits and step.kind in ("work", "transfer", "host_access"):
                self._add_missing_waits(step)
            getattr(self, step.kind)(f"{step.kind} {place}", step)
        self.device.run_all()

    # ── steps ──

    def work(self, name: str, step: Step) -> None:
        node = self.last[step.stream] = self.graph.node(self.last[step.stream], self.host_node)
        cut = len(step.writes) // 2 if step.discovers else len(step.writes)
        self.device.submit(
            self.streams[step.stream],
            name,
            reads=() if step.discovers else self._spans(step.reads),
            writes=self._spans(step.writes[:cut]),
            run=lambda work: self._compute(work, step, node + 1),
            discovers=step.discovers,
        )
        self._touch(node, name, step)
        self.ends[node] = self.device.record_event(self.streams[step.stream])

    def transfer(self, name: str, step: Step) -> None:
        node = self.graph.node(self.host_node)
        event = self.device.start_transfer(
            name,
            reads=self._spans(step.reads),
            writes=self._spans(step.writes),
            run=lambda work: self._compute(work, step, node + 1),
        )
        self.events.append((event, node))
        self._touch(node, name, step)
        self.ends[node] = event

    def host_access(self, name: str, step: Step) -> None:
        self.host_node = self.graph.node(self.host_node)
        total = sum(int(self.device.read_on_host(span, name=name).sum()) for span in self._spans(step.reads))
        for span in self._spans(step.writes):
            self.device.write_on_host(span, (total + len(self.graph.before)) % 251, name=name)
        self._touch(self.host_node, name, step)

    def record(self, name: str, step: Step) -> None:
        event = self.device.record_event(self.streams[step.stream])
        self.events.append((event, self.last[step.stream]))

    def wait(self, name: str, step: Step) -> None:
        if self.events:
            event, node = self._event(step)
            self.device.wait_event(self.streams[step.stream], event)
            self.last[step.stream] = self.graph.node(self.last[step.stream], node)

    def host_wait(self, name: str, step: Step) -> None:
        if self.events:
            event, node = self._event(step)
            self.device.wait_on_host(event)
            self.host_node = self.graph.node(self.host_node, node)

    def query(self, name: str, step: Step) -> None:
        if self.events:
            event, node = self._event(step)
            if self.device.query_event(event):
                self.host_node = self.graph.node(self.host_node, node)

    def run(self, name: str, step: Step) -> None:
        ready = self.device.ready_streams()
        if ready:
            self.device.run_next(ready[step.event % len(ready)])

    # ── what is known ──

    def reported(self) -> set[tuple[frozenset[tuple[str, bool]], int]]:
        """Who does what beside whom to which byte, as the device says."""
        return {
            (
                frozenset(
                    {(race.first.actor, race.first.is_write), (race.second.actor, race.second.is_write)}
                ),
                byte,
            )
            for race in self.device.races
            for byte in range(race.start_byte, race.end_byte)
        }

    def expected(self) -> set[tuple[frozenset[tuple[str, bool]], int]]:
        """The same, by looking at every pair."""
        found = set()
        nodes = list(self.touched)
        for place, second in enumerate(nodes):
            for first in nodes[:place]:
                if self.graph.is_ordered(first, second):
                    continue
                for first_writes, second_writes in ((True, True), (True, False), (False, True)):
                    sides = (
                        (self.touched[first][0], first_writes),
                        (self.touched[second][0], second_writes),
                    )
                    shared = self._bytes(first, first_writes) & self._bytes(second, second_writes)
                    found |= {(frozenset(sides), byte) for byte in shared}
        return found

    # ── helpers ──

    def _add_missing_waits(self, step: Step) -> None:
        """Wait for exactly what the step would race with."""
        node = self.last[step.stream] if step.kind == "work" else self.host_node
        reads, writes = _bytes_of(step.reads), _bytes_of(step.writes)
        for other, event in self.ends.items():
            conflicts = (reads | writes) & self._bytes(other, True) or writes & self._bytes(other, False)
            is_before = self.graph.is_before(other, node) or self.graph.is_before(other, self.host_node)
            if not conflicts or is_before:
                continue
            if step.kind == "work":
                self.device.wait_event(self.streams[step.stream], event)
                node = self.last[step.stream] = self.graph.node(self.last[step.stream], other)
            else:
                self.device.wait_on_host(event)
                node = self.host_node = self.graph.node(self.host_node, other)

    def _event(self, step: Step) -> tuple[ModelledEvent, int]:
        return self.events[-1 - step.event % len(self.events)]

    def _spans(self, ranges: Ranges) -> list[ByteSpan]:
        return [self.buffer.span(start, end) for start, end in ranges]

    def _bytes(self, node: int, is_write: bool) -> set[int]:
        return _bytes_of(self.touched[node][1 + is_write])

    def _compute(self, work: RunningWork, step: Step, value: int) -> None:
        total = sum(int(work.read(span).sum()) for span in self._spans(step.reads))
        for span in self._spans(step.writes):
            work.write(span, (total + value) % 251)

    def _touch(self, node: int, name: str, step: Step) -> None:
        self.touched[node] = (name, step.reads, step.writes)
        total = sum(int(self.sequential[start:end].sum()) for start, end in step.reads)
        for start, end in step.writes:
            self.sequential[start:end] = (total + node + 1) % 251


def _bytes_of(ranges: Ranges) -> set[int]:
    return {byte for start, end in ranges for byte in range(start, end)}
