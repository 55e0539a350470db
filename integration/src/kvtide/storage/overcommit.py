"""The policy that promises less than a request may come to hold, by choice (row K5).

Output limits are mostly far above what is generated, so most of what guaranteed admission promises is never taken. Under this
policy a request is promised its prompt and a share of its output, and further shares as it reaches them. A share that finds no
room is refused before anything is taken, and somebody must be retracted.
"""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Real

import attrs

from kvtide.storage.errors import StorageError


def _exact(share: Fraction | float) -> Fraction:
    """Raise `StorageError` for what is no share."""
    is_number = isinstance(share, Real) and not isinstance(share, bool)
    if not is_number or not 0 < share <= 1:
        raise StorageError(f"expected_output_fraction must be above 0 and at most 1, found {share!r}")
    return Fraction(str(share))


@attrs.frozen
class Overcommit:
    """Promise output share by share."""

    expected_output_fraction: Fraction = attrs.field(converter=_exact)
    """A share, of the output limit; above 0 and at most 1. A float is taken as it is written: 0.07 is 7 of 100."""

    def promised_output(self, output_tokens: int, reached_tokens: int) -> int:
        """Output that is promised to a request of this limit which is to reach `reached_tokens` of it: the fewest whole shares."""
        share = max(1, math.ceil(self.expected_output_fraction * output_tokens))
        return min(output_tokens, -(-max(1, reached_tokens) // share) * share)
