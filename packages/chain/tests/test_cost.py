"""The cost of an operation follows the pages that it touches, never the arena (decision D11, row C10)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvtide.chain import BandTake, ChainAllocator, Taken
from kvtide.chain.hole_set import HoleSet
from kvtide.chain.id_space import IdSpace, UnitIds
from kvtide.device import IntArray, NumpyDevice
from kvtide.ledger import ForwardSteps
from kvtide.plan import ArenaLayout

from .walk import chain_over, layout_of


class Touched(np.ndarray):
    """An array that counts the elements that its users read, write or copy, whatever arrays it is sliced into."""

    count = 0

    def __getitem__(self, where: object) -> object:
        found = super().__getitem__(where)  # type: ignore[index]  # whatever NumPy takes
        if not isinstance(where, slice):  # A slice is a view: what is done with it is counted then.
            Touched.count += np.size(found)
        return found

    def __setitem__(self, where: object, values: object) -> None:
        Touched.count += np.size(super().__getitem__(where))  # type: ignore[index]  # whatever NumPy takes
        super().__setitem__(where, values)  # type: ignore[index]  # whatever NumPy takes

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: object) -> object:
        sizes = [np.size(each) for each in inputs if isinstance(each, np.ndarray)]
        Touched.count += max(sizes, default=0)
        plain = [each.view(np.ndarray) if isinstance(each, Touched) else each for each in inputs]
        out = options.get("out")
        if isinstance(out, tuple):
            options["out"] = tuple(
                each.view(np.ndarray) if isinstance(each, Touched) else each for each in out
            )
        return getattr(ufunc, method)(*plain, **options)

    def __array_function__(
        self, func: Callable[..., object], types: object, args: tuple, kwargs: dict
    ) -> object:
        def plain(value: object) -> object:
            if isinstance(value, Touched):
                Touched.count += value.size
                return value.view(np.ndarray)
            return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value

        return func(*plain(args), **kwargs)

    def nonzero(self) -> tuple[IntArray, ...]:
        Touched.count += self.size
        return self.view(np.ndarray).nonzero()

    def astype(self, *args: object, **kwargs: object) -> np.ndarray:
        Touched.count += self.size
        return self.view(np.ndarray).astype(*args, **kwargs)  # type: ignore[arg-type]  # whatever NumPy takes

    def copy(self, *args: object, **kwargs: object) -> np.ndarray:
        Touched.count += self.size
        return self.view(np.ndarray).copy()

    def sort(self, *args: object, **kwargs: object) -> None:
        Touched.count += self.size
        self.view(np.ndarray).sort(*args, **kwargs)  # type: ignore[arg-type]  # whatever NumPy takes

    def argmax(self, *args: object, **kwargs: object) -> int:
        Touched.count += self.size
        return int(self.view(np.ndarray).argmax())

    argmin = argmax


def watch(chain: ChainAllocator) -> None:
    """Count every touch of the arrays that grow with the arena."""
    for owner in _books(chain, set()):
        for name, value in vars(owner).items():
            if isinstance(value, np.ndarray) and value.size > 64:
                setattr(owner, name, value.view(Touched))


def _books(value: object, seen: set[int]) -> list[object]:
    if id(value) in seen or not type(value).__module__.startswith(("kvtide.chain", "kvtide.ledger")):
        return []
    seen.add(id(value))
    found: list[object] = []
    if hasattr(value, "__dict__"):
        found.append(value)
        for entry in vars(value).values():
            for part in (
                entry
                if isinstance(entry, list | tuple)
                else entry.values()
                if isinstance(entry, dict)
                else [entry]
            ):
                found += _books(part, seen)
    return found


def work(layout: ArenaLayout, filled: float) -> list[int]:
    """Elements touched by each of a fixed series of operations, on an arena filled so far, half of that freed at random."""
    device = NumpyDevice(layout.arena_bytes, byte_work=False)
    chain = chain_over(layout, device, ForwardSteps())
    pages = int(layout.band("full").page_count * filled)
    taken = chain.take(pages=pages, bands={"full": BandTake(), "window-4": BandTake()})
    assert isinstance(taken, Taken)
    gone = np.random.default_rng(1).permutation(taken.pages)[: pages // 2]
    chain.free_pages("window-4", gone)
    chain.free_pages("full", gone)
    counts: list[int] = []
    watch(chain)
    kept: list[Taken] = []

    def step() -> None:
        one = chain.take(pages=20, state_slots=1)
        assert isinstance(one, Taken)
        kept.append(one)

    def free_some() -> None:
        one = kept.pop(0)
        chain.free_pages("window-4", one.pages)
        chain.free_pages("full", one.pages)
        chain.free_state_slots(one.state_slots)

    def ask() -> None:
        assert chain.units_fit({"full": 20, "state": 1})
        assert chain.ensure_capacity({"full": 20}) is None

    def forward() -> None:
        record = chain.steps.forward_launched()
        recorded = chain.steps.forward_recorded(record, device.record_event(device.forward_stream))
        chain.forward_recorded(recorded, {"full": kept[-1].pages, "window-4": kept[-1].pages})
        free_some()
        chain.steps.host_synchronised(recorded.event)
        chain.steps.forward_processed(record)
        chain.forward_processed(record.forward)

    for operation in [*[step] * 30, *[forward, ask, step, free_some] * 15]:
        Touched.count = 0
        operation()
        counts.append(Touched.count)
    return counts


@pytest.mark.requirement("C10", "C2")
def test_an_operation_touches_as_much_in_an_arena_of_a_million_pages_as_in_one_of_a_thousand() -> None:
    """A peer's free concatenates the whole free list: there every request pays for the size of the pool."""
    small, large = (
        work(layout_of({"state": 64, "4": 32, "full": 32}, 64 * pages), 0.35) for pages in (1_500, 1_000_000)
    )
    assert max(small) > 100, "the counter counts nothing"
    # What a scan passes over depends on where holes lie; the reserve is filled a few blocks at a time.
    assert sum(large) <= 2 * sum(small) + 2000
    assert max(large) <= 2 * max(small) + 2000


def test_the_counter_sees_work_that_grows_with_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: a free that looks at every id is counted."""
    unbind = UnitIds.unbind

    def unbind_and_look(ids: UnitIds, *args: object) -> None:
        np.flatnonzero(ids._physical != ids.unbound)
        unbind(ids, *args)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(UnitIds, "unbind", unbind_and_look)
    large = work(layout_of({"state": 64, "4": 32, "full": 32}, 64 * 200_000), 0.35)
    assert max(large) > 100_000


def test_the_watched_books_are_those_that_grow() -> None:
    """Whoever adds a table is watched, too."""
    chain = chain_over(
        layout_of({"state": 64, "4": 32, "full": 32}, 64_000), NumpyDevice(64_000), ForwardSteps()
    )
    kinds = {type(each) for each in _books(chain, set())}
    assert {HoleSet, UnitIds, IdSpace} <= kinds
