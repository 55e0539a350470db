"""Random takes, frees and forwards on real bytes, beside the dumbest model: a dict of what each unit holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .walk import Walk, layout_of

UNITS = [
    {"full": 48},
    {"state": 112, "full": 48},
    {"4": 80, "full": 48},
    {"state": 112, "4": 80, "full": 48},
    {"state": 32, "9": 160, "4": 48, "full": 112},
    {"9": 96, "4": 48},
    {"state": 64},
    {"state": 208, "30": 16, "9": 80, "4": 48, "full": 64},
]


@pytest.mark.requirement("A2", "A5", "C1", "C2", "C3", "C5", "C11", "L2", "L3")
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_contents_survive_every_take_free_and_rearrangement(data: st.DataObject) -> None:
    """The promise of the allocator: a take succeeds exactly when some layout holds it, and no live byte is lost."""
    layout = layout_of(data.draw(st.sampled_from(UNITS)), data.draw(st.integers(700, 2600)))
    walk = Walk(layout)
    token_bands = [band.name for band in layout.bands if band.page_tokens is not None]
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["take", "take", "free", "launch", "process"]))
        if action == "take":
            pages = data.draw(st.integers(0, 5)) if token_bands else 0
            walk.take(pages, data.draw(st.integers(0, 2)) if "state" in walk.held else 0)
        elif action == "free":
            name = data.draw(st.sampled_from(list(walk.held)))
            free = [
                unit
                for unit in walk.held[name]
                if name != layout.owner
                or not any(unit in walk.held[other] for other in token_bands if other != name)
            ]
            if free:
                walk.free(name, data.draw(st.lists(st.sampled_from(free), unique=True, min_size=1)))
        elif action == "launch" and len(walk.in_flight) < 2:
            walk.launch()
        elif action == "process" and walk.in_flight:
            walk.process()
        walk.check()
