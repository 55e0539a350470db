"""Every Triton program beside its torch reference, on seeded random shapes, strides, types and bytes (row A6).

The reference runs on a CPU, the program where the check runs; bytes are compared, so NaNs of every type, masked rows and whatever
lies beside a target count. A rehearsal runs the programs in Triton's interpreter, fewer times.
"""

import math
from collections.abc import Callable
from types import ModuleType

import attrs
import numpy as np
import torch

from gpu_place import Place
from kvtide.arena import KVArena, kernels, torch_dtype
from kvtide.arena.copy_plan import copy_segments
from kvtide.device import Device, IntArray, NumpyDevice, UnitGrid
from kvtide.plan import DType

ORIGIN_BYTES = 48
ENTRIES = [(), (1,), (3,), (8,), (2, 64), (576,), (2, 3, 5), (2048,), (4100,)]
"""Shapes of a token's entry: narrower than a word, odd, as models have them, wider than one program's tile."""


def same_bytes(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes, in one shape and type."""
    raw = [each.contiguous().cpu().reshape(-1).view(torch.uint8) for each in (found, expected)]
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(*raw)


@attrs.define(eq=False)
class Comparison:
    """Draws cases, and compares."""

    place: Place
    draw: np.random.Generator

    def bytes(self, count: int) -> torch.Tensor:
        """Random ones, on the CPU."""
        return torch.from_numpy(self.draw.integers(0, 256, count, np.uint8))

    def there(self, values: torch.Tensor | IntArray) -> torch.Tensor:
        """A copy where the programs run."""
        tensor = torch.from_numpy(values.copy()) if isinstance(values, np.ndarray) else values.clone()
        return tensor.to(self.place.memory)

    def pairs(self, unit_count: int) -> tuple[IntArray, IntArray]:
        """A legal list of copies: scattered, or a block that moves over itself by some units."""
        if self.draw.random() < 0.5:
            length = int(self.draw.integers(1, unit_count))
            first, target = (int(self.draw.integers(0, unit_count - length + 1)) for _ in range(2))
            sources = np.arange(first, first + length)
            return (
                (sources[::-1], sources[::-1] + target - first)
                if target > first
                else (sources, sources + target - first)
            )
        targets = self.draw.permutation(unit_count)[: self.draw.integers(0, unit_count)]
        drawn = [
            int(self.draw.choice(np.setdiff1d(np.arange(unit_count), targets[:place])))
            for place in range(len(targets))
        ]
        return np.array(drawn, np.int64), targets

    def units(self) -> tuple[int, int]:
        """Bytes and number of the units of an arena."""
        most = 5 if self.place.is_gpu else 3
        size = [16, 48, 4096, 3 * 8192 + 16, (1 << 20) + 48][self.draw.integers(0, most)]
        return size, int(self.draw.integers(2, 40 if self.place.is_gpu else 9))

    def copies(self) -> None:
        """`copy_units`, through scratch where pairs overwrite one another's sources."""
        unit_bytes, unit_count = self.units()
        sources, targets = self.pairs(unit_count)
        scratch_units = int(self.draw.integers(0, 5))
        expected = self.bytes(ORIGIN_BYTES + unit_count * unit_bytes + 13)
        arena = self.there(expected)
        ids = [torch.from_numpy(each.copy()) for each in (sources, targets)]
        kernels.copy_units(expected, ORIGIN_BYTES, unit_bytes, *ids)
        programs().copy_units(
            arena,
            ORIGIN_BYTES,
            unit_bytes,
            *map(self.there, ids),
            segments=copy_segments(sources, targets, scratch_units),
            scratch=torch.zeros(
                scratch_units * unit_bytes // 8 + 1, dtype=torch.int64, device=self.place.memory
            ),
        )
        assert same_bytes(arena, expected), f"{len(sources)} units of {unit_bytes} bytes"

    def zeroing(self) -> None:
        """`zero_units`."""
        unit_bytes, unit_count = self.units()
        units = torch.from_numpy(self.draw.integers(0, unit_count, self.draw.integers(0, unit_count)))
        expected = self.bytes(ORIGIN_BYTES + unit_count * unit_bytes + 13)
        arena = self.there(expected)
        kernels.zero_units(expected, ORIGIN_BYTES, unit_bytes, units)
        programs().zero_units(arena, ORIGIN_BYTES, unit_bytes, self.there(units))
        assert same_bytes(arena, expected), f"{len(units)} units of {unit_bytes} bytes"

    def translation(self) -> None:
        """`translate_ids`, strict and not, of ids in any shape, int64 or, as rows of a mirror are, int32."""
        entries = int(self.draw.integers(1, 3000))
        table = torch.from_numpy(self.draw.integers(-1, 2**31 - 1, entries, np.int32))
        shape = tuple(self.draw.integers(0, 60, 2).tolist())
        dtype = [torch.int64, torch.int32][self.draw.integers(0, 2)]
        ids = torch.from_numpy(self.draw.integers(-1, entries, shape)).to(dtype)
        is_strict = self.draw.random() < 0.5
        if is_strict and ids.numel():
            beyond = [2**31, 2**40, -(2**40)] if dtype == torch.int64 else [2**31 - 1, 2**30, -(2**31)]
            wrong = torch.tensor([-2, entries, *beyond], dtype=dtype)
            ids.view(-1)[torch.from_numpy(self.draw.integers(0, ids.numel(), 5))] = wrong
        counted = [torch.zeros(1, dtype=torch.int64, device=where) for where in ("cpu", self.place.memory)]
        strict = [{"faults": faults} if is_strict else {} for faults in counted]
        expected = kernels.translate_ids(table, ids, **strict[0])
        found = programs().translate_ids(self.there(table), self.there(ids), **strict[1])
        assert same_bytes(found, expected), f"{shape} ids, {dtype}, of {entries} entries"
        assert counted[0].item() == counted[1].item(), f"{counted[1].item()} faults for {counted[0].item()}"

    def tokens(self) -> None:
        """`write_tokens`, `gather_tokens` and `gather_pages`, of every type, dense planes and others, at any alignment."""
        dtype = list(DType)[self.draw.integers(0, len(DType))]
        page_tokens = [1, 2, 16, 64][self.draw.integers(0, 4)]
        shape = ENTRIES[self.draw.integers(0, len(ENTRIES) if self.place.is_gpu else 7)]
        elements = math.prod(shape)
        token_stride = elements + [0, 0, 1, 8][self.draw.integers(0, 4)]
        page_stride = page_tokens * token_stride + int(self.draw.integers(0, 4)) * 16
        first = int(self.draw.integers(0, 3)) * 16
        page_count = 5
        strides = (page_stride, token_stride, *(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))
        region = self.bytes((first + page_count * page_stride + 64) * dtype.byte_width)

        def plane(memory: torch.Tensor) -> torch.Tensor:
            return memory.view(torch_dtype(dtype)).as_strided(
                (page_count, page_tokens, *shape), strides, first
            )

        slots = torch.from_numpy(self.draw.permutation(page_count * page_tokens)[: self.draw.integers(0, 40)])
        slots[torch.from_numpy(self.draw.random(len(slots)) < 0.2)] = -1
        typed = self.bytes((40 * elements + 1) * dtype.byte_width).view(torch_dtype(dtype))
        values = typed[: len(slots) * elements].reshape(len(slots), *shape)
        asked = torch.from_numpy(self.draw.integers(-1, page_count * page_tokens, (3, 7)))
        pages = torch.from_numpy(self.draw.integers(-1, page_count, 4))
        expected, found = region.clone(), self.there(region)
        kernels.write_tokens(plane(expected), slots, values)
        programs().write_tokens(plane(found), self.there(slots), self.there(values))
        case = f"{dtype.value}, {page_tokens} tokens a page, entries {shape}, strides {strides[:2]}, from {first}"
        assert same_bytes(found, expected), f"written: {case}"
        gathered = programs().gather_tokens(plane(found), self.there(asked))
        assert same_bytes(gathered, kernels.gather_tokens(plane(expected), asked)), f"gathered: {case}"
        if token_stride == elements:
            gathered = programs().gather_pages(plane(found), self.there(pages))
            assert same_bytes(gathered, kernels.gather_pages(plane(expected), pages)), f"pages: {case}"

    def device(self) -> None:
        """A sequence of work leaves the bytes and tables that it leaves on the NumPy device."""
        arena = KVArena.allocate(1 << 16, self.place.memory)
        device, model = self.place.device(arena), NumpyDevice(1 << 16)
        model.arena[:] = self.bytes(1 << 16).numpy()
        arena.bytes.copy_(torch.from_numpy(model.arena))
        lengths = {"rows": 700, "ids": 300}
        both: list[Device] = [device, model]
        mirrors = [each.create_mirrors(lengths) for each in both]
        grids = [UnitGrid(0, 48), UnitGrid(16, 1024), UnitGrid(112, 80)]
        device.prewarm(grids)
        self.place.synchronize()
        for _ in range(30):
            grid = grids[self.draw.integers(0, len(grids))]
            sources, targets = self.pairs(min(30, grid.unit_count(1 << 16)))
            name = list(lengths)[self.draw.integers(0, 2)]
            places = self.draw.integers(0, lengths[name], self.draw.integers(0, 50))
            values = self.draw.integers(-1, 2**31 - 1, len(places))
            for each, own in zip(both, mirrors, strict=True):
                _work(each, grid, sources, targets)
                own[name].stage(places, values)
                each.upload(each.schedule_stream)
        self.place.synchronize()
        assert same_bytes(arena.bytes, torch.from_numpy(model.arena)), "the arenas differ"
        for name in lengths:
            assert same_bytes(device.tables[name], torch.from_numpy(model.tables[name])), (
                f"table {name!r} differs"
            )


def _work(device: Device, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
    """A move, and zeroing of every third target."""
    device.copy_units(device.schedule_stream, grid, sources, targets)
    device.zero_units(device.schedule_stream, grid, targets[::3])


def programs() -> ModuleType:
    """The Triton half, imported when its interpreter has been chosen or not."""
    from kvtide.arena import triton_kernels  # noqa: PLC0415  # Triton is optional

    return triton_kernels


CASES: dict[str, tuple[Callable[[Comparison], None], int]] = {
    "copy_units": (Comparison.copies, 120),
    "zero_units": (Comparison.zeroing, 60),
    "translate_ids": (Comparison.translation, 60),
    "write_tokens, gather_tokens, gather_pages": (Comparison.tokens, 250),
    "the device beside NumPy's": (Comparison.device, 6),
}
"""By what is compared: how, and how often."""


def compare(place: Place, what: str) -> str:
    """Compare seeded random cases; how many, in words. Raises `AssertionError` for the first that differs."""
    work, count = CASES[what]
    count = count if place.is_gpu else max(2, count // 4)
    for seed in range(count):
        try:
            work(Comparison(place, np.random.default_rng(seed)))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None
    return f"{count} random cases, the same bytes"
