"""What the planner prints is what the allocator admits: the real allocator, at real budgets, filled to the last request (S6).

CI tries every published config at every page size with plain requests, and each way of serving over one chain of each kind;
`nox -s nightly_s6` tries every one with every other, at more budgets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from kvtide.chain import TakeRefusal
from kvtide.engine.commands.plan import command
from kvtide.plan import from_config, lay_out, page_multiple, plan_kv_storage
from kvtide.sizing import KVDemand, requests_that_fit, resident_demand

from .catalogue import CONFIGS, published_configs
from .filling import Filling, assert_full
from .planned import BUILT, EVERY_MODEL, PUBLISHED, WAYS, Case, Pages, every_case, rotated_cases, tried

WRITTEN_TOKENS = 3000


@pytest.mark.requirement("S6")
@tried(
    ci=[*every_case(PUBLISHED, ["plain"]), *rotated_cases(BUILT, WAYS), *every_case(BUILT, ["short"])],
    nightly=every_case(EVERY_MODEL, WAYS),
)
def test_the_allocator_takes_planned_requests_to_the_last_one_and_no_more(case: Case) -> None:
    """A planner that is one too high promises what is refused in service; one too low wastes a machine."""
    sized, demand, beside = case.demands()
    planned = requests_that_fit(sized.layout, demand, beside=beside)
    assert planned > 0
    filling = Filling(sized.layout)
    held = filling.units(demand, planned)
    if beside is not None:
        filling.take_all(filling.shape(beside), 1)
        held = {name: units + more for (name, units), more in zip(held.items(), beside.units, strict=True)}
    filling.take_all(filling.shape(demand), planned)
    assert filling.live_units() == held
    assert_full(filling, demand)
    filling.chain.verify_byte_accounting()


@pytest.mark.requirement("S6")
@tried(ci=rotated_cases(BUILT, ["plain"]), nightly=every_case(EVERY_MODEL, ["plain", "loaded, with drafts"]))
def test_what_is_resident_now_fits_too_and_is_more_requests(case: Case) -> None:
    """Two figures: requests that could be in memory as they stand, and those of the same length that can all go on to their ends.
    Mistaken for the other, the first admits what must be retracted later.
    """
    sized, way = case.sized(), WAYS[case.way]
    resident = sized.resident_demand(WRITTEN_TOKENS)
    now = requests_that_fit(sized.layout, resident)
    peak = attrs.evolve(way, prompt_tokens=WRITTEN_TOKENS, cached_tokens=0).demand(sized)
    assert now >= requests_that_fit(sized.layout, peak) > 0
    filling = Filling(sized.layout)
    filling.take_all(filling.shape(resident), now)
    assert filling.live_units() == filling.units(resident, now)
    assert_full(filling, resident)


@pytest.mark.requirement("S1", "S6")
@tried(ci=rotated_cases(BUILT, ["plain"]), nightly=every_case(EVERY_MODEL, ["plain"]))
def test_boot_targets_are_all_held_at_once(case: Case) -> None:
    """What is printed for each band fits in all of them together, whatever the grids of neighbours lose between them."""
    sized = case.sized()
    filling = Filling(sized.layout)
    targets = KVDemand(tuple(target.unit_count for target in sized.targets))
    filling.take_all(filling.shape(targets), 1)
    assert filling.live_units() == {target.name: target.unit_count for target in sized.targets}
    filling.chain.verify_byte_accounting()


CONFIGS_BY_PAGE = [
    pytest.param(config, pages, id=f"{model}, pages of {pages}")
    for model, config in (published_configs() | CONFIGS).items()
    for pages in ((1, 16, 64) if page_multiple(from_config(config)) == 1 else (128, 256))
]


@pytest.mark.requirement("S6")
@pytest.mark.parametrize(("config", "page_tokens"), CONFIGS_BY_PAGE)
def test_the_allocator_admits_the_figures_of_the_printed_document(
    config: dict[str, Any], page_tokens: int, tmp_path: Path
) -> None:
    """From the document alone: the arena's bytes, what one request of each length holds, how many of them. 40 GB, decimal. What is
    resident now is held to the last one too.
    """
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    arguments = [str(path), "--budget", "40GB", "--page-size", str(page_tokens), "--json"]
    printed = json.loads(CliRunner().invoke(command, arguments, catch_exceptions=False).stdout)
    plan = plan_kv_storage(from_config(config), page_tokens=page_tokens)
    layout = lay_out(plan, printed["arena_bytes"])
    assert printed["used_bytes"] <= printed["budget_bytes"] == 40 * 10**9
    for context in printed["contexts"]:
        demand = KVDemand(tuple(context["units"][band.name] for band in layout.bands))
        filling = Filling(layout)
        filling.take_all(filling.shape(demand), context["requests_in_memory"])
        assert_full(filling, demand)
        assert context["requests_admitted"] == min(
            context["requests_in_memory"], printed["max_running_requests"]
        )
        resident = resident_demand(plan, written_tokens=context["context_tokens"])
        filling = Filling(layout)
        filling.take_all(filling.shape(resident), context["requests_resident"])
        assert_full(filling, resident)


def test_every_published_config_is_planned_for() -> None:
    """A folder that is missing, or read from the wrong place, would leave the tests above green."""
    if not published_configs():
        pytest.skip("needs the optional folder ../shared/data beside the repository")
    assert len(PUBLISHED) == len(published_configs()) > 20


def test_a_refusal_is_what_the_tests_above_look_for() -> None:
    """A filling that is not full is noticed."""
    sized, demand, _ = Case(
        model="state, two windows and full", pages=Pages(page_tokens=16), way="plain"
    ).demands()
    filling = Filling(sized.layout)
    filling.take_all(filling.shape(demand), requests_that_fit(sized.layout, demand) - 1)
    with pytest.raises(AssertionError):
        assert_full(filling, demand)
    assert not isinstance(filling.take(filling.shape(demand)), TakeRefusal)
