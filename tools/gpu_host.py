"""What the host does beside the device: it never waits, first calls make nothing, it counts faults, it keeps copies of pages and
of rows.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from gpu_far import layout_past
from gpu_place import Place
from gpu_programs import same_bytes
from gpu_walk import CHUNK, CONTEXT, plan
from kvtide.arena import KVArena, RoutedKVCache, host_layout
from kvtide.device import IntArray, UnitGrid
from kvtide.ledger import CheckLevel, InvariantError
from kvtide.storage import AdmissionRefusal, KVStorage, PreparedStep

ASLEEP_CYCLES = 400_000_000
"""Two tenths of a second, a hundred times what the host takes for the calls of a check."""

PAGES = 5


def host_does_not_wait(place: Place) -> str:
    """Move, zero, upload and send while the stream sleeps; in words, what the first of them made.

    Raises `AssertionError` when one returned only after the stream had woken, or compiled or allocated something.
    """
    arena = KVArena.allocate(1 << 20, place.memory)
    device = place.device(arena)
    mirror = device.create_mirrors({"ids": 1000})["ids"]
    grid, ids = UnitGrid(0, 1024), np.arange(50)
    device.prewarm([grid])
    place.synchronize()
    before = place.footprint(device)
    mirror.stage(ids, ids + 7)
    stream = device.schedule_stream
    place.keep_busy(device, stream, ASLEEP_CYCLES)
    asleep = device.record_event(stream)
    calls: dict[str, Callable[[], object]] = {
        "a move": lambda: device.copy_units(stream, grid, ids + 100, ids),
        "a move over itself": lambda: device.copy_units(stream, grid, ids + 1, ids),
        "zeroing": lambda: device.zero_units(stream, grid, ids + 200),
        "an upload": lambda: device.upload(stream),
    }
    for what, call in calls.items():
        call()
        assert not device.query_event(asleep), f"the host waited in {what}"
    after = place.footprint(device)
    assert after == before, f"the first calls made something: {before} before, {after} after"
    device.send(stream, [ids])
    assert not device.query_event(asleep), "the host waited in sending ids"
    device.wait_on_host(device.record_event(stream))
    assert device.query_event(asleep), "the host did not wait for an event"
    assert device.tables["ids"][:50].tolist() == (ids + 7).tolist(), "an upload was not there after the wait"
    return f"{len(calls) + 1} calls returned while the stream slept; before and after the first: {after}"


def faults_are_counted(place: Place) -> str:
    """Translate an id that no table has, strictly; in words, what is said of it. Raises `AssertionError` when nothing is."""
    storage = place.storage(
        plan(), 300_000, rows=4, context=CONTEXT, chunk=CHUNK, check_level=CheckLevel.STRICT
    )
    _one_forward(place, storage, wrong_id=False)
    storage.verify_idle()
    _one_forward(place, storage, wrong_id=True)
    try:
        storage.verify_idle()
    except InvariantError as error:
        return str(error)
    raise AssertionError("an id outside its table was translated, and nobody said so")


def _one_forward(place: Place, storage: KVStorage, *, wrong_id: bool) -> None:
    """Admit a request, resolve the ids of its first forward, let it go."""
    device = storage.device
    rows = storage.admit([5], [1])
    assert not isinstance(rows, AdmissionRefusal), str(rows)
    step = storage.prepare_step(rows, [5])
    assert isinstance(step, PreparedStep), str(step)
    unresolved = storage.launch_forward(step)
    if wrong_id:
        with device.on_stream(device.forward_stream):
            device.tables["rows"].view(4, -1)[int(rows[0]), 0] = 10**6
    unresolved.resolve()
    storage.record_forward(step)
    assert step.done_event is not None
    device.wait_on_host(step.done_event)
    storage.forward_processed(step)
    storage.advance(step)
    storage.release(rows)
    place.synchronize()


def pages_on_the_host(place: Place) -> str:
    """Copy pages of every band to host pools and back to others, as blocks; in words, how many bytes. Raises `AssertionError`
    when a view there or here shows other bytes.
    """
    layout = layout_past(19, 0)
    arena = KVArena.allocate(layout.arena_bytes, place.memory)
    draw = np.random.default_rng(7)
    arena.bytes.copy_(torch.from_numpy(draw.integers(0, 256, layout.arena_bytes, np.uint8)))
    routed = RoutedKVCache(arena, layout)
    copied = 0
    for band in layout.bands:
        pool_layout = host_layout(band, PAGES)
        pool = KVArena(torch.zeros(pool_layout.arena_bytes, dtype=torch.uint8, pin_memory=place.is_gpu))
        kept = RoutedKVCache(pool, pool_layout)
        first, free = band.first_page, band.first_page + PAGES
        here = arena.bytes[band.start_byte(first) : band.start_byte(first + PAGES)]
        there = arena.bytes[band.start_byte(free) : band.start_byte(free + PAGES)]
        pool.bytes.copy_(here)
        there.copy_(pool.bytes)
        for layer in {plane.layer for plane in band.planes}:
            (mirrored,) = kept.views(layer)
            (view,) = [each for each in routed.views(layer) if each.band == band.name]
            for name, plane in view.planes.items():
                for page in (first, free):
                    found = plane[page : page + PAGES]
                    assert same_bytes(found, mirrored.planes[name]), (
                        f"plane {name!r} of band {band.name!r} from page {page}"
                    )
        copied += pool.byte_count
    return f"{copied} bytes of {len(layout.bands)} bands there and back, the same in every view"


def row_to_the_host_and_back(place: Place) -> str:
    """Back a row up while its forward runs late, give its pages to another, restore it; in words, how many bytes. Raises
    `AssertionError` when what comes back is not what that forward wrote.
    """
    storage = place.storage(plan(), 300_000, rows=4, context=CONTEXT, chunk=CHUNK)
    device, copied = storage.device, 0
    draw = np.random.default_rng(7)
    for turn in range(3):
        rows = storage.admit([CHUNK], [4])
        assert not isinstance(rows, AdmissionRefusal), str(rows)
        written: dict[str, torch.Tensor] = {}
        step = _launched(storage, rows, CHUNK)
        writes = []
        for name, units in _units_of(storage, int(rows[0])).items():
            raw = draw.integers(0, 256, (len(units), storage.layout.band(name).unit_bytes), np.uint8)
            written[name], target = torch.from_numpy(raw), _in_arena(storage, name)
            ids, values = torch.from_numpy(units).to(target.device), written[name].to(target.device)
            writes.append(partial(target.index_copy_, 0, ids, values))
        # What is written has come to the GPU; that it is written comes late.
        place.synchronize()
        place.keep_busy(device, device.forward_stream, ASLEEP_CYCLES // 10)
        for write in writes:
            place.queue(device, device.forward_stream, write)
        storage.record_forward(step)
        backups = storage.retract_to_host(rows)
        assert step.done_event is not None
        other = storage.admit([CHUNK], [4])
        assert not isinstance(other, AdmissionRefusal), str(other)
        storage.abandon(_launched(storage, other, CHUNK))
        back = storage.restore(backups)
        assert not isinstance(back, AdmissionRefusal), str(back)
        device.wait_on_host(step.done_event)
        storage.forward_processed(step)
        storage.advance(step)
        storage.abandon(_launched(storage, back, 1))
        place.synchronize()
        for name, units in _units_of(storage, int(back[0]), CHUNK).items():
            assert same_bytes(_read(storage, name, units), written[name][-len(units) :]), (
                f"band {name!r}, turn {turn}"
            )
        copied += backups[0].byte_count
        storage.release(np.concatenate([other, back]))
    return f"{copied} bytes of rows there and back, under forwards and under their pages' next owners"


def _launched(storage: KVStorage, rows: IntArray, count: int) -> PreparedStep:
    """A step whose metadata phase is queued."""
    step = storage.prepare_step(rows, [count])
    assert isinstance(step, PreparedStep), str(step)
    storage.launch_forward(step).resolve()
    return step


def _units_of(storage: KVStorage, row: int, tokens: int | None = None) -> dict[str, IntArray]:
    """Physical units of a row by band, of its first `tokens`, oldest first; what a window has given up is left out."""
    requests = storage.requests
    count = requests.page_counts[row] if tokens is None else -(-tokens // storage.plan.page_tokens)
    virtual = requests.pages[row, :count].astype(np.int64)
    found = {}
    for pool in storage.plan.sub_pools:
        is_state = pool.page_tokens is None
        units = storage.chain.physical_units(
            pool.name, requests.state_slots[row : row + 1] if is_state else virtual
        )
        found[pool.name] = units if is_state else units[units > 0]
    return found


def _in_arena(storage: KVStorage, name: str) -> torch.Tensor:
    """Units of a band, `[unit_count, unit_bytes]`."""
    band, raw = storage.layout.band(name), storage.device.arena.bytes
    count = (raw.numel() - band.origin_bytes) // band.unit_bytes
    return raw[band.origin_bytes :][: count * band.unit_bytes].view(count, band.unit_bytes)


def _read(storage: KVStorage, name: str, units: IntArray) -> torch.Tensor:
    source = _in_arena(storage, name)
    return source[torch.from_numpy(units).to(source.device)].cpu()
