"""Faults to plant: each breaks one rule of the shipped code, or of the scheduler, at run time.

They are planted at public seams where there is one, so that they outlive a rewrite of what lies behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import pytest

from kvtide.chain import ChainAllocator, ChainError
from kvtide.device import IntArray, ModelledDevice, StagedMirror, Stream
from kvtide.ledger import Clear, Consumer, FencedBytes, ForwardSteps, Hazard, PageUsage, PendingPages
from kvtide.simulation import Rank, scheduler

Patch = pytest.MonkeyPatch


@attrs.frozen
class Canary:
    """A fault, and the check that must find it."""

    check: str
    plant: Callable[[Patch], None]
    seeds: int = 16
    """Runs it may take."""


def without(owner: Any, name: str, answer: Any = None) -> Callable[[Patch], None]:
    """A method that does nothing."""
    return lambda patch: patch.setattr(owner, name, lambda *args, **named: answer)


def preceded(patch: Patch, owner: Any, name: str, before: Callable[..., Any]) -> None:
    """Call `before` with the arguments of every call to a method, then the method."""
    original = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        before(*args, **named)
        return original(*args, **named)

    patch.setattr(owner, name, call)


def disabled_within(owner: Any, name: str, inner_owner: Any, inner_name: str) -> Callable[[Patch], None]:
    """A method that does nothing while another runs."""

    def plant(patch: Patch) -> None:
        outer, inner = getattr(owner, name), getattr(inner_owner, inner_name)
        running: list[str] = []

        def call(*args: Any, **named: Any) -> Any:
            running.append(name)
            try:
                return outer(*args, **named)
            finally:
                running.pop()

        def call_unless_running(*args: Any, **named: Any) -> Any:
            return None if running else inner(*args, **named)

        patch.setattr(owner, name, call)
        patch.setattr(inner_owner, inner_name, call_unless_running)

    return plant


def without_waits_in(owner: Any, name: str) -> Callable[[Patch], None]:
    """No stream waits for anything during a method; the ledger is told that it did."""
    return disabled_within(owner, name, ModelledDevice, "wait_event")


def on_rank_1(name: str, replacement: Callable[..., Any]) -> Callable[[Patch], None]:
    """Another method of the allocator, on the second rank alone."""

    def plant(patch: Patch) -> None:
        create = Rank.__init__

        def create_and_replace(rank: Rank, *args: Any) -> None:
            create(rank, *args)
            if rank.place == 1:
                setattr(rank.chain, name, replacement)

        patch.setattr(Rank, "__init__", create_and_replace)

    return plant


# ── contents ──


def moves_mix_their_pairs_up(patch: Patch) -> None:
    copy = ModelledDevice.copy_units

    def copy_backwards(
        device: ModelledDevice, stream: Stream, grid: Any, sources: IntArray, targets: IntArray
    ) -> None:
        copy(device, stream, grid, sources[::-1].copy(), targets)

    patch.setattr(ModelledDevice, "copy_units", copy_backwards)


def rehomings_mix_their_pairs_up(patch: Patch) -> None:
    rehome = ChainAllocator.rehome_window

    def rehome_backwards(chain: ChainAllocator, name: str, sources: IntArray, targets: IntArray) -> None:
        rehome(chain, name, sources[::-1].copy(), targets)

    patch.setattr(ChainAllocator, "rehome_window", rehome_backwards)


# ── order ──


def settles_wait_for_nothing(patch: Patch) -> None:
    settle = PendingPages.settle
    patch.setattr(PendingPages, "settle", lambda pages, count: (settle(pages, count)[0], None))


def freed_units_return_a_forward_early(patch: Patch) -> None:
    release = PendingPages.release_through
    patch.setattr(PendingPages, "release_through", lambda pages, forward: release(pages, forward + 1))


def forwards_do_not_wait_for_the_upload(patch: Patch) -> None:
    patch.setattr(scheduler, "bring_up_to_date", lambda rank: rank.device.upload(rank.device.schedule_stream))


def staging_returns_at_once(patch: Patch) -> None:
    upload = ModelledDevice.upload

    def upload_and_return(device: ModelledDevice, stream: Stream) -> int:
        count = upload(device, stream)
        device.return_staging()
        return count

    patch.setattr(ModelledDevice, "upload", upload_and_return)


def weakened(consumer: Consumer, hazard: Hazard) -> Callable[[Patch], None]:
    """One cell of `CLEARANCE` says that nobody waits."""

    def plant(patch: Patch) -> None:
        answers = sys.modules["kvtide.ledger.clearing"].__dict__["_ANSWERS"]
        row = answers[consumer].copy()
        row[hazard] = Clear.NONE
        patch.setitem(answers, consumer, row)

    return plant


def moves_leave_nothing_behind(patch: Patch) -> None:
    patch.setattr(PageUsage, "vacate", lambda usage, sources, targets=None: sources)


# ── the host ──


def takes_wait_on_the_host(patch: Patch) -> None:
    def wait(chain: ChainAllocator, **_: Any) -> None:
        if chain.steps.newest_recorded is not None:
            chain._device.wait_on_host(chain.steps.newest_recorded.event)

    preceded(patch, ChainAllocator, "take", wait)


def frees_read_a_mirror(patch: Patch) -> None:
    def read(chain: ChainAllocator, *_: Any) -> None:
        assert isinstance(chain._device, ModelledDevice)
        assert chain._device.tables

    preceded(patch, ChainAllocator, "free_pages", read)


# ── ranks ──


def a_fired_event_changes_a_choice(patch: Patch) -> None:
    def process_early(chain: ChainAllocator, **_: Any) -> None:
        newest, device = chain.steps.newest_recorded, chain._device
        if newest is not None and device.query_event(newest.event):
            for band in chain._bands:
                band.release_pending_through(newest.forward)

    preceded(patch, ChainAllocator, "take", process_early)


# ── books ──


def a_free_counts_one_too_many(patch: Patch) -> None:
    free = ChainAllocator.free_pages

    def free_and_miscount(chain: ChainAllocator, name: str, virtual: IntArray) -> None:
        free(chain, name, virtual)
        if len(virtual) > 1:
            chain._bands[name].live_count -= 1

    patch.setattr(ChainAllocator, "free_pages", free_and_miscount)


# ── answers ──


def grown_in_place(relief: Any, asked: Any) -> Any:
    return relief._grow_in_place(asked)


def takes_wait_before_they_are_refused(patch: Patch) -> None:
    def wait(chain: ChainAllocator, **_: Any) -> None:
        device = chain._device
        device.wait_event(device.schedule_stream, device.record_event(device.forward_stream))

    preceded(patch, ChainAllocator, "take", wait)


def flushes_wait(patch: Patch) -> None:
    def wait(chain: ChainAllocator, *_: Any) -> None:
        newest, device = chain.steps.newest_recorded, chain._device
        if newest is not None:
            device.wait_event(device.schedule_stream, newest.event)
            chain.steps.wait_queued(newest.event)

    preceded(patch, ChainAllocator, "flush_opportunistic", wait)


def errors_are_swallowed(patch: Patch) -> None:
    free = ChainAllocator.free_pages

    def free_or_not(chain: ChainAllocator, name: str, virtual: IntArray) -> None:
        try:
            free(chain, name, virtual)
        except ChainError:
            return

    patch.setattr(ChainAllocator, "free_pages", free_or_not)


CANARIES: Mapping[str, Canary] = {
    "units are handed out as they are": Canary("cross_dtype_bytes", without(ModelledDevice, "zero_units")),
    "a debt is not paid": Canary("cross_dtype_bytes", without(ChainAllocator, "pay_zero_debt"), seeds=60),
    "a debt outlives the free of its unit": Canary(
        "unexpected_error",
        lambda patch: patch.setattr("kvtide.chain.takes.ZeroDebts.forget", lambda *_: None),
    ),
    "moves mix their pairs up": Canary("lost_write", moves_mix_their_pairs_up),
    "a settle does not wait": Canary("unordered_overlap", settles_wait_for_nothing),
    "takes do not wait": Canary("unordered_overlap", without_waits_in(ChainAllocator, "take")),
    "freed units return a forward early": Canary(
        "unordered_overlap", freed_units_return_a_forward_early, seeds=60
    ),
    "a state copy does not wait for its writer": Canary(
        "unordered_overlap", without_waits_in(ChainAllocator, "copy_state_slots")
    ),
    "the ledger is not told what forwards write": Canary(
        "unordered_overlap", without(ChainAllocator, "forward_recorded")
    ),
    "zeroing does not wait for readers of what a move left": Canary(
        "unordered_overlap", weakened(Consumer.ZERO, Hazard.FORWARD), seeds=80
    ),
    "moves leave nothing behind": Canary("unordered_overlap", moves_leave_nothing_behind, seeds=80),
    "readers of what has left a band are forgotten": Canary(
        "unordered_overlap", without(FencedBytes, "add"), seeds=80
    ),
    "an abort does not wait for what was queued": Canary(
        "unordered_overlap", without(scheduler, "wait_for_abandoned"), seeds=60
    ),
    "nothing is held back behind a read end": Canary(
        "unordered_overlap", without(scheduler, "hold_back_uploads")
    ),
    "a forward does not wait for its upload": Canary(
        "unordered_overlap", forwards_do_not_wait_for_the_upload
    ),
    "a staging buffer is reused early": Canary("unordered_overlap", staging_returns_at_once),
    "nothing is uploaded": Canary("stale_mirror", without(ModelledDevice, "upload", 0)),
    "a row is not staged": Canary("stale_mirror", without(scheduler, "stage_row")),
    "what a take changes is not staged": Canary(
        "stale_mirror", disabled_within(ChainAllocator, "take", StagedMirror, "stage")
    ),
    "what is rehomed is not staged": Canary(
        "stale_mirror", disabled_within(ChainAllocator, "rehome_window", StagedMirror, "stage"), seeds=60
    ),
    "what is rehomed mixes its pairs up": Canary("lost_write", rehomings_mix_their_pairs_up, seeds=60),
    "what ensure_capacity moves is not staged": Canary(
        "stale_mirror", disabled_within(ChainAllocator, "ensure_capacity", StagedMirror, "stage"), seeds=60
    ),
    "a take waits on the host": Canary("host_read_after_wait", takes_wait_on_the_host),
    "a free reads a mirror": Canary("host_read_after_wait", frees_read_a_mirror),
    "one rank frees nothing": Canary("rank_divergence", on_rank_1("free_pages", lambda *_: None)),
    "a choice follows a fired event": Canary("rank_divergence", a_fired_event_changes_a_choice),
    "no rank frees anything": Canary("wrong_binding", without(ChainAllocator, "free_pages")),
    "a free counts one too many": Canary("byte_accounting", a_free_counts_one_too_many),
    "every question is answered yes": Canary("capacity_answer", without(ChainAllocator, "units_fit", True)),
    "units never move to make room": Canary(
        "capacity_answer",
        lambda patch: patch.setattr("kvtide.chain.relief.Relief.make_room", grown_in_place),
    ),
    "a refused take has waited": Canary("changed_by_refusal", takes_wait_before_they_are_refused),
    "a flush waits for the forward": Canary("needless_wait", flushes_wait),
    "what is not held may be freed": Canary("misuse_accepted", errors_are_swallowed),
    "units change hands during a launch": Canary(
        "misuse_accepted", without(ForwardSteps, "check_pages_may_change")
    ),
    "units pend for ever": Canary(
        "ledger_leak", without(PendingPages, "release_through", np.empty(0, np.int64))
    ),
    "a debt is never over": Canary("ledger_leak", without(ChainAllocator, "written")),
    "the ledger is not told of a host wait": Canary(
        "unexpected_error", without(ForwardSteps, "host_synchronised")
    ),
}
"""By what is wrong."""
