"""Takes that bind each band its own way: sub-pages, window tails, pages that were minted before, zeroing put off, state copies."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.chain import SINK, BandTake, ChainAllocator, ChainError, Taken, TakeRefusal
from kvtide.device import ImmediateEvent, IntArray, NumpyDevice, UnitGrid
from kvtide.ledger import ForwardSteps, InvariantError, RecordedForward
from kvtide.plan import (
    ArenaLayout,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    lay_out,
    plan_kv_storage,
)

from .walk import chain_over

PAGE, SUB = 8, 2
RATIO = PAGE // SUB


def ids(*units: int) -> IntArray:
    return np.array(units, np.int64)


def mixed_layout(arena_bytes: int = 20_000, *, full: bool = True) -> ArenaLayout:
    """State, a window of small pages, and full attention (or a longer window) of pages four times as long."""
    owner = FullLifetime() if full else WindowLifetime(64)
    layers = [
        KVLayerDecl(0, (KVPart(StateGeometry((TensorDecl("s", (96,), DType.UINT8),)), StateLifetime()),)),
        KVLayerDecl(1, (KVPart(MLAGeometry(16, 0, DType.UINT8), WindowLifetime(16)),)),
        KVLayerDecl(2, (KVPart(MLAGeometry(32, 0, DType.UINT8), owner),)),
    ]
    return lay_out(plan_kv_storage(layers, page_tokens=PAGE, window_page_tokens=SUB), arena_bytes)


class Bytes:
    """A chain over NumPy bytes."""

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        self.device = NumpyDevice(layout.arena_bytes)
        self.steps = ForwardSteps()
        self.chain: ChainAllocator = chain_over(layout, self.device, self.steps)

    def take(self, pages: int = 0, slots: int = 0, bands: dict[str, BandTake] | None = None) -> Taken:
        taken = self.chain.take(pages=pages, state_slots=slots, bands=bands)
        assert isinstance(taken, Taken), str(taken)
        return taken

    def bytes_of(self, name: str, virtual: IntArray) -> np.ndarray:
        """The bytes behind virtual units; a copy, since indices are a list."""
        return self._units(name)[self.chain.physical_units(name, virtual)]

    def fill(self, name: str, virtual: IntArray, value: int) -> None:
        self._units(name)[self.chain.physical_units(name, virtual)] = value

    def forward(self, **writes: IntArray | None) -> RecordedForward:
        record = self.steps.forward_launched()
        recorded = self.steps.forward_recorded(record, self.device.record_event(self.device.forward_stream))
        self.chain.forward_recorded(
            recorded, {name.replace("_", "-"): units for name, units in writes.items()}
        )
        return recorded

    def _units(self, name: str) -> np.ndarray:
        band = self.layout.band(name)
        return self.device.units(UnitGrid(band.origin_bytes, band.unit_bytes))


@pytest.mark.requirement("P10", "C1")
def test_a_virtual_page_has_its_sub_pages_in_a_band_of_smaller_pages() -> None:
    """Each kind of attention wants its own page size; a row still holds one id for both."""
    world = Bytes(mixed_layout())
    taken = world.take(pages=3)
    window = world.layout.band("window-16")
    sub_pages = (taken.pages[:, None] * RATIO + np.arange(RATIO)).reshape(-1)
    physical = world.chain.physical_units("window-16", sub_pages)
    assert len(set(physical.tolist())) == 3 * RATIO
    assert (physical != SINK).all()
    world.device.upload(world.device.schedule_stream)
    table = world.device.tables["ids:window-16"]
    assert len(table) == world.layout.virtual_page_count * RATIO == world.layout.id_count(window)
    assert (table[sub_pages] == physical).all()
    world.chain.free_pages("window-16", sub_pages[:5])
    with pytest.raises(
        ChainError, match=r"cannot free pages \[2, 3\] of band 'full': band 'window-16' still holds them"
    ):
        world.chain.free_pages("full", taken.pages)
    world.chain.free_pages("window-16", sub_pages[5:])
    world.chain.free_pages("full", taken.pages)
    world.chain.verify_byte_accounting()
    assert world.chain.statistics().live_bytes == 0


@pytest.mark.requirement("C1")
def test_a_window_binds_the_tail_alone_and_the_rest_reads_as_the_sink() -> None:
    """A prompt of many pages needs only its window's; the peers bind them all."""
    world = Bytes(mixed_layout())
    tail = BandTake(fresh=np.arange(6 * RATIO - 3, 6 * RATIO))
    taken = world.take(pages=6, bands={"window-16": tail})
    sub_pages = (taken.pages[:, None] * RATIO + np.arange(RATIO)).reshape(-1)
    physical = world.chain.physical_units("window-16", sub_pages)
    assert (physical[:-3] == SINK).all()
    assert (physical[-3:] != SINK).all()
    assert [band.live_units for band in world.chain.statistics().bands] == [0, 3, 6]
    later = world.take(bands={"window-16": BandTake(held=sub_pages[:2])})
    assert (len(later.pages), world.chain.statistics().bands[1].live_units) == (0, 5)
    world.chain.verify_byte_accounting()


@pytest.mark.requirement("C1")
def test_a_window_that_is_not_named_binds_nothing() -> None:
    """The owner's rows outlive the windows': a prefix that only full attention still needs."""
    world = Bytes(mixed_layout())
    taken = world.take(pages=2, bands={})
    assert [band.live_units for band in world.chain.statistics().bands] == [0, 0, 2]
    world.chain.free_pages("full", taken.pages)


@pytest.mark.requirement("C1")
def test_without_full_attention_a_page_returns_with_the_last_band_that_holds_some_of_it() -> None:
    """All-window models have no owner, and ids must not run out, whichever band lets go last."""
    world = Bytes(mixed_layout(full=False))
    free_before = world.chain.statistics().free_page_ids
    for round_number in range(free_before + 3):
        taken = world.take(pages=2)
        sub_pages = (taken.pages[:, None] * RATIO + np.arange(RATIO)).reshape(-1)
        frees = [
            ("window-64", taken.pages[:1]),
            ("window-16", sub_pages[:7]),
            ("window-16", sub_pages[7:]),
            ("window-64", taken.pages[1:]),
        ]
        for name, units in frees if round_number % 2 else frees[::-1]:
            assert world.chain.statistics().free_page_ids < free_before
            world.chain.free_pages(name, units)
        assert world.chain.statistics().free_page_ids == free_before
    world.chain.verify_byte_accounting()


@pytest.mark.requirement("C1", "C5")
def test_ids_never_run_out_before_bytes_do() -> None:
    """Without full attention a page may be held by one small sub-page alone: the most pages there can be, and all have ids."""
    world = Bytes(mixed_layout(4000, full=False))
    one = BandTake(fresh=ids(0))
    while True:
        taken = world.chain.take(pages=1, bands={"window-16": one})
        if isinstance(taken, TakeRefusal):
            break
    assert world.chain.statistics().bands[2].live_units == world.layout.band("window-16").capacity_pages
    assert world.chain.statistics().free_page_ids in (0, 1)


@pytest.mark.requirement("C1")
def test_without_full_attention_a_page_that_no_band_binds_is_refused() -> None:
    """Nothing would ever free it."""
    world = Bytes(mixed_layout(full=False))
    with pytest.raises(ChainError, match=r"no band binds any part of those at places \[1\]"):
        world.chain.take(pages=3, bands={"window-16": BandTake(fresh=ids(0, 2 * RATIO))})
    world.take(
        pages=3, bands={"window-16": BandTake(fresh=ids(0, 2 * RATIO)), "window-64": BandTake(fresh=ids(1))}
    )


@pytest.mark.requirement("A5")
def test_only_what_the_forward_does_not_write_whole_is_zeroed() -> None:
    """Zeroing every page costs as many bytes as the KV itself; a page left half unwritten must not show its former tenant."""
    world = Bytes(mixed_layout())
    taken = world.take(
        pages=4,
        slots=1,
        bands={"full": BandTake(unwritten=ids(3)), "window-16": BandTake(unwritten=ids(0, 15))},
    )
    sub_pages = (taken.pages[:, None] * RATIO + np.arange(RATIO)).reshape(-1)
    assert (world.bytes_of("full", taken.pages)[:3] == 0xFF).all(), (
        "the device's bytes are NaN before anybody writes them"
    )
    assert not world.bytes_of("full", taken.pages)[3].any()
    window = world.bytes_of("window-16", sub_pages)
    assert not window[[0, 15]].any()
    assert (window[1:15] == 0xFF).all()
    assert not world.bytes_of("state", taken.state_slots).any()
    assert world.chain.statistics().owed_units == 3 + 14
    world.chain.written(taken)
    assert world.chain.statistics().owed_units == 0
    world.chain.pay_zero_debt(taken)
    assert (world.bytes_of("full", taken.pages)[:3] == 0xFF).all(), "what was written is not zeroed"


@pytest.mark.requirement("A5")
def test_the_debt_of_an_aborted_launch_is_paid_by_whoever_still_holds_the_pages() -> None:
    """Nobody will write them now. A page freed meanwhile is somebody else's and must keep its bytes."""
    world = Bytes(mixed_layout())
    none = BandTake(unwritten=ids())
    taken = world.take(pages=4, bands={"full": none, "window-16": none})
    sub_pages = (taken.pages[:, None] * RATIO + np.arange(RATIO)).reshape(-1)
    world.chain.free_pages("window-16", sub_pages)
    world.chain.free_pages("full", taken.pages[:2])
    again = world.take(pages=2, bands={})
    assert set(again.pages.tolist()) == set(taken.pages[:2].tolist())
    world.fill("full", again.pages, 7)
    world.chain.pay_zero_debt(taken)
    assert (world.bytes_of("full", again.pages) == 7).all()
    assert not world.bytes_of("full", taken.pages[2:]).any()
    assert world.chain.statistics().owed_units == 0


@pytest.mark.requirement("A5", "C1")
def test_a_state_copy_waits_its_writers_and_pays_the_target_s_debt() -> None:
    """A fork copies what the last forward leaves, not what it is about to overwrite."""
    world = Bytes(mixed_layout())
    source = world.take(slots=2).state_slots
    world.fill("state", source, 9)
    recorded = world.forward(state=source[:1])
    target = world.take(slots=1, bands={"state": BandTake(unwritten=ids())})
    world.chain.copy_state_slots(source[1:], target.state_slots)
    assert world.steps.retired_through == -1, "nobody writes the second slot"
    assert world.chain.statistics().owed_units == 0
    world.chain.pay_zero_debt(target)
    assert (world.bytes_of("state", target.state_slots) == 9).all()
    world.chain.copy_state_slots(source[:1], target.state_slots)
    assert world.steps.retired_through == recorded.forward
    with pytest.raises(ChainError, match="none a source"):
        world.chain.copy_state_slots(source, source)
    with pytest.raises(ChainError, match="no target twice"):
        world.chain.copy_state_slots(source, np.repeat(target.state_slots, 2))
    with pytest.raises(ChainError, match=r"cannot copy state slots \[7\] of band 'state': not bound"):
        world.chain.copy_state_slots(source[:1], ids(7))


@pytest.mark.requirement("A5", "K8")
def test_one_state_is_copied_to_several_slots_at_once() -> None:
    """Requests that arrive together often begin alike, and start from one checkpoint."""
    world = Bytes(mixed_layout())
    source = world.take(slots=1).state_slots
    world.fill("state", source, 9)
    targets = world.take(slots=3).state_slots
    world.chain.copy_state_slots(np.repeat(source, 3), targets)
    assert (world.bytes_of("state", targets) == 9).all()


@pytest.mark.requirement("C7", "L7")
def test_a_copy_under_a_forward_of_unknown_writes_waits_for_it() -> None:
    """A speculative forward may write any slot."""
    world = Bytes(mixed_layout())
    slots = world.take(slots=2).state_slots
    recorded = world.forward(state=None)
    world.chain.copy_state_slots(slots[:1], slots[1:])
    assert world.steps.retired_through == recorded.forward


@pytest.mark.requirement("C1", "L8")
@pytest.mark.parametrize(
    ("bands", "text"),
    [
        ({"window-9": BandTake()}, "no band 'window-9'; the chain has ['state', 'window-16', 'full']"),
        ({"full": BandTake(fresh=ids(0))}, "band 'full' binds all that is minted"),
        ({"full": BandTake(held=ids(1))}, "band 'full' binds all that is minted"),
        ({"full": BandTake(unwritten=ids(2))}, "`unwritten` must be places that rise within [0, 2)"),
        ({"state": BandTake(unwritten=ids(1))}, "`unwritten` must be places that rise within [0, 1)"),
        ({"window-16": BandTake(fresh=ids(8))}, "`fresh` must be places that rise within [0, 8)"),
        ({"window-16": BandTake(fresh=ids(-1))}, "`fresh` must be places that rise within [0, 8)"),
        ({"window-16": BandTake(fresh=ids(3, 3))}, "`fresh` must be places that rise within [0, 8)"),
        ({"window-16": BandTake(fresh=np.array([1], np.int32))}, "found int32 [1]"),
        (
            {"window-16": BandTake(fresh=ids(2), unwritten=ids(1))},
            "`unwritten` must be places that rise within [0, 1)",
        ),
        ({"window-16": BandTake(held=ids(4))}, "cannot take pages [4] of band 'window-16': bound already"),
        (
            {"window-16": BandTake(held=ids(0))},
            "cannot take pages [0] of band 'window-16': of virtual pages that are not minted",
        ),
        (
            {"window-16": BandTake(held=ids(-1))},
            "cannot take pages [-1] of band 'window-16': ids run from 0 to",
        ),
        ({"window-16": BandTake(held=ids(40))}, "of virtual pages that are not minted"),
        ({"window-16": BandTake(held=ids(7, 7))}, "one is named twice"),
    ],
)
def test_a_wrong_take_is_refused_before_anything_changes(bands: dict[str, BandTake], text: str) -> None:
    """Two owners of one page is the fault that no later check finds."""
    world = Bytes(mixed_layout())
    first = world.take(pages=2)
    world.chain.free_pages("window-16", ids(7))
    assert first.pages.tolist() == [1, 2]
    before = world.chain.statistics()
    with pytest.raises(ChainError) as caught:
        world.chain.take(pages=2, state_slots=1, bands=bands)
    assert text in str(caught.value)
    assert world.chain.statistics() == before


@pytest.mark.requirement("L8")
def test_a_write_of_what_is_not_bound_is_refused() -> None:
    """A padded row's −1 would name the band's last page."""
    world = Bytes(mixed_layout())
    pages = world.take(pages=1).pages
    record = world.steps.forward_launched()
    recorded = world.steps.forward_recorded(record, ImmediateEvent(world.device.forward_stream))
    for wrong, text in ((ids(-1), "ids run from 0"), (ids(9), "not bound"), (ids(SINK), "not bound")):
        with pytest.raises(ChainError, match=text):
            world.chain.forward_recorded(recorded, {"full": wrong})
    world.chain.forward_recorded(recorded, {"full": pages})


@pytest.mark.requirement("L1")
def test_what_moves_or_zeroes_is_refused_between_launch_and_recording() -> None:
    """There is no event yet that it could wait for."""
    world = Bytes(mixed_layout())
    taken = world.take(slots=2, bands={"state": BandTake(unwritten=ids())})
    record = world.steps.forward_launched()
    for call in (
        lambda: world.chain.copy_state_slots(taken.state_slots[:1], taken.state_slots[1:]),
        lambda: world.chain.pay_zero_debt(taken),
        lambda: world.chain.ensure_capacity({"state": 1}),
    ):
        with pytest.raises(InvariantError, match=r"forward\.record_before_pages"):
            call()
    world.steps.forward_aborted(record)
    world.chain.pay_zero_debt(taken)
