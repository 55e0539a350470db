"""Faults to plant in what keeps uses apart: withheld and fenced units, plans around transfers, gates, reservations, quarantine.

As those of `canaries`, which know nothing of copies and transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import attrs
import numpy as np

from kvtide.chain import ChainAllocator, ChainError
from kvtide.device import IntArray
from kvtide.ledger import Consumer, FencedBytes, Hazard, HostCopy, NetworkTransfer, PageUsage
from kvtide.simulation import Rank, scheduler, use_steps

from .canaries import Canary, Patch, weakened, without

# A canary reaches inside on purpose; what it breaks is looked up where it stands.
move_order = import_module("kvtide.chain.move_order").move_order
first_plan = import_module("kvtide.chain.pricing").first_plan
ChainUses = import_module("kvtide.chain.uses").ChainUses

SENDING = (
    "admit",
    "grow",
    "launch",
    "process",
    "finish",
    "retire",
    "drop tail",
    "flush",
    "send",
    "begin transfer",
    "end use",
    "ask",
)
"""Operations among which units move under sends often."""


@attrs.frozen
class UseCanary(Canary):
    """A fault that few sequences meet."""

    among: tuple[str, ...] = ()
    """The only operations drawn; all of them if empty."""


def fences_of(kind: type) -> Any:
    """What a copy or transfer still reads of bytes that left a band is forgotten."""

    def plant(patch: Patch) -> None:
        add = FencedBytes.add
        patch.setattr(
            FencedBytes,
            "add",
            lambda fences, fence: None if isinstance(fence.signal, kind) else add(fences, fence),
        )

    return plant


def withheld_units_are_free(patch: Patch) -> None:
    patch.setattr("kvtide.chain.band_units.BandUnits._without_withheld", lambda band, units: units)


def moves_run_backwards(patch: Patch) -> None:
    patch.setattr("kvtide.chain.relief.move_order", lambda *asked: move_order(*asked)[::-1])


def a_failed_transfer_is_over(patch: Patch) -> None:
    unfix = ChainUses.unfix

    def unfix_if_fixed(uses: ChainUses, owner: Any) -> None:
        try:
            unfix(uses, owner)
        except ChainError:
            if not isinstance(owner, NetworkTransfer):
                raise

    patch.setattr(ChainUses, "quarantine", ChainUses.end)
    patch.setattr(ChainUses, "unfix", unfix_if_fixed)


def a_reservation_ends_early(patch: Patch) -> None:
    def leave_a_gap(rank: Rank, use: Any, copy: HostCopy) -> None:
        rank.chain.uses.unfix(use.owners[rank.place])
        rank.chain.flush_opportunistic()
        rank.chain.uses.begin(copy, use.units)

    patch.setattr(use_steps, "hand_over", leave_a_gap)


def flushes_do_not_look_for_holds(patch: Patch) -> None:
    flush = ChainAllocator.flush_opportunistic

    def flush_unheld(chain: ChainAllocator, *args: int) -> int:
        with_holds = [band.usage._held for band in chain._bands]
        owned = [claims.owned for claims in with_holds]
        counts = [claims._counts for claims in with_holds]
        for claims in with_holds:
            claims.owned, claims._counts = {}, claims._counts * 0
        try:
            return flush(chain, *args)
        finally:
            for claims, names, numbers in zip(with_holds, owned, counts, strict=True):
                claims.owned, claims._counts = names, numbers

    patch.setattr(ChainAllocator, "flush_opportunistic", flush_unheld)


def reliefs_wait_at_once(patch: Patch) -> None:
    def plan(snapshot: Any, asked: Sequence[int], *, around_network: bool) -> Any:
        in_the_way = snapshot.network_bytes or any(band.network for band in snapshot.bands)
        return None if in_the_way else first_plan(snapshot, asked, around_network=around_network)

    patch.setattr("kvtide.chain.relief.first_plan", plan)


def waiters_return_at_once(patch: Patch) -> None:
    def end(rank: Rank, transfers: Sequence[NetworkTransfer]) -> None:
        for transfer in transfers:
            del rank.transfers[transfer]
            rank.chain.uses.end(transfer)
            rank.waited.append(transfer)

    patch.setattr(Rank, "_wait_for_transfers", end)


def one_rank_is_asked_for_less(patch: Patch) -> None:
    wait = Rank._wait_for_transfers

    def wait_and_forget(rank: Rank, transfers: Sequence[NetworkTransfer]) -> None:
        wait(rank, transfers)
        if rank.place == 1:
            rank.waited.pop()

    patch.setattr(Rank, "_wait_for_transfers", wait_and_forget)


_NONE: IntArray = np.empty(0, np.int64)

USE_CANARIES: Mapping[str, UseCanary] = {
    "withheld units are handed out": UseCanary("unexpected_error", withheld_units_are_free, seeds=40),
    "withheld units never return": UseCanary(
        "ledger_leak",
        lambda patch: patch.setattr("kvtide.chain.band.Band.release_withheld", lambda band: None),
    ),
    "what a send reads beyond a band is forgotten": UseCanary(
        "unordered_overlap", fences_of(NetworkTransfer), seeds=60, among=SENDING
    ),
    "what a copy touches beyond a band is forgotten": UseCanary(
        "unordered_overlap", fences_of(HostCopy), seeds=80
    ),
    "plans leave transfers out": UseCanary(
        "unexpected_error", without(PageUsage, "transfer_pages", _NONE), seeds=80
    ),
    "plans leave fixed units out": UseCanary(
        "unexpected_error", without(PageUsage, "fixed_pages", _NONE), seeds=40
    ),
    "a flush takes no notice of holds": UseCanary("disturbed_use", flushes_do_not_look_for_holds, seeds=80),
    "a reservation ends before its copy is recorded": UseCanary(
        "unordered_overlap", a_reservation_ends_early, seeds=80
    ),
    "zeroing does not wait for backups": UseCanary(
        "unordered_overlap", weakened(Consumer.ZERO, Hazard.COPY_READ), seeds=40
    ),
    "zeroing does not wait for loads": UseCanary(
        "unordered_overlap", weakened(Consumer.ZERO, Hazard.COPY_WRITE), seeds=80
    ),
    "moves do not wait for backups of their targets": UseCanary(
        "unordered_overlap", weakened(Consumer.SCHEDULE_COPY, Hazard.COPY_READ), seeds=80
    ),
    "floats move in the wrong order": UseCanary("cross_dtype_bytes", moves_run_backwards, seeds=80),
    "a failed transfer counts as over": UseCanary("disturbed_use", a_failed_transfer_is_over, seeds=80),
    "a relief waits for transfers at once": UseCanary("needless_wait", reliefs_wait_at_once, seeds=40),
    "a waiter does not wait": UseCanary("unordered_overlap", waiters_return_at_once, seeds=80),
    "one rank waits for less": UseCanary("rank_divergence", one_rank_is_asked_for_less, seeds=80),
    "transfers begin before their gates": UseCanary(
        "unordered_overlap", without(use_steps, "passed_gates", True)
    ),
    "copies do not stand behind the other streams": UseCanary(
        "unordered_overlap", without(use_steps, "stand_behind")
    ),
    "forwards do not wait for loads": UseCanary("unordered_overlap", without(scheduler, "wait_for_loads")),
    "uses end unseen": UseCanary("unordered_overlap", without(use_steps, "is_over", True)),
}
"""By what is wrong."""
