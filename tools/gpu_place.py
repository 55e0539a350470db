"""Where the checks of `gpu_check.py` run: on a GPU, or rehearsed on a CPU, which shows that the checks run and no more."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import attrs
import torch

from kvtide.arena import CPUDevice, CUDADevice, KVArena, TensorDevice
from kvtide.device import Stream
from kvtide.plan import KVStoragePlan
from kvtide.storage import KVStorage, build_kv_storage

SCRATCH_BYTES = 32 << 20
"""For moves that pass over themselves."""


@attrs.frozen
class Place:
    """The memory and the streams that a check uses."""

    is_gpu: bool
    """False in a rehearsal."""

    @property
    def memory(self) -> str:
        """As torch names it."""
        return "cuda" if self.is_gpu else "cpu"

    def device(self, arena: KVArena) -> TensorDevice:
        """A device over `arena`, every byte of which is 0xFF now: a NaN in every float type."""
        arena.bytes.fill_(0xFF)
        make = partial(CUDADevice, scratch_bytes=SCRATCH_BYTES) if self.is_gpu else CPUDevice
        return make(arena)

    def storage(
        self, plan: KVStoragePlan, arena_bytes: int, rows: int, context: int, chunk: int
    ) -> KVStorage:
        """A storage over an arena of about so many bytes."""
        return build_kv_storage(
            plan,
            budget_bytes=SCRATCH_BYTES + arena_bytes,
            max_running_requests=rows,
            max_context_tokens=context,
            chunk_tokens=chunk,
            make_device=self.device,
            memory=self.memory,
            scratch_bytes=SCRATCH_BYTES,
        )

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Queue what torch is told inside on `stream`."""
        torch_stream = getattr(stream, "torch_stream", None)
        return nullcontext() if torch_stream is None else torch.cuda.stream(torch_stream)

    def synchronize(self) -> None:
        """Wait for everything queued."""
        if self.is_gpu:
            torch.cuda.synchronize()


def keep_busy(cycles: int) -> None:
    """Keep torch's current stream busy for so many clock cycles, so that what is not ordered behind it runs before."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001  # there is no public way to be slow
