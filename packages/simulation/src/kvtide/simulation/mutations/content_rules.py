"""Rules of what the chain hands out: what is zeroed, copied, rehomed and reserved, and what mirrors are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray, ModelledDevice, Stream
from kvtide.ledger import Reservation
from kvtide.simulation.mutations.mutation import (
    Mutation,
    Patch,
    Replacement,
    around,
    instead,
    nothing_during,
    nowhere,
    without,
)

_ALLOCATOR = "kvtide.chain:ChainAllocator"
_DEBTS = "kvtide.chain.takes:ZeroDebts"
_IDS = "kvtide.chain.id_space:UnitIds"
_USES = "kvtide.chain.uses:ChainUses"
_USAGE = "kvtide.ledger:PageUsage"


def _pairs_mixed_up(original: Replacement) -> Replacement:
    def copy(device: ModelledDevice, stream: Stream, grid: Any, sources: IntArray, targets: IntArray) -> None:
        original(device, stream, grid, sources[::-1].copy(), targets)

    return copy


def _rehomed_to_each_others(original: Replacement) -> Replacement:
    def rehome(chain: ChainAllocator, band: str, sources: IntArray, targets: IntArray) -> None:
        original(chain, band, sources[::-1].copy(), targets)

    return rehome


def _reservations_fix_nothing(patch: Patch) -> None:
    fix, unfix = patch.look(f"{_USES}.fix"), patch.look(f"{_USES}.unfix")

    def fix_others(uses: Any, owner: object, units: Any) -> None:
        if not isinstance(owner, Reservation):
            fix(uses, owner, units)

    def unfix_others(uses: Any, owner: object) -> None:
        if not isinstance(owner, Reservation):
            unfix(uses, owner)

    patch.replace(f"{_USES}.fix", fix_others)
    patch.replace(f"{_USES}.unfix", unfix_others)


def content_rules() -> Iterator[Mutation]:
    """See the module's docstring."""
    yield Mutation(
        id="zero.taken",
        rule="units are zeroed on hand-out",
        rows=("A5",),
        plant=without("kvtide.device:ModelledDevice.zero_units"),
    )
    yield Mutation(
        id="zero.debt",
        rule="what a forward was to write whole is zeroed if it will not run",
        rows=("A5",),
        plant=without(f"{_ALLOCATOR}.pay_zero_debt"),
    )
    yield Mutation(
        id="zero.written",
        rule="a debt ends with the recording of the forward that writes",
        rows=("A5",),
        plant=without(f"{_ALLOCATOR}.written"),
    )
    yield Mutation(
        id="zero.freed",
        rule="a freed unit owes no zeroing any more",
        rows=("A5",),
        plant=nothing_during(f"{_ALLOCATOR}._free", f"{_DEBTS}.forget"),
    )
    yield Mutation(
        id="zero.copied",
        rule="a state slot that is copied onto owes no zeroing any more",
        rows=("A5",),
        plant=nothing_during(f"{_ALLOCATOR}.copy_state_slots", f"{_DEBTS}.forget"),
    )
    yield Mutation(
        id="move.pairs",
        rule="a move copies each source to its own target",
        rows=("C7",),
        plant=around("kvtide.device:ModelledDevice.copy_units", _pairs_mixed_up),
    )
    yield Mutation(
        id="rehome.pairs",
        rule="a rehomed page stands for its own target",
        rows=("K8",),
        plant=around(f"{_ALLOCATOR}.rehome_window", _rehomed_to_each_others),
    )
    for name, when in (("bind", "is bound"), ("unbind", "is unbound"), ("move", "moves")):
        yield Mutation(
            id=f"mirror.{name}",
            rule=f"mirrors are told when a unit {when}",
            rows=("K3",),
            plant=nothing_during(f"{_IDS}.{name}", "kvtide.device:StagedMirror.stage"),
        )
    yield Mutation(
        id="reservation.fixes",
        rule="what a load will fill stays in place until its copy is queued",
        rows=("H2",),
        plant=_reservations_fix_nothing,
    )
    yield Mutation(
        id="reservation.keeps",
        rule="and is freed by nobody",
        rows=("H2",),
        plant=instead(f"{_USAGE}.reserved", nowhere),
    )
