"""Every rule is needed: weakened, the simulation notices, on the seed that `docs/mutations.md` names."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from kvtide.ledger import CLEARANCE, Clear, Consumer, Hazard
from kvtide.simulation import CHECKS, run_seed
from kvtide.simulation.mutations import MUTATIONS, Hunt, chosen_mutations, hunt, own_operations
from kvtide.simulation.mutations.cells import weakened
from kvtide.simulation.mutations.mutation import Patch
from kvtide.simulation.mutations.page import ACTIONS, SEEDS, page

PAGE = Path(__file__).resolve().parents[3] / "docs" / "mutations.md"
FEW = 10
"""Seeds that are tried beside the page's, before it counts as old."""

FOUND = [mutation.id for mutation in MUTATIONS.values() if not mutation.unreachable]


@functools.cache
def found_by() -> dict[str, tuple[int, str]]:
    """By mutation: seeds needed, and the check that failed."""
    if not PAGE.exists():
        pytest.skip("docs/mutations.md lies beside the packages of a checkout")
    rows = re.findall(
        r"^\| `([\w.]+)` \|.*\| (\d+) \| `(\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {mutation: (int(needed), check) for mutation, needed, check in rows}


@pytest.mark.requirement("X1", "X2")
@pytest.mark.parametrize("name", FOUND)
def test_a_weakened_rule_is_found(name: str) -> None:
    """On the page's seed, or one of the first few, whatever has been drawn otherwise since; if not, the page is old."""
    needed, _ = found_by().get(name, (SEEDS.start + 1, ""))
    operations = own_operations()
    with MUTATIONS[name].planted():
        assert any(
            run_seed(seed, ACTIONS, operations).failure is not None
            for seed in dict.fromkeys((SEEDS[needed - 1], *SEEDS[:FEW]))
        ), (
            f"the page is old: neither its seed {SEEDS[needed - 1]} nor the first {FEW} notice that {MUTATIONS[name].rule!r} "
            "is broken; `kvtide mutations --out docs/mutations.md` looks in all and writes it anew"
        )


OF_OPERATIONS = "undeclared_outcome"
"""What operations say is checked, not the allocator: no rule of it is behind that."""


@pytest.mark.requirement("X1", "X2")
def test_every_check_is_what_finds_some_mutation() -> None:
    """A check that finds nothing here would find nothing in the field."""
    assert {check for _, check in found_by().values()} | {OF_OPERATIONS} == set(CHECKS)


@pytest.mark.requirement("X2", "L5")
def test_every_cell_that_makes_anybody_wait_has_a_mutation() -> None:
    """And those that are behind another rule are few: cells of a consumer whose units the chain plans."""
    wanted = {
        f"clearance.{consumer.name}.{hazard.name}".lower()
        for consumer, row in CLEARANCE.items()
        for hazard, clear in row.items()
        if clear is not Clear.NONE
    }
    assert {name for name in MUTATIONS if name.startswith("clearance.")} == wanted
    assert len(wanted) == 23
    unreachable = {name for name in MUTATIONS if MUTATIONS[name].unreachable}
    assert unreachable == {
        f"clearance.{consumer}.{hazard}"
        for consumer in ("forward", "schedule_copy", "zero")
        for hazard in ("network", "fixed")
    }


@pytest.mark.requirement("X2", "L5", "C6")
def test_cells_behind_a_plan_are_what_notices_a_plan_that_is_wrong() -> None:
    """With the plan's rule broken a take meets a transfer: the cell makes that an error; without the cell, bytes are overwritten."""
    operations = own_operations()
    with MUTATIONS["plan.growth"].planted():
        runs = ((seed, run_seed(seed, ACTIONS, operations).failure) for seed in SEEDS)
        seed = next(
            seed
            for seed, noticed in runs
            if noticed is not None and "band.plan_clears_transfers" in noticed.message
        )
        patch = Patch()
        for consumer in (Consumer.FORWARD, Consumer.SCHEDULE_COPY, Consumer.ZERO):
            weakened(consumer, Hazard.NETWORK)(patch)
        try:
            overwritten = run_seed(seed, ACTIONS, operations).failure
        finally:
            patch.undo()
    assert overwritten is not None
    assert overwritten.check in {"unordered_overlap", "disturbed_use", "lost_write"}


@pytest.mark.requirement("X2")
def test_a_mutation_is_gone_afterwards() -> None:
    """Each is planted and undone; then a run is what it was before."""
    operations = own_operations()
    before = run_seed(0, 60, operations)
    for mutation in MUTATIONS.values():
        with mutation.planted():
            pass
    assert before.failure is None
    assert run_seed(0, 60, operations) == before


@pytest.mark.requirement("X2")
def test_a_mutation_reaches_other_processes() -> None:
    """It is planted where the runs are, by its id."""
    names = ["upload.rows", "zero.taken"]
    assert list(hunt(names, range(2), 40, jobs=2)) == list(hunt(names, range(2), 40))


def test_a_path_that_leads_nowhere_is_an_error() -> None:
    """A rule that moves takes its mutation along, or the mutation would break nothing and nobody would know."""
    for path in ("kvtide.chain.relief:Relief.no_such_rule", "kvtide.chain.relief:NoSuchClass.rule"):
        with pytest.raises(AttributeError, match=r"NoSuchClass|no_such_rule"):
            Patch().replace(path, None)


def test_mutations_are_chosen_by_id_and_by_kind() -> None:
    """As the command line names them."""
    assert chosen_mutations([]) == list(MUTATIONS)
    assert chosen_mutations(["gate"]) == ["gate.seen", "gate.place", "gate.epoch"]
    assert chosen_mutations(["wait.settle", "gate.seen"]) == ["wait.settle", "gate.seen"]
    with pytest.raises(
        ValueError, match=r"no mutation is called 'wai', or of that kind; kinds are answer, barrier,"
    ):
        chosen_mutations(["wai"])


def test_the_page_says_what_was_found_and_what_was_not() -> None:
    """A survivor stands there as one."""
    run = next(hunt(["upload.rows"], range(1), 120))
    survivor = Hunt(mutation="wait.settle", seeds_run=200, failure=None)
    behind = Hunt(mutation="clearance.zero.fixed", seeds_run=200, failure=None)
    assert [each.is_as_it_should_be for each in (run, survivor, behind)] == [True, False, True]
    text = page([run, survivor, behind])
    assert "| `upload.rows` | rows are staged when they change | K1 | 1 | `stale_mirror` |" in text
    assert re.search(r"^\| `wait.settle` \|.*\| none \|  \|$", text, re.MULTILINE)
    assert text.index("## Behind another rule") < text.index("| `clearance.zero.fixed` |")
