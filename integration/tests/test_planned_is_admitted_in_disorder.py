"""What is planned is admitted whatever came before: pages scattered, bands displaced, other requests in between (S6, K5)."""

from __future__ import annotations

import random

import attrs
import numpy as np
import pytest

from kvtide.chain import TakeRefusal
from kvtide.device import NumpyDevice
from kvtide.sizing import KVDemand, requests_that_fit
from kvtide.storage import AdmissionRefusal
from kvtide.storage.admission import ChainPrefillBudget
from kvtide.storage.evicting_takes import EvictingTakes
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_units import RowUnits

from .filling import Filling, Held, assert_full
from .planned import BUILT, EVERY_MODEL, Case, Pages, every_case, rotated_cases, tried


@pytest.mark.requirement("S6")
@tried(
    ci=rotated_cases(BUILT, ["plain", "loaded, with drafts"]),
    nightly=every_case(EVERY_MODEL, ["plain", "chunks in activations", "loaded, with drafts"]),
)
def test_requests_that_came_and_went_piece_by_piece_leave_room_for_as_many(case: Case) -> None:
    """A count that only an orderly arena holds is no promise: requests arrive, grow in chunks and end in any order."""
    sized, demand, _ = case.demands()
    planned = requests_that_fit(sized.layout, demand)
    filling = Filling(sized.layout)
    filling.wander(filling.shape(demand), planned, random.Random(str(case)))
    assert filling.live_units() == filling.units(demand, planned)
    assert_full(filling, demand)
    filling.chain.verify_byte_accounting()


def refilled_beside_others(case: Case) -> Filling:
    """An allocator that short requests filled and left in random order, taken to the last byte each time by requests that want it
    in other kinds: as many as planned beside those that are left, and no more.
    """
    sized, demand, _ = case.demands()
    strangers_demand = sized.demand(prompt_tokens=700, output_tokens=100)
    filling, rng = Filling(sized.layout), random.Random(str(case))
    shape = filling.shape(demand)
    strangers = filling.take_all(
        filling.shape(strangers_demand), requests_that_fit(sized.layout, strangers_demand)
    )
    assert_full(filling, strangers_demand)
    rng.shuffle(strangers)
    here: list[Held] = []
    while True:
        beside = KVDemand(tuple(len(strangers) * units for units in strangers_demand.units))
        planned = requests_that_fit(sized.layout, demand, beside=beside)
        here += filling.take_all(shape, planned - len(here))
        assert_full(filling, demand)
        if not strangers:
            break
        for stranger in strangers[: 1 + len(strangers) // 3]:
            filling.free(stranger)
        del strangers[: 1 + len(strangers) // 3]
        for place in sorted(rng.sample(range(len(here)), len(here) // 5), reverse=True):
            filling.free(here.pop(place))
    assert len(here) == requests_that_fit(sized.layout, demand)
    filling.chain.verify_byte_accounting()
    return filling


@pytest.mark.requirement("S6")
@tried(
    ci=rotated_cases(BUILT, ["plain", "plain"]),
    nightly=every_case(EVERY_MODEL, ["plain", "chunks in activations", "loaded, with drafts"]),
)
def test_as_many_fit_as_planned_beside_whatever_others_hold(case: Case) -> None:
    """Admission sees counts; where the others' bands stand, and how scattered their pages lie, must not matter."""
    refilled_beside_others(case)


@pytest.mark.requirement("S6")
@pytest.mark.parametrize("model", ["state and full", "two windows and full", "state, two windows and full"])
def test_bands_had_to_move_for_it(model: str) -> None:
    """Did every request find room in place, the test above would show nothing of relief."""
    filling = refilled_beside_others(Case(model=model, pages=Pages(page_tokens=64), way="plain"))
    assert filling.chain.statistics().rearrangements > 5


LENGTHS = [(200, 50), (3000, 900), (20_000, 500), (900, 8000), (90_000, 4000)]
"""Prompt and output tokens."""


@pytest.mark.requirement("S6", "K5")
@tried(ci=rotated_cases(BUILT, ["plain"]), nightly=every_case(EVERY_MODEL, ["plain"]))
def test_admission_promises_exactly_what_the_allocator_takes(case: Case) -> None:
    """Requests of any mix of lengths: each verdict is what a take of all their peaks meets, a yes as well as a no."""
    sized = attrs.evolve(case.sized(), max_running_requests=4000)
    filling, rng = Filling(sized.layout), random.Random(str(case))
    mirror = NumpyDevice(64, byte_work=False).create_mirrors({"rows": sized.max_running_requests})["rows"]
    requests = RequestTable(sized.max_running_requests, 1, mirror)
    units = RowUnits(sized, requests, filling.chain, writes_whole_pages=False)
    budget = ChainPrefillBudget(
        sized, filling.chain, EvictingTakes(filling.chain), requests, units=units, overcommit=None
    )
    held = dict[int, Held]()
    refused = 0
    while refused < 40:
        if held and rng.random() < 0.2:
            row = rng.choice(sorted(held))
            filling.free(held.pop(row))
            units.counts[:, row] = 0
            budget.release(np.array([row]))
            requests.close(np.array([row]))
        prompt, output = rng.choice(LENGTHS)
        verdict = budget.offer([prompt], [output], whole=False)
        if isinstance(verdict, AdmissionRefusal):
            demand = sized.demand(prompt_tokens=prompt, output_tokens=output)
            assert isinstance(filling.take(filling.shape(demand)), TakeRefusal), f"{verdict}"
            refused += 1
        else:
            taken = filling.take(filling.shape(verdict.demands[0]))
            assert not isinstance(taken, TakeRefusal), f"{taken}"
            rows = requests.open(
                np.array([prompt]),
                np.array([prompt + output - 1]),
                np.array([-1]),
                chunk_limit=verdict.chunk_limit,
                cached_tokens=np.zeros(1, np.int64),
                has_checkpoints=False,
            )
            budget.promise(rows, verdict)
            units.counts[:, rows[0]] = verdict.demands[0].units
            held[int(rows[0])] = taken[0]
