"""What one tensor-parallel rank holds of a count of heads (row P7).

Query heads are split evenly. Key-value heads are split, and where ranks outnumber them each rank holds a copy of one. Latents
and indexer keys serve all heads, so every rank holds them whole. Recurrent state is split by heads, its groups like key-value
heads.
"""

from __future__ import annotations

import attrs

from kvtide.plan.configs.fields import ConfigFields


@attrs.frozen
class TensorSplit:
    """One tensor-parallel size, applied to fields of one config."""

    fields: ConfigFields
    """For the wording of refusals."""

    tp_size: int
    """Ranks that share every layer."""

    def evenly(self, name: str, count: int) -> int:
        """A rank's share of `count`; raises `ConfigError` where it is no integer."""
        if count % self.tp_size:
            raise self.fields.error(name, f"= {count} is not divided by tp_size = {self.tp_size}")
        return count // self.tp_size

    def or_copied(self, name: str, count: int) -> int:
        """A rank's share of `count`, at least one: ranks beyond the count hold copies."""
        if count % self.tp_size and self.tp_size % count:
            raise self.fields.error(
                name,
                f"= {count} is neither divided by tp_size = {self.tp_size} nor divides it (copies on ranks)",
            )
        return max(1, count // self.tp_size)
