"""Where the checks of `gpu_check.py` run: on a GPU, or rehearsed on a CPU, which shows that the checks run and no more."""

from collections.abc import Callable

import attrs
import torch

from kvtide.arena import CPUDevice, CUDADevice, KVArena, TensorDevice
from kvtide.device import Stream
from kvtide.ledger import CheckLevel
from kvtide.plan import GPU_SCRATCH_BYTES, MOVE_SCRATCH_BYTES, KVStoragePlan
from kvtide.storage import KVStorage, build_kv_storage


@attrs.frozen
class Place:
    """The memory and the streams that a check uses."""

    is_gpu: bool
    """False in a rehearsal."""

    has_delays: bool = True
    """False where what watches a check slows it down enough."""

    @property
    def memory(self) -> str:
        """As torch names it."""
        return "cuda" if self.is_gpu else "cpu"

    gives_stream: bool = False
    """Whether devices run forwards on a stream that the check made, as an engine does."""

    def device(self, arena: KVArena) -> TensorDevice:
        """A device over `arena`."""
        if not self.is_gpu:
            return CPUDevice(arena)
        if not self.gives_stream:
            return CUDADevice(arena)
        own = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        device = CUDADevice(arena, forward_stream=own)
        with device.on_stream(device.forward_stream):
            assert torch.cuda.current_stream() == own, "the device runs forwards on a stream of its own"
        return device

    def footprint(self, device: TensorDevice) -> dict[str, int]:
        """What a first call in service must leave as it was; nothing on a CPU."""
        if not isinstance(device, CUDADevice):
            return {}
        # Imported here: Triton may be missing where the rest is rehearsed.
        from kvtide.arena import triton_programs as programs  # noqa: PLC0415

        caches = [
            program.device_caches[torch.cuda.current_device()][0]
            for program in (programs.copy_rows, programs.zero_rows)
        ]
        return {
            "programs compiled": sum(map(len, caches)),
            "allocations on the GPU": torch.cuda.memory_stats()["allocation.all.allocated"],
            "staging buffers": device.staging_buffer_count,
        }

    def storage(
        self,
        plan: KVStoragePlan,
        arena_bytes: int,
        *,
        rows: int,
        context: int,
        chunk: int,
        wrap: Callable[[TensorDevice], TensorDevice] = lambda device: device,
        check_level: CheckLevel = CheckLevel.OFF,
    ) -> KVStorage:
        """A storage over an arena of about so many bytes, every one of them 0xFF: a NaN in every float type."""

        def make_device(arena: KVArena) -> TensorDevice:
            arena.bytes.fill_(0xFF)
            return wrap(self.device(arena))

        return build_kv_storage(
            plan,
            budget_bytes=arena_bytes + (GPU_SCRATCH_BYTES if self.is_gpu else MOVE_SCRATCH_BYTES),
            max_running_requests=rows,
            max_context_tokens=context,
            chunk_tokens=chunk,
            make_device=make_device,
            memory=self.memory,
            check_level=check_level,
        )

    def synchronize(self) -> None:
        """Wait for everything queued."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def queue(self, device: TensorDevice, stream: Stream, work: Callable[[], object]) -> None:
        """Do on `stream` what `work` tells torch."""
        with device.on_stream(stream):
            work()

    def keep_busy(self, device: TensorDevice, stream: Stream, cycles: int) -> None:
        """Keep `stream` busy for so many clock cycles: what is not ordered behind it runs before."""
        if self.is_gpu and self.has_delays and cycles:
            self.queue(device, stream, lambda: sleep(cycles))


def sleep(cycles: int) -> None:
    """Keep torch's current stream busy for so many clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001  # there is no public way to be slow
