"""Relief and compaction: what moves, what stays, what is waited for, on real bytes (rows C4, C6, C7)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvtide.chain import BandTake, ChainAllocator, ChainError, Taken, TakeRefusal
from kvtide.device import ImmediateEvent, IntArray, NumpyDevice, UnitGrid
from kvtide.ledger import (
    Access,
    CheckLevel,
    ForwardSteps,
    HostCopy,
    InvariantChecks,
    InvariantError,
    LaunchRecord,
    NetworkTransfer,
    ReceiveHold,
    RecordedForward,
    Reservation,
)
from kvtide.plan import (
    ArenaLayout,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    MLAGeometry,
    WindowLifetime,
    lay_out,
    plan_kv_storage,
)

from .books import books_of
from .test_takes import ids
from .walk import layout_of

THREE = {"state": 112, "4": 80, "full": 48}


class World:
    """A chain over bytes in which every live unit holds a value of its own."""

    def __init__(self, layout: ArenaLayout, *, waits: bool = False) -> None:
        self.layout = layout
        self.device = NumpyDevice(layout.arena_bytes)
        self.steps = ForwardSteps()
        mirrors = self.device.create_mirrors(
            {f"ids:{band.name}": layout.id_count(band) for band in layout.bands}
        )
        self.waited: list[list[str]] = []
        self.chain = ChainAllocator(
            layout, self.device, mirrors, self.steps, wait_for_transfers=self.wait if waits else None
        )
        self.values: dict[tuple[str, int], int] = {}
        self.flying: list[tuple[LaunchRecord, RecordedForward]] = []

    def wait(self, transfers: Sequence[NetworkTransfer]) -> None:
        self.waited.append([transfer.name for transfer in transfers])
        for transfer in transfers:
            self.chain.uses.end(transfer)

    def take(self, pages: int = 0, slots: int = 0) -> Taken:
        taken = self.chain.take(pages=pages, state_slots=slots)
        assert isinstance(taken, Taken), str(taken)
        for band in self.layout.bands:
            for unit in (taken.state_slots if band.name == "state" else taken.pages).tolist():
                assert not self.bytes_of(band.name, unit).any()
                self.values[band.name, unit] = len(self.values) % 250 + 1
                self.bytes_of(band.name, unit)[:] = self.values[band.name, unit]
        return taken

    def free(self, name: str, units: IntArray) -> None:
        if name == "state":
            self.chain.free_state_slots(units)
        else:
            self.chain.free_pages(name, units)
        for unit in units.tolist():
            del self.values[name, unit]

    def bytes_of(self, name: str, virtual: int) -> np.ndarray:
        band = self.layout.band(name)
        unit = int(self.chain.physical_units(name, ids(virtual))[0])
        return self.device.units(UnitGrid(band.origin_bytes, band.unit_bytes))[unit]

    def forward(self, **writes: IntArray | None) -> RecordedForward:
        record = self.steps.forward_launched()
        recorded = self.steps.forward_recorded(record, self.device.record_event(self.device.forward_stream))
        self.chain.forward_recorded(
            recorded, {name.replace("_", "-"): units for name, units in writes.items()}
        )
        self.flying.append((record, recorded))
        return recorded

    def process(self) -> None:
        record, recorded = self.flying.pop(0)
        self.steps.host_synchronised(recorded.event)
        self.steps.forward_processed(record)
        self.chain.forward_processed(record.forward)

    def copy(self, name: str, access: Access = Access.READ) -> HostCopy:
        return HostCopy(name, access, ImmediateEvent(self.device.schedule_stream))

    def moved(self) -> dict[str, int]:
        return {band.name: band.moved_units for band in self.chain.statistics().bands}

    def check(self) -> None:
        self.chain.verify_byte_accounting()
        for (name, unit), value in self.values.items():
            assert (self.bytes_of(name, unit) == value).all(), f"{name} {unit} lost its bytes"

    def places(self, name: str, units: IntArray) -> list[int]:
        return self.chain.physical_units(name, units).tolist()


@pytest.mark.requirement("C6", "C4")
def test_a_state_slot_larger_than_the_gap_fits_once_pages_are_evicted() -> None:
    """The owner's pages are small and many; evicted at random they leave holes, and none of them is large enough."""
    world = World(layout_of({"state": 400, "full": 48}, 48 + 48 * 40))
    pages = world.take(pages=40).pages
    evictable = pages[::4]
    assert not world.chain.units_fit({"state": 1})
    assert world.chain.admits({"state": 1}, {"full": len(evictable)})
    assert not world.chain.admits({"state": 2}, {"full": len(evictable)})
    with pytest.raises(ChainError, match="cannot credit 41 units of band 'full'"):
        world.chain.admits({"state": 1}, {"full": 41})
    for count in range(len(evictable) + 1):
        if world.chain.fits_after_frees({"state": 1}, {"full": count}):
            break
    assert count == -(-400 // 48), "the walk stops with the first victims that make room"
    world.free("full", evictable[:count])
    world.take(slots=1)
    assert world.moved() == {
        "state": 0,
        "full": count - sum(page in pages[-count:] for page in evictable[:count]),
    }
    world.check()


@pytest.mark.requirement("C6", "C7")
def test_half_of_all_pages_freed_at_random_serve_one_request_that_needs_them_all() -> None:
    """Fragmentation must not refuse what the bytes allow."""
    world = World(layout_of({"state": 480, "full": 48}, 48 + 48 * 200))
    pages = np.random.default_rng(2).permutation(world.take(pages=200).pages)
    world.free("full", pages[:100])
    world.take(slots=10)
    assert world.chain.statistics().rearrangements == 1
    assert world.moved()["full"] <= 100
    world.check()


@pytest.mark.requirement("C4", "C6")
def test_no_more_moves_than_one_end_needs() -> None:
    """A flush of the state band would copy slots of many bytes for nothing."""
    world = World(layout_of({"state": 400, "full": 48}, 6000))
    slots = world.take(slots=6).state_slots
    pages = world.take(pages=60).pages
    world.free("state", slots[:1])
    world.free("full", pages[10:40])
    world.take(slots=3)
    assert world.moved()["state"] == 0
    assert world.moved()["full"] > 0
    world.check()


@pytest.mark.requirement("C3", "C6")
def test_a_float_in_the_way_moves_around_a_fixed_page_in_it() -> None:
    """A load has reserved a page in the middle of it: the float may stretch and slide, and that page stays."""
    world = World(layout_of(THREE, 3000))
    pages = world.take(pages=9).pages
    world.free("window-4", pages[5:])
    reservation = Reservation("load 1")
    world.chain.uses.fix(reservation, {"window-4": pages[2:3]})
    place = world.places("window-4", pages[2:3])
    layout, start = world.layout, world.layout.band("window-4").start_byte(place[0])
    slots = (start - layout.prefix_bytes) // 112
    assert world.chain.units_fit({"state": slots})
    assert not world.chain.units_fit({"state": slots + 1}), "the fixed page is in the way"
    world.take(slots=slots)
    assert world.places("window-4", pages[2:3]) == place
    assert world.moved()["window-4"] == 2, "the two below it went above it"
    with pytest.raises(ChainError, match="reserved for a load that has not been submitted"):
        world.chain.free_pages("window-4", pages[2:3])
    world.chain.uses.unfix(reservation)
    assert world.chain.units_fit({"state": 1})
    world.take(slots=1)
    world.check()


@pytest.mark.requirement("C7")
def test_two_move_batches_under_one_event_both_return() -> None:
    """The second batch waits for the same forward as the first; one that came back alone would leak the other."""
    world = World(layout_of({"state": 112, "full": 48}, 4000))
    slots = world.take(slots=12).state_slots
    world.free("state", slots[:6])
    world.forward()
    assert world.chain.flush_opportunistic(max_moves=2) == 2
    assert world.chain.flush_opportunistic(max_moves=2) == 2
    assert world.chain.span("state").end_page == 8
    world.check()
    world.take(slots=2)
    world.process()
    world.take(pages=20, slots=4)
    world.check()
    assert world.chain.statistics().bands[0].vacated_units == 0


@pytest.mark.requirement("C7")
def test_a_flush_stops_at_what_a_forward_in_flight_writes() -> None:
    """It would have to wait for that forward; it does what it can instead."""
    world = World(layout_of({"state": 112, "full": 48}, 4000))
    slots = world.take(slots=6).state_slots
    world.free("state", slots[:3])
    world.forward(state=slots[4:5])
    assert world.chain.flush_opportunistic() == 1
    assert world.places("state", slots[3:]) == [3, 4, 0]
    assert world.steps.retired_through == -1
    world.process()
    assert world.chain.flush_opportunistic() == 2
    assert sorted(world.places("state", slots[3:])) == [0, 1, 2]
    world.check()


@pytest.mark.requirement("C7", "L7")
@pytest.mark.parametrize("kind", ["unknown writes", "pending", "held", "fixed", "received"])
def test_a_flush_leaves_alone_what_is_not_its_to_move(kind: str) -> None:
    """Each row of the table of stops."""
    world = World(layout_of({"state": 112, "full": 48}, 4000))
    slots = world.take(slots=4).state_slots
    if kind == "pending":
        world.forward()
    world.free("state", slots[:2])
    if kind == "unknown writes":
        world.forward(state=None)
    elif kind == "held":
        world.chain.uses.hold(ReceiveHold("receive 1"), {"state": slots[2:3]})
    elif kind == "fixed":
        world.chain.uses.fix("somebody", {"state": slots[3:]})
    elif kind == "received":
        world.chain.uses.begin(NetworkTransfer("receive 1", Access.WRITE), {"state": slots[3:]})
    before = books_of(world.chain)
    assert world.chain.flush_opportunistic() == 0
    assert books_of(world.chain) == before
    world.check()


@pytest.mark.requirement("C7", "L5")
def test_what_a_flush_leaves_behind_is_fenced_while_a_backup_reads_it() -> None:
    """The bytes leave the band at once; whoever writes them next has its stream wait for the backup."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 112 * 6))
    slots = world.take(slots=6).state_slots
    backup = world.copy("backup 1")
    world.chain.uses.begin(backup, {"state": slots[4:]})
    world.free("state", slots[:2])
    assert world.chain.flush_opportunistic() == 2
    assert world.chain.span("state").end_page == 4
    waits: list[object] = []
    wait_event = world.device.wait_event
    world.device.query_event = lambda event: False  # type: ignore[method-assign]  # so that nothing saves a wait
    world.device.wait_event = lambda stream, event: (waits.append(event), wait_event(stream, event))[1]  # type: ignore[method-assign,func-returns-value]
    world.take(pages=4)
    assert waits == [backup.finish]
    world.chain.uses.end(backup)
    world.check()


@pytest.mark.requirement("C6", "T3")
def test_relief_goes_around_a_send_and_leaves_its_pages_in_place() -> None:
    """A network engine has the addresses: what moves under it must be waited for on the host, so it does not move."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 40), waits=True)
    pages = world.take(pages=40).pages
    send = NetworkTransfer("send 1", Access.READ)
    world.chain.uses.begin(send, {"full": pages[6:8]})
    sent = world.places("full", pages[6:8])
    world.free("full", np.concatenate([pages[:4], pages[20:30]]))
    world.take(slots=4)
    assert world.waited == []
    assert world.places("full", pages[6:8]) == sent
    world.check()


@pytest.mark.requirement("C6", "C10", "T3")
def test_the_host_waits_for_transfers_only_where_no_layout_goes_around_them() -> None:
    """The one host wait of the allocator: without a waiter such a take is refused, and admission says the same."""
    for waits in (True, False):
        world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 40), waits=waits)
        pages = world.take(pages=40).pages
        send = NetworkTransfer("send 1", Access.READ)
        world.chain.uses.begin(send, {"full": pages[38:]})
        world.free("full", pages[:36])
        assert world.chain.units_fit({"state": 15}) is waits
        before = books_of(world.chain)
        if waits:
            world.take(slots=15)
            assert world.waited == [["send 1"]]
        else:
            refusal = world.chain.take(state_slots=15)
            assert isinstance(refusal, TakeRefusal)
            assert "the bytes are free, and fixed units or transfers stand in the way" in str(refusal)
            assert books_of(world.chain) == before
            world.chain.uses.end(send)
            world.take(slots=15)
        world.check()


@pytest.mark.requirement("C6", "T4")
@pytest.mark.parametrize("band", ["state", "window-4", "full"])
def test_held_units_move_and_their_hold_follows_where_only_they_are_in_the_way(band: str) -> None:
    """A hold ends by no wait: a take that waited until it did would wait for ever. Grow-up end, float, grow-down end."""
    world = World(layout_of(THREE, 80 + 48 + 4000), waits=True)
    pages, slots = world.take(pages=12).pages, world.take(slots=12).state_slots
    hold = ReceiveHold("receive 1")
    held = slots[-1:] if band == "state" else pages[-1:]
    world.chain.uses.hold(hold, {band: held})
    world.free("state", slots[:11])
    world.free("window-4", pages[:11])
    world.free("full", pages[:11])
    before = world.places(band, held)
    asked = {"full": 0} if band == "state" else {"state": 0}
    (name,) = asked
    while world.chain.units_fit({name: asked[name] + 1}):
        asked[name] += 1
    assert world.chain.ensure_capacity(asked) is None
    assert world.waited == [], "no transfer is open"
    assert world.places(band, held) != before
    assert world.chain.ledger(band).held_pages().tolist() == world.places(band, held)
    world.check()
    world.chain.uses.release_hold(hold)


@pytest.mark.requirement("C6", "T3", "T4")
def test_transfers_are_waited_for_before_held_units_move() -> None:
    """The peer's wait ends by itself; a hold's units would have to be published anew."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 40), waits=True)
    pages = world.take(pages=40).pages
    hold = ReceiveHold("receive 1")
    world.chain.uses.begin(NetworkTransfer("send 1", Access.READ), {"full": pages[39:]})
    world.chain.uses.hold(hold, {"full": pages[20:21]})
    where = world.places("full", pages[20:21])
    world.free("full", np.concatenate([pages[:20], pages[21:39]]))
    world.take(slots=8)
    assert world.waited == [["send 1"]]
    assert world.places("full", pages[20:21]) == where
    world.take(slots=8)
    assert world.waited == [["send 1"]]
    assert world.places("full", pages[20:21]) != where
    world.check()


@pytest.mark.requirement("C6")
def test_a_waiter_that_returns_early_is_an_internal_error() -> None:
    """Going on would overwrite bytes that a peer still reads."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 40), waits=True)
    world.wait = lambda transfers: None  # type: ignore[method-assign]  # it forgets to end them
    world.chain._relief._wait_for_transfers = world.wait
    pages = world.take(pages=40).pages
    world.chain.uses.begin(NetworkTransfer("send 1", Access.READ), {"full": pages[38:]})
    world.free("full", pages[:36])
    with pytest.raises(InvariantError, match=r"chain\.waiter_ends_transfers.*send 1"):
        world.chain.take(state_slots=15)


@pytest.mark.requirement("C6", "L4")
def test_a_send_that_still_reads_bytes_beyond_the_frontier_keeps_neighbours_out() -> None:
    """Its pages were moved away and the frontier retreated: the bytes are nobody's, and not free to write."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 112 * 8))
    slots = world.take(slots=8).state_slots
    send = NetworkTransfer("send 1", Access.READ)
    world.chain.uses.begin(send, {"state": slots[7:]})
    world.free("state", slots[:3])
    assert world.chain.flush_opportunistic() == 3
    assert world.chain.span("state").end_page == 5
    assert not world.chain.units_fit({"full": 1})
    assert world.chain.units_fit({"state": 2}), "the bytes before it are free"
    assert not world.chain.units_fit({"state": 3})
    world.check()
    world.chain.uses.end(send)
    assert world.chain.units_fit({"full": 6, "state": 0})
    world.take(pages=6)
    world.check()


@pytest.mark.requirement("C4", "C11")
def test_a_use_that_opens_or_closes_changes_answers_with_no_unit_changing_hands() -> None:
    """A snapshot kept over it would answer for a chain that is no more."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 40))
    pages = world.take(pages=40).pages
    world.free("full", pages[:36])
    uses, send = world.chain.uses, NetworkTransfer("send", Access.READ)
    for begin, end in (
        (lambda: uses.fix("x", {"full": pages[39:]}), lambda: uses.unfix("x")),
        (lambda: uses.begin(send, {"full": pages[39:]}), lambda: uses.end(send)),
    ):
        assert world.chain.units_fit({"state": 15})
        begin()
        assert not world.chain.units_fit({"state": 15})
        world.chain.verify_byte_accounting()
        end()
        assert world.chain.units_fit({"state": 15})


@pytest.mark.requirement("C11", "C13")
@pytest.mark.parametrize("cloned", [False, True])
def test_a_change_whose_epoch_does_not_move_is_found(cloned: bool) -> None:
    """Also by a clone of the chain that was asked; what may not move is kept under that epoch, too, and is looked up anew."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 40))
    chain = world.chain
    pages = world.take(pages=40).pages
    chain.uses.fix("x", {"full": pages[39:]})
    chain.uses.fix("y", {"full": pages[:1]})
    chain.keep_snapshots()
    if cloned:
        lengths = {f"ids:{band.name}": world.layout.id_count(band) for band in world.layout.bands}
        device = NumpyDevice(world.layout.arena_bytes)
        chain = chain.clone(device, device.create_mirrors(lengths))
    chain.verify_snapshots()
    epoch = chain.ledger("full").epoch
    chain.uses.unfix("x")
    chain.verify_snapshots()
    chain.ledger("full").epoch = epoch
    with pytest.raises(InvariantError, match=r"chain\.snapshot_is_fresh"):
        chain.verify_snapshots()


@pytest.mark.requirement("C6", "C5", "T4")
@pytest.mark.parametrize("waits", [False, True])
def test_held_pages_stay_when_they_can_and_move_with_their_hold_when_they_must(waits: bool) -> None:
    """Their ids are not published yet, so nobody need wait: the peer is told the new ones."""
    for must in (False, True):
        world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 40), waits=waits)
        pages = world.take(pages=40).pages
        hold = ReceiveHold("receive 1")
        held = pages[38:] if must else pages[:2]
        world.chain.uses.hold(hold, {"full": held})
        places = world.places("full", held)
        world.free("full", pages[2:36])
        world.take(slots=14)
        assert (world.places("full", held) != places) is must
        assert sorted(world.chain.ledger("full").held_pages().tolist()) == sorted(world.places("full", held))
        assert world.waited == []
        with pytest.raises(ChainError, match="held until a peer is told of them; release the hold first"):
            world.chain.free_pages("full", held)
        world.chain.uses.release_hold(hold)
        world.free("full", held)
        world.check()


@pytest.mark.requirement("C5", "C7", "C11")
def test_a_vacated_unit_under_a_send_takes_room_in_a_packed_end() -> None:
    """It is no hole and does not move: a target span that forgets it is one unit short, half-way through a take."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 112 * 10))
    slots = world.take(slots=10).state_slots
    outer, send = NetworkTransfer("outer", Access.READ), NetworkTransfer("send", Access.READ)
    world.chain.uses.begin(outer, {"state": slots[9:]})
    world.chain.uses.begin(send, {"state": slots[7:9]})
    world.free("state", np.concatenate([slots[:3], slots[9:]]))
    assert world.chain.flush_opportunistic(2) == 2
    assert world.chain.statistics().bands[0].vacated_units == 2
    world.chain.uses.end(outer)
    more = world.take(slots=1).state_slots
    world.free("state", slots[3:4])
    world.check()
    room = next(pages for pages in range(40, 0, -1) if world.chain.units_fit({"full": pages}))
    world.take(pages=room)
    world.check()
    assert world.places("state", more)
    world.chain.uses.end(send)
    world.check()


@pytest.mark.requirement("T6", "C5", "C11")
@pytest.mark.parametrize("waits", [False, True])
def test_a_vacated_unit_whose_send_fails_is_neither_free_nor_forgotten(waits: bool) -> None:
    """A forward and a send read it, the send is quarantined, the forward ends: it is withheld from then on."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 112 * 10), waits=waits)
    slots = world.take(slots=10).state_slots
    outer, send = NetworkTransfer("outer", Access.READ), NetworkTransfer("send", Access.READ)
    world.chain.uses.begin(outer, {"state": slots[9:]})
    world.chain.uses.begin(send, {"state": slots[7:9]})
    world.free("state", np.concatenate([slots[:2], slots[9:]]))
    world.forward()
    assert world.chain.flush_opportunistic(2) == 2
    world.chain.uses.quarantine(send)
    fits = [count for count in range(6) if world.chain.units_fit({"state": count})]
    world.process()
    world.check()
    assert fits == [count for count in range(6) if world.chain.units_fit({"state": count})]
    if fits[-1]:
        world.take(slots=fits[-1])
    world.check()
    world.chain.uses.unfix(send)
    assert world.chain.units_fit({"state": fits[-1] and 2})
    world.check()


@pytest.mark.requirement("C5", "K5")
def test_admission_credits_no_unit_that_a_transfer_keeps() -> None:
    """An eviction walk would empty the cache, and the take be refused all the same."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 10))
    pages = world.take(pages=10).pages
    world.chain.uses.begin(NetworkTransfer("send", Access.READ), {"full": pages[:5]})
    assert world.chain.admits({"full": 5}, {"full": 10})
    assert not world.chain.admits({"full": 6}, {"full": 10})


@pytest.mark.requirement("C7", "C10")
def test_a_flush_waits_behind_no_copy_stream() -> None:
    """Copy streams stand behind the running forward: a wait for one is a wait for it."""
    world = World(layout_of({"state": 112, "full": 48}, 4000))
    slots = world.take(slots=6).state_slots
    load, backup = world.copy("load", Access.WRITE), world.copy("backup")
    world.chain.uses.begin(load, {"state": slots[5:]})
    world.chain.uses.begin(backup, {"state": slots[:2]})
    world.free("state", slots[:2])
    world.device.query_event = lambda event: False  # type: ignore[method-assign]  # so that nothing saves a wait
    waits: list[object] = []
    world.device.wait_event = lambda stream, event: waits.append(event)  # type: ignore[method-assign]  # a watching device
    assert world.chain.flush_opportunistic() == 0, "the outermost is written by a load"
    world.chain.uses.end(load)
    assert world.chain.flush_opportunistic() == 0, "the holes are read by a backup"
    world.chain.uses.end(backup)
    assert world.chain.flush_opportunistic() == 2
    assert waits == []


@pytest.mark.requirement("A5", "L5")
def test_a_unit_taken_without_zeroing_is_cleared_of_a_backup_that_reads_it() -> None:
    """The forward that writes it stands behind the schedule stream, which must wait for the copy."""
    world = World(layout_of({"state": 112, "full": 48}, 4000))
    slots = world.take(slots=3).state_slots
    backup = world.copy("backup")
    world.chain.uses.begin(backup, {"state": slots[:1]})
    world.free("state", slots[:1])
    world.device.query_event = lambda event: False  # type: ignore[method-assign]  # so that nothing saves a wait
    waits: list[object] = []
    world.device.wait_event = lambda stream, event: waits.append(event)  # type: ignore[method-assign]  # a watching device
    world.chain.take(state_slots=1, bands={"state": BandTake(unwritten=ids())})
    assert waits == [backup.finish]


@pytest.mark.requirement("C8")
def test_holes_that_make_nobody_wait_for_a_forward_come_first() -> None:
    """The nearest hole carries bytes that a running forward reads; one further away does not."""
    world = World(layout_of({"state": 112, "full": 48}, 4000))
    slots = world.take(slots=8).state_slots
    world.chain.uses.fix("corner", {"state": slots[7:]})
    world.free("state", slots[:2])
    recorded = world.forward()
    usage = world.chain.ledger("state")
    assert world.chain.flush_opportunistic() == 0, "the outermost is fixed"
    # A neighbour gave back its page 1, which the forward still reads, and the span has come to lie over those bytes.
    neighbour = world.chain.ledger("full")
    neighbour.vacate(ids(1))
    neighbour.fence(ids(1))
    assert usage.hazards_on(ids(0)).newest_forward == recorded.forward
    band = world.chain._bands["state"]
    assert band._take_holes(1).tolist() == [1]


@pytest.mark.requirement("C2", "C3")
def test_settled_units_at_an_open_side_are_given_back() -> None:
    """A span that ended in holes would hide bytes from its neighbour, who would move pages for them."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 112 * 6))
    slots = world.take(slots=6).state_slots
    world.forward()
    world.free("state", slots[2:])
    world.take(slots=1)
    assert world.chain.span("state").end_page == 3
    world.take(pages=6)
    assert world.chain.statistics().rearrangements == 0
    world.process()
    world.check()


@pytest.mark.requirement("C2", "C6")
def test_a_relief_gives_back_what_it_settles_before_it_plans() -> None:
    """Then the neighbour grows there, and nothing need be rearranged."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 112 * 6))
    slots = world.take(slots=6).state_slots
    world.forward()
    world.free("state", slots[2:])
    world.take(pages=8)
    assert world.chain.span("state").end_page == 2
    assert world.chain.statistics().rearrangements == 0
    world.process()
    world.check()


@pytest.mark.requirement("C3")
def test_a_float_gives_back_holes_at_both_sides() -> None:
    """Its neighbours grow toward it from either side."""
    world = World(layout_of(THREE, 4000))
    pages = world.take(pages=6).pages
    before = world.chain.span("window-4")
    order = np.argsort(world.chain.physical_units("window-4", pages))
    world.free("window-4", pages[order[[0, -1]]])
    after = world.chain.span("window-4")
    assert (after.first_page, after.end_page) == (before.first_page + 1, before.end_page - 1)
    world.check()


@pytest.mark.requirement("L1", "L3")
def test_pending_units_do_not_return_before_their_forward_is_processed() -> None:
    """They would be handed out under it."""
    world = World(layout_of({"state": 112, "full": 48}, 4000))
    slots = world.take(slots=2).state_slots
    recorded = world.forward()
    world.free("state", slots)
    with pytest.raises(InvariantError, match=r"forward\.pending_returns_after_processing"):
        world.chain.forward_processed(recorded.forward)
    world.process()
    world.check()


@pytest.mark.requirement("A5", "L8")
def test_mistakes_with_units_under_transfers_are_refused_before_anything_changes() -> None:
    """Copies into what a send reads, out of what a receive writes, zeroing of what is fixed."""
    world = World(layout_of({"state": 112, "full": 48}, 4000))
    slots = world.take(slots=4).state_slots
    send, receive = NetworkTransfer("send", Access.READ), NetworkTransfer("receive", Access.WRITE)
    world.chain.uses.begin(send, {"state": slots[:1]})
    world.chain.uses.begin(receive, {"state": slots[1:2]})
    owed = world.chain.take(state_slots=1, bands={"state": BandTake(unwritten=ids())})
    assert isinstance(owed, Taken)
    world.chain.uses.fix("load", {"state": owed.state_slots})
    before = books_of(world.chain)
    for call, text in (
        (lambda: world.chain.copy_state_slots(slots[3:], slots[:1]), "fixed, or under a transfer"),
        (lambda: world.chain.copy_state_slots(slots[1:2], slots[3:]), "still write some of them"),
        (lambda: world.chain.pay_zero_debt(owed), "fixed, or under a transfer"),
        (lambda: world.chain.uses.begin(send, {"state": ids(1, 1)}), "one is named twice"),
        (lambda: world.chain.uses.begin(send, {}), "no unit at all"),
        (lambda: world.chain.free_state_slots([1]), "found list"),  # type: ignore[arg-type]  # the mistake
        (lambda: world.chain.flush_opportunistic(-1), "cannot flush at most -1"),
    ):
        with pytest.raises(ChainError, match=text):
            call()
        assert books_of(world.chain) == before
    world.chain.uses.unfix("load")
    world.chain.pay_zero_debt(owed)
    assert world.chain.statistics().owed_units == 0


@pytest.mark.requirement("K5", "L4")
def test_units_that_would_not_come_free_are_told_until_their_use_is_over() -> None:
    """Whoever counts what it could let go of leaves these out; a host copy that reads keeps nothing."""
    world = World(layout_of({"state": 112, "full": 48}, 4000))
    slots = world.take(slots=5).state_slots
    uses = world.chain.uses
    send, event = NetworkTransfer("send", Access.READ), ImmediateEvent(world.device.schedule_stream)
    backup = HostCopy("backup", Access.READ, event)
    hold = ReceiveHold("receive")
    begins = [
        lambda: uses.begin(send, {"state": slots[:1]}),
        lambda: uses.fix("load", {"state": slots[1:2]}),
        lambda: uses.hold(hold, {"state": slots[2:3]}),
        lambda: uses.begin(backup, {"state": slots[3:4]}),
    ]
    found, moments = [uses.keeps("state", slots).tolist()], [uses.moment]
    for begin in begins:
        begin()
        found.append(uses.keeps("state", slots).tolist())
        moments.append(uses.moment)
    assert found == [[place < min(count, 3) for place in range(5)] for count in range(5)]
    assert len(set(moments)) == 5
    for end in (lambda: uses.end(send), lambda: uses.unfix("load"), lambda: uses.release_hold(hold)):
        end()
        moments.append(uses.moment)
    assert not uses.keeps("state", slots).any()
    assert len(set(moments)) == 8


@pytest.mark.requirement("C1", "C5")
def test_a_waiter_that_frees_what_the_take_names_is_noticed() -> None:
    """It was checked before the wait; bound all the same, the page would be minted and bound a second time."""
    world = World(layout_of({"4": 112, "full": 48}, 112 + 48 + 12 * 112 + 40 * 48 + 112), waits=True)
    pages = world.take(pages=12).pages
    more = world.chain.take(pages=28, bands={})
    assert isinstance(more, Taken)
    send = NetworkTransfer("send", Access.READ)
    world.chain.uses.begin(send, {"full": more.pages[27:]})
    world.free("window-4", pages)
    world.chain.free_pages("full", more.pages[:27])
    wait = world.wait

    def wait_and_free(transfers: Sequence[NetworkTransfer]) -> None:
        wait(transfers)
        world.free("full", pages[:1])

    world.chain._relief._wait_for_transfers = wait_and_free
    with pytest.raises(ChainError, match="of virtual pages that are not minted"):
        world.chain.take(pages=12, bands={"window-4": BandTake(held=pages[:1])})
    assert world.waited


@pytest.mark.requirement("T6", "C5")
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("sends", [1, 2])
def test_what_a_move_left_behind_under_a_failed_send_serves_no_take(waits: bool, sends: int) -> None:
    """It is vacated as long as a forward may read it, and fixed: neither counts as free, whoever else reads it too."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 112 * 8), waits=waits)
    slots, uses = world.take(slots=8).state_slots, world.chain.uses
    transfers = [NetworkTransfer(f"send {number}", Access.READ) for number in range(sends)]
    for transfer in transfers:
        uses.begin(transfer, {"state": slots[6:7]})
    uses.fix("somebody", {"state": slots[7:]})
    world.free("state", slots[7:])
    world.free("state", slots[:1])
    world.forward()
    assert world.chain.flush_opportunistic() == 1
    assert world.chain.span("state").page_count == 8, "the fixed slot keeps the frontier"
    uses.quarantine(transfers[0])
    for _ in range(2):
        assert not world.chain.units_fit({"state": 1})
        assert isinstance(world.chain.take(state_slots=1), TakeRefusal)
        assert not world.chain.admits({"state": 2}, {"state": 1})
        assert world.chain.admits({"state": 1}, {"state": 1})
        world.check()
        world.process() if world.flying else None
    for transfer in transfers[1:]:
        uses.end(transfer)
    uses.unfix(transfers[0])
    world.take(slots=1)
    assert not world.chain.units_fit({"state": 1})
    world.check()


@pytest.mark.requirement("T6", "C6")
def test_units_of_a_failed_transfer_are_nobodys_until_it_is_proved_dead() -> None:
    """They may be freed and moved away from; they are not handed out, and no plan waits for them."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 20), waits=True)
    pages = world.take(pages=20).pages
    send = NetworkTransfer("send 1", Access.READ)
    world.chain.uses.begin(send, {"full": pages[4:6]})
    places = world.places("full", pages[4:6])
    world.chain.uses.quarantine(send)
    world.free("full", pages)
    statistics = world.chain.statistics().bands[1]
    assert (statistics.live_units, statistics.withheld_units) == (0, 2)
    world.check()
    world.take(pages=world.chain.estimated_units_available("full") - 2)
    assert not set(world.chain.live_units("full").tolist()) & set(places)
    assert not world.chain.units_fit({"full": 1})
    assert world.waited == []
    world.chain.uses.unfix(send)
    world.take(pages=2)
    world.check()


@pytest.mark.requirement("L4", "C6")
def test_units_freed_under_a_transfer_come_back_when_it_ends() -> None:
    """A request that ends while its pages are being sent: they are free to nobody until the engine is done."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 20))
    pages = world.take(pages=20).pages
    send = NetworkTransfer("send 1", Access.READ)
    world.chain.uses.begin(send, {"full": pages})
    world.forward()
    world.free("full", pages[:10])
    assert world.chain.statistics().bands[1].withheld_units == 10
    assert not world.chain.units_fit({"full": 1})
    world.chain.uses.end(send)
    assert world.chain.statistics().bands[1].pending_units == 10, "the forward in flight may still read them"
    world.take(pages=10)
    world.process()
    world.check()
    with pytest.raises(ChainError, match="no band has a use by"):
        world.chain.uses.end(send)


@pytest.mark.requirement("T8", "C5")
def test_a_preallocation_leaves_room_for_what_was_promised() -> None:
    """A decode node's pending transfers hold a promise that counts, though no unit of it is taken yet."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 20))
    assert world.chain.prealloc_fits({"full": 10}, {"full": 10})
    assert not world.chain.prealloc_fits({"full": 11}, {"full": 10})
    assert not world.chain.prealloc_fits({"full": 10}, {"state": 5})


@pytest.mark.requirement("C7")
def test_moves_go_from_the_frontier_inward_and_in_runs() -> None:
    """Fewest pages moved for the bytes won, and a copy that is nearly one block."""
    world = World(layout_of({"state": 64, "full": 48}, 20_000))
    slots = world.take(slots=64).state_slots
    world.free("state", slots[8:24])
    copies: list[tuple[list[int], list[int]]] = []
    copy_units = world.device.copy_units

    def note(stream: object, grid: object, sources: IntArray, targets: IntArray) -> None:
        copies.append((sources.tolist(), targets.tolist()))
        copy_units(stream, grid, sources, targets)  # type: ignore[arg-type]  # as it was called

    world.device.copy_units = note  # type: ignore[assignment,method-assign]  # a watching device
    assert world.chain.flush_opportunistic(max_moves=10) == 10
    assert copies == [(list(range(54, 64)), list(range(8, 18)))]
    assert world.chain.span("state").end_page == 54
    world.check()


@pytest.mark.requirement("C7", "L3")
def test_vacated_units_inside_the_span_are_free_once_their_readers_are_waited_for() -> None:
    """The frontier cannot pass a unit that a send still reads, so what moved away stays inside, and is capacity all the same."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 112 * 6))
    slots = world.take(slots=6).state_slots
    world.chain.uses.begin(NetworkTransfer("send 1", Access.READ), {"state": slots[5:]})
    world.free("state", np.concatenate([slots[:2], slots[5:]]))
    recorded = world.forward()
    assert world.chain.flush_opportunistic() == 2
    statistics = world.chain.statistics().bands[0]
    assert (statistics.vacated_units, statistics.withheld_units, statistics.span_units) == (2, 1, 6)
    assert world.steps.retired_through == -1
    assert world.chain.units_fit({"state": 2})
    assert not world.chain.units_fit({"state": 3})
    world.take(slots=1)
    assert world.steps.retired_through == recorded.forward, "the schedule stream waits for the reader"
    world.take(slots=1)
    world.process()
    world.check()


@pytest.mark.requirement("C6", "C7")
def test_a_relief_waits_for_the_newest_reader_of_any_band() -> None:
    """Bands are flushed at different times, so what they left is read by different forwards."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 112 * 6 + 48 * 8))
    slots, pages = world.take(slots=6).state_slots, world.take(pages=8).pages
    for name, units in (("state", slots), ("full", pages)):
        # The outermost unit is free and stays, so that what is moved lies inside the span.
        world.chain.uses.begin(NetworkTransfer(f"send of {name}", Access.READ), {name: units[-1:]})
        world.free(name, np.concatenate([units[:2], units[-1:]]))
    hold = ReceiveHold("a receive")
    world.chain.uses.hold(hold, {"full": pages[3:4]})
    world.forward()
    assert world.chain.flush_opportunistic() == 2
    world.chain.uses.release_hold(hold)
    newest = world.forward()
    assert world.chain.flush_opportunistic() == 2
    assert [band.vacated_units for band in world.chain.statistics().bands] == [2, 2]
    world.take(pages=2)
    assert world.steps.retired_through == newest.forward
    world.check()


@pytest.mark.requirement("L8", "C6")
@pytest.mark.parametrize("level", CheckLevel)
def test_a_band_that_is_packed_with_units_pending_is_noticed(
    level: CheckLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pending unit is no hole yet; the check can fail: here bands are not settled before they are packed."""
    layout = layout_of({"state": 112, "full": 48}, 48 + 48 * 40)
    device, steps = NumpyDevice(layout.arena_bytes), ForwardSteps()
    mirrors = device.create_mirrors({f"ids:{band.name}": layout.id_count(band) for band in layout.bands})
    chain = ChainAllocator(layout, device, mirrors, steps, checks=InvariantChecks(level))
    taken = chain.take(pages=40)
    assert isinstance(taken, Taken)
    chain.free_pages("full", taken.pages[:20])
    steps.forward_recorded(steps.forward_launched(), device.record_event(device.forward_stream))
    chain.free_pages("full", taken.pages[20:24])
    monkeypatch.setattr("kvtide.chain.band.Band.settle_all", lambda band: None)
    if level is CheckLevel.STRICT:
        with pytest.raises(InvariantError, match=r"band\.geometry_ready"):
            chain.ensure_capacity({"state": 3})
    else:
        chain.ensure_capacity({"state": 3})


@pytest.mark.requirement("C1", "C2")
def test_a_window_smaller_than_a_page_serves_many_running_requests() -> None:
    """Each holds one window page at a time, and gives it up as it takes the next: no more than there are requests, ever."""
    layers = [
        KVLayerDecl(0, (KVPart(MLAGeometry(16, 0, DType.UINT8), FullLifetime()),)),
        KVLayerDecl(1, (KVPart(MLAGeometry(32, 0, DType.UINT8), WindowLifetime(4)),)),
    ]
    plan = plan_kv_storage(layers, page_tokens=16)
    requests, steps = 64, 5
    full, window = (plan.sub_pool(name).unit.unit_bytes for name in ("full", "window-4"))
    world = World(lay_out(plan, full + window + requests * (steps * full + 2 * window)))
    last = world.take(pages=requests).pages
    for _ in range(steps - 1):
        pages = world.take(pages=requests).pages
        world.free("window-4", last)
        assert world.chain.statistics().bands[0].live_units == requests
        last = pages
    assert not world.chain.units_fit({"full": 1, "window-4": requests + 1})
    world.check()


@pytest.mark.requirement("C5", "K5")
def test_a_page_that_is_both_fixed_and_sent_is_kept_from_admission_once() -> None:
    """Counted twice, it would take the credit of a page that can be evicted."""
    world = World(layout_of({"state": 112, "full": 48}, 48 + 48 * 10))
    pages = world.take(pages=10).pages
    world.chain.uses.begin(NetworkTransfer("send", Access.READ), {"full": pages[:4]})
    world.chain.uses.fix("load", {"full": pages[2:6]})
    assert world.chain.admits({"full": 4}, {"full": 4})
    assert not world.chain.admits({"full": 5}, {"full": 6})
    world.free("full", pages[6:])
    world.take(pages=4)
