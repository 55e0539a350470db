"""Rules weakened on purpose, one at a time, to see that the simulation notices (row X2).

`MUTATIONS` is the table; `Mutation.planted` breaks one rule in this process; `hunt` says how many seeds it takes until a check
fails. `kvtide mutations` prints that, and writes `docs/mutations.md`.
"""

from kvtide.simulation.mutations.hunting import Hunt, chosen_mutations, hunt, own_operations
from kvtide.simulation.mutations.mutation import Mutation
from kvtide.simulation.mutations.table import MUTATIONS

__all__ = ["MUTATIONS", "Hunt", "Mutation", "chosen_mutations", "hunt", "own_operations"]
