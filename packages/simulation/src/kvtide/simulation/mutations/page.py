"""`docs/mutations.md`: what a hunt through the whole table has found."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.simulation.mutations.hunting import Hunt
from kvtide.simulation.mutations.table import MUTATIONS

SEEDS = range(200)
"""Within which every mutation must be found, and on which the page rests."""

ACTIONS = 400
"""A seed, on the page."""

_HEAD = f"""# Mutations

Every rule that keeps units safe, weakened at run time, one at a time; and how many seeds of the simulation it takes until a check fails
(row X2). A mutation that {len(SEEDS)} seeds of {ACTIONS} actions do not find is a hole in the simulation, or a rule that does nothing.

Written by `kvtide mutations --out docs/mutations.md`; do not edit. `nox -s nightly_mutations`, a weekly session, hunts through all of it
again. The checks are those of [the simulation](../packages/simulation/README.md), the rows those of [requirements](requirements.md).

"""
_UNREACHABLE = """
## Behind another rule

Cells that no run can tell from the shipped code: another rule, which stands in the table above, keeps units from ever meeting them.

"""


def page(hunts: Sequence[Hunt]) -> str:
    """The page, from a hunt through the whole table."""
    found, behind = [], []
    for each in hunts:
        mutation = MUTATIONS[each.mutation]
        rows = ", ".join(mutation.rows)
        if mutation.unreachable:
            behind.append(f"| `{mutation.id}` | {mutation.rule} | {rows} | {mutation.unreachable} |")
        else:
            needed = "none" if each.failure is None else str(each.seeds_run)
            check = "" if each.failure is None else f"`{each.failure.check}`"
            found.append(f"| `{mutation.id}` | {mutation.rule} | {rows} | {needed} | {check} |")
    lines = [
        "| mutation | the rule that it breaks | rows | seeds | found by |",
        "| - | - | - | -: | - |",
        *found,
    ]
    text = _HEAD + "\n".join(lines) + "\n"
    if behind:
        text += (
            _UNREACHABLE
            + "\n".join(["| mutation | the rule | rows | why |", "| - | - | - | - |", *behind])
            + "\n"
        )
    return text
