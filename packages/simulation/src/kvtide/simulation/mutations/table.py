"""The table of mutations: every rule that keeps units safe, weakened one at a time (row X2)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtide.simulation.mutations.book_rules import book_rules
from kvtide.simulation.mutations.cells import cells
from kvtide.simulation.mutations.chain_rules import chain_rules
from kvtide.simulation.mutations.content_rules import content_rules
from kvtide.simulation.mutations.ledger_rules import ledger_rules
from kvtide.simulation.mutations.mutation import Mutation
from kvtide.simulation.mutations.run_rules import run_rules

MUTATIONS: Mapping[str, Mutation] = MappingProxyType(
    {
        mutation.id: mutation
        for rules in (cells, ledger_rules, chain_rules, content_rules, book_rules, run_rules)
        for mutation in rules()
    }
)
"""By id, kind by kind."""
