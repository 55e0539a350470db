"""`python stand_in_streams.py SEED ACTIONS`: the simulation on the CUDA device, with a stand-in for a GPU's streams.

Triton's interpreter works on host bytes, at once; what is noted is on which stream torch is told to work. Nothing but constructors and
host memory may be told outside all of them: on a GPU that would be the default stream, which nothing orders.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtide.arena import KVArena
from kvtide.simulation import OPERATIONS, open_device, run_seed_on

VIEWS = {
    "view",
    "slice",
    "select",
    "reshape",
    "as_strided",
    "unbind",
    "alias",
    "detach",
    "_unsafe_view",
    "expand",
}
MAKERS = {"__init__", "allocate", "create_mirrors", "create_buffer", "_create_pinned"}

current: list[HostStream | None] = [None]
delays: list[int] = []


class HostEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostStream:
    def __init__(self, *_: object) -> None:
        pass

    def record_event(self) -> HostEvent:
        return HostEvent()

    def wait_event(self, event: HostEvent) -> None:
        assert isinstance(event, HostEvent)

    def wait_stream(self, stream: HostStream) -> None:
        assert isinstance(stream, HostStream)


@contextmanager
def on_stream(stream: HostStream) -> Iterator[None]:
    before, current[0] = current[0], stream
    try:
        yield
    finally:
        current[0] = before


def be_late(cycles: int) -> None:
    assert current[0] is not None, "a delay outside every stream"
    delays.append(cycles)


class OutsideStreams(TorchDispatchMode):
    """Counts what torch is told outside every stream, by operator and by who told it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.found: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            frames = [frame.name for frame in traceback.extract_stack() if "kvtide" in frame.filename]
            if current[0] is not None:
                self.inside += 1
            elif frames[-1] not in MAKERS:
                self.found[f"{name} in {frames[-1]}"] += 1
        return function(*args, **(kwargs or {}))


def stand_in() -> None:
    cuda: Any = torch.cuda
    cuda.Stream, cuda.stream, cuda.synchronize, cuda._sleep = HostStream, on_stream, lambda *_: None, be_late
    cuda.is_current_stream_capturing = lambda: False
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda *_: None
    for name in ("zeros", "empty"):
        make = getattr(torch, name)
        # Only CUDA can pin.
        setattr(torch, name, lambda *args, make=make, pin_memory=False, **named: make(*args, **named))
    arena: Any = KVArena
    allocate = KVArena.allocate
    arena.allocate = lambda arena_bytes, _: allocate(arena_bytes)


def main(seed: int, action_count: int) -> None:
    stand_in()
    operations = {operation.name: operation for operation in OPERATIONS}
    with OutsideStreams() as outside:
        run = run_seed_on(partial(open_device, "cuda"), seed, action_count, operations)
    print(
        json.dumps(
            {
                "failure": None if run.failure is None else str(run.failure),
                "forwards": run.facts["forwards"],
                "moved": run.facts["units moved"],
                "delays": len(delays),
                "inside": outside.inside,
                "outside": outside.found,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
