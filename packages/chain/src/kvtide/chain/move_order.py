"""In which order floats are relocated, so that none is copied onto bytes another still holds (row C6).

    spans      [ends]     [ A A A ]  [ B B ]          [ends]
    targets    [ends]           [ A A A ] [ B B ]     [ends]         B first: A's target begins under B

Ends have been flushed before, and takes come after, so only relocated floats can be in each other's way: whoever stays keeps a
span that no target touches. A float *looks up* if its target ends above the first byte of a higher float's span, and *looks down*
if it begins below the end byte of a lower one's. It must wait for those: they may still hold bytes of its target.

**Whoever is looked up to does not look down.** Let A look up to C: A's target ends above where C's span begins. Targets keep
the chain's order, so C's target begins no lower than A's ends, so above where C's span begins, and every lower float's span ends
no higher than there. So C looks down to nobody, and likewise whoever is looked down to does not look up. So no waits form a
cycle: those that do not look down go first, from the highest, and each finds whomever it looks up to already gone; then the
others go, from the lowest, and find the same.

Fixed pages change nothing: they lie in the span and in the target of their own float, which others' spans and targets leave alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.plan import ArenaLayout, PageSpan


def move_order(
    layout: ArenaLayout, spans: Sequence[PageSpan], targets: Sequence[PageSpan], places: Sequence[int]
) -> list[int]:
    """`places`, floats to be relocated, in an order in which no target overlaps a span of one that comes later.

    `spans` and `targets` are those of all bands, in chain order; both keep that order and share no byte. Each of `places` has a
    span; the target of one that keeps nothing is empty, wherever it is said to lie.
    """
    looks_down: list[int] = []
    first: list[int] = []
    held_to = 0
    for place in sorted(places):
        band, span, target = layout.bands[place], spans[place], targets[place]
        waits = target.page_count and band.start_byte(target.first_page) < held_to
        (looks_down if waits else first).append(place)
        held_to = band.start_byte(span.end_page)
    return first[::-1] + looks_down
