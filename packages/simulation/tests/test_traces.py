"""Traces: recorded, replayed, compared, and kept for the cases that matter (row X3)."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import attrs
import pytest

from kvtide.chain import FLUSH_REACH, ChainAllocator
from kvtide.device import IntArray
from kvtide.ledger import ForwardSteps
from kvtide.simulation import (
    MUTATIONS,
    BatchEntry,
    CheckFailedError,
    Operation,
    Request,
    Run,
    Scenario,
    World,
    draw_scenario,
    run_actions,
    run_seed,
)
from kvtide.simulation.traces import (
    CALLS,
    STORIES,
    ChainAdapter,
    TraceError,
    TraceHeader,
    TraceLine,
    adapter_named,
    document,
    first_divergence,
    parse_trace,
    read_trace,
    record_seed,
    replay,
    replayed,
    told,
    with_page_tokens,
)

from .trace_stories import TELLERS

HoleSet: Any = import_module("kvtide.chain.hole_set").HoleSet
ChainUses: Any = import_module("kvtide.chain.uses").ChainUses
units_of: Any = import_module("kvtide.chain.units").units_of

NOT_IN_A_TRACE: dict[type, set[str]] = {
    ChainAllocator: {
        "clone",
        "physical_units",
        "live_units",
        "span",
        "ledger",
        "statistics",
        "books",
        "verify_byte_accounting",
        "verify_units",
        "keep_snapshots",
        "verify_snapshots",
        "capacity_decision",
        "available_size",
        "full_available_size",
        "window_available_size",
        "estimated_units_available",
        "usage",
    },
    ChainUses: {"keeps"},
    ForwardSteps: {
        "clone",
        "places",
        "recorded",
        "check_pages_may_change",
        "check_idle",
        "check_processed",
    },
}
"""What changes nothing that another call could show, and is no capacity question."""


@pytest.mark.requirement("X3")
@pytest.mark.parametrize(
    ("prefix", "owner"), [("chain", ChainAllocator), ("uses", ChainUses), ("steps", ForwardSteps)]
)
def test_a_trace_holds_every_call_that_changes_something(prefix: str, owner: type) -> None:
    """A new verb that traces leave out would make them diverge at the next call."""
    methods = {name for name in vars(owner) if not name.startswith("_") and callable(getattr(owner, name))}
    assert NOT_IN_A_TRACE[owner] <= methods
    recorded = {name.removeprefix(f"{prefix}.") for name in CALLS if name.startswith(f"{prefix}.")}
    assert methods - NOT_IN_A_TRACE[owner] == recorded


def trace_of(
    seed: int, operations: dict[str, Operation], page_tokens: int | None = None
) -> tuple[TraceHeader, list[TraceLine]]:
    out = io.StringIO()
    recorded = record_seed(out, seed, 120, page_tokens=page_tokens, operations=operations)
    header, lines = parse_trace(out.getvalue().splitlines(), "a trace")
    assert recorded == (len(lines), None)
    return header, lines


# ── the cases that matter ──


@pytest.mark.requirement("X3")
@pytest.mark.parametrize("name", TELLERS)
def test_a_story_is_kept_as_it_is_told(name: str) -> None:
    """The shipped trace is what the story leaves today, and the shipped allocator answers as recorded."""
    path = STORIES / f"{name}.jsonl"
    text = TELLERS[name]().out.getvalue()
    if os.environ.get("KVTIDE_WRITE_STORIES"):
        path.write_text(text, encoding="utf-8")
    header, lines = read_trace(path)
    assert path.read_text(encoding="utf-8") == text
    assert header.about
    assert replay(header, lines) is None


@pytest.mark.requirement("X3")
def test_every_shipped_trace_is_a_story() -> None:
    """A file whose story is gone can be read by nobody."""
    assert {path.stem for path in STORIES.glob("*.jsonl")} == set(TELLERS)


# ── seeds ──


@pytest.mark.requirement("X3")
@pytest.mark.parametrize("page_tokens", [None, 1, 16, 64])
def test_a_seeds_trace_replays_on_an_immediate_device(
    page_tokens: int | None, operations: dict[str, Operation]
) -> None:
    """It was recorded on a device that ran late and answered at random: no decision follows the device."""
    called = set()
    for seed in range(6):
        header, lines = trace_of(seed, operations, page_tokens)
        assert replay(header, lines) is None
        called |= {line.call for line in lines}
        sizes = {band.page_tokens for band in header.layout.bands} - {None}
        assert page_tokens is None or not sizes or max(size for size in sizes if size) == page_tokens
    assert called >= {"chain.take", "chain.free_pages", "chain.forward_recorded", "uses.begin", "uses.end"}


@pytest.mark.requirement("X3")
def test_a_recorded_life_is_the_seeds(
    operations: dict[str, Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far flushes retreat is the scenario's: as far as ever, others move. It is told, so that a replay keeps to it."""

    def draw_near(rng: random.Random) -> Scenario:
        return attrs.evolve(draw_scenario(rng), flush_reach=1, waits_for_transfers=False)

    def moved(run: Run) -> int:
        return run.facts["units moved"]

    def moved_farther(run: Run) -> int:
        farther = attrs.evolve(run.scenario, flush_reach=FLUSH_REACH)
        return moved(run_actions(farther, run.actions, operations))

    monkeypatch.setattr("kvtide.simulation.run.draw_scenario", draw_near)
    runs = ((seed, run_seed(seed, 120, operations)) for seed in range(19, 119))
    seed, drawn = next((seed, run) for seed, run in runs if moved(run) != moved_farther(run))
    header, lines = trace_of(seed, operations)
    assert header.flush_reach == 1
    assert sum(figures[-1] for figures in lines[-1].state["bands"].values()) == moved(drawn)
    assert replay(header, lines) is None
    assert replay(attrs.evolve(header, flush_reach=FLUSH_REACH), lines) is not None


@pytest.mark.requirement("X3")
def test_of_a_seed_that_fails_the_calls_until_then_are_kept(operations: dict[str, Operation]) -> None:
    """A trace of the fault is what its finder wants; it ends with the call behind which a check failed."""
    out = io.StringIO()
    with MUTATIONS["zero.taken"].planted():
        run = run_seed(5, 100, operations)
        recorded = record_seed(out, 5, 100, operations=operations)
    assert run.failure is not None
    assert recorded.failure is not None
    assert recorded.failure.check == run.failure.check == "cross_dtype_bytes"
    _, lines = parse_trace(out.getvalue().splitlines(), "a trace")
    assert 0 < len(lines) == recorded.calls


@pytest.mark.requirement("X3")
def test_of_a_seed_that_fails_and_its_trace_does_not_the_seeds_failure_is_told(
    operations: dict[str, Operation],
) -> None:
    """While it is recorded nothing ends within a wait, which some faults need; whoever asks for the trace asks for the fault."""
    out = io.StringIO()
    with MUTATIONS["take.asked_again"].planted():
        run = run_seed(4, 40, operations)
        recorded = record_seed(out, 4, 40, operations=operations)
    assert run.failure is not None
    assert recorded.failure == run.failure
    assert recorded.calls == len(out.getvalue().splitlines()) - 1 > 10


class Astray:
    """A holder, brought by an operation, of which one check fails."""

    name = "go astray"
    weight = 1
    outcomes = frozenset({"astray"})

    def __init__(self, failing: str) -> None:
        self._failing = failing

    def generate(self, rng: random.Random, world: World) -> dict[str, int]:
        return {}

    def apply(self, world: World, numbers: Mapping[str, int]) -> str:
        world.holders.append(self)
        return "astray"

    def launched(self, entries: Sequence[BatchEntry]) -> None:
        pass

    def processed(self, requests: Sequence[Request]) -> None:
        pass

    def abandoned(self, entries: Sequence[BatchEntry], *, is_launched: bool) -> None:
        pass

    def check(self) -> None:
        self._fail_in("check")

    def let_go(self) -> None:
        self._fail_in("let_go")

    def _fail_in(self, where: str) -> None:
        if where == self._failing:
            raise CheckFailedError("ledger_leak", f"found in {where}")


@pytest.mark.requirement("X3")
@pytest.mark.parametrize(("where", "place"), [("check", 0), ("let_go", 1)])
def test_a_recorded_seed_is_checked_as_it_is_when_it_runs(where: str, place: int) -> None:
    """After each action and at the end: with other pages the seed itself may hold, and only its recording fail."""
    astray = Astray(where)
    recorded = record_seed(io.StringIO(), 5, 1, page_tokens=16, operations={astray.name: astray})
    assert recorded.failure is not None
    assert (recorded.failure.message, recorded.failure.action_index) == (f"found in {where}", place)


def test_a_scenario_with_other_pages_can_be_laid_out() -> None:
    """Whatever is drawn; and its arena still holds tens of units, not thousands."""
    for seed in range(60):
        scenario = draw_scenario(random.Random(seed))
        for tokens in (1, 16, 64):
            layout = with_page_tokens(scenario, tokens).layout()
            before = scenario.layout()
            for band, same in zip(layout.bands, before.bands, strict=True):
                assert band.kind is same.kind
            assert 0.12 < layout.bands[-1].page_count / before.bands[-1].page_count < 8


# ── differences ──


def worse(header: TraceHeader) -> ChainAdapter:
    """An implementation that refuses every third take."""
    adapter = ChainAdapter(header)
    perform, calls = adapter.perform, []

    def refuse_some(call: str, args: Mapping[str, Any]) -> dict[str, Any]:
        calls.append(call)
        return {"refused": {}} if call == "chain.take" and calls.count(call) % 3 == 0 else perform(call, args)

    adapter.perform = refuse_some  # type: ignore[method-assign]
    return adapter


@pytest.mark.requirement("X3")
def test_the_first_divergence_is_the_first_call_that_is_answered_otherwise(
    operations: dict[str, Operation],
) -> None:
    """An answer that differs, a state that differs behind equal answers, a call that differs, an end that comes early."""
    header, lines = trace_of(2, operations)
    takes = [place for place, line in enumerate(lines) if line.call == "chain.take"]
    found = replay(header, lines, worse)
    assert found is not None
    assert (found.place, found.what, found.second) == (takes[2], "answer", {"refused": {}})
    other = list(lines)
    other[7] = lines[7]._replace(args={**lines[7].args, "more": 1})
    found = first_divergence(lines, other)
    assert found is not None
    assert (found.place, found.what) == (7, "call")
    other[7] = lines[7]._replace(state={**lines[7].state, "retired": 99})
    found = first_divergence(lines, other)
    assert found is not None
    assert (found.place, found.what) == (7, "state")
    found = first_divergence(lines, lines[:9])
    assert found is not None
    assert (found.place, found.what, found.second) == (9, "length", None)


@pytest.mark.requirement("X3")
@pytest.mark.parametrize("place", [0, 3])
def test_an_implementation_that_raises_diverges_there(place: int) -> None:
    """Also one that cannot be made; what it did by then nobody knows, so it is asked nothing more."""
    header, lines = read_trace(STORIES / "float-in-the-way.jsonl")
    performed = []

    class Breaking(ChainAdapter):
        def __init__(self, header: TraceHeader) -> None:
            super().__init__(header)
            if place == 0:
                raise KeyError("no such band")

        def perform(self, call: str, args: Mapping[str, Any]) -> dict[str, Any]:
            performed.append(call)
            if len(performed) > place:
                raise KeyError("no such band")
            return super().perform(call, args)

    found = replay(header, lines, Breaking)
    assert found is not None
    assert (found.place, found.what, found.first) == (place, "answer", lines[place].answer)
    assert found.second == {"raised": "KeyError", "message": "'no such band'"}
    assert len(performed) == (place + 1 if place else 0)


@pytest.mark.requirement("X3")
def test_of_states_that_differ_the_parts_are_told_that_do() -> None:
    """A band and its figures, the first units bound otherwise; where a side does not tell what it binds, none."""
    header, lines = read_trace(STORIES / "float-in-the-way.jsonl")

    class Swapped(ChainAdapter):
        def state(self) -> dict[str, Any]:
            found = super().state()
            return {**found, "bands": {**found["bands"], "full": [9]}, "tables": "otherwise"}

        def tables(self) -> dict[str, IntArray]:
            found = dict(super().tables())
            found["full"] = found["full"][[0, 2, 1, *range(3, len(found["full"]))]]
            return found

    found = replay(header, lines, Swapped)
    assert found is not None
    assert [tuple(unit) for unit in found.units] == [("full", 1, 9, 8), ("full", 2, 8, 9)]
    assert document(found)["first"] == {
        "bands": {"full": [8, 10, 2, 0, 0, 0, 0, 0]},
        "tables": "769a806aa56beee5",
    }
    assert document(found)["second"] == {"bands": {"full": [9]}, "tables": "otherwise"}
    shown = "\n".join(told(found, lines, around=1))
    assert "band 'full' binds unit 2 to 8 in recorded, to 9 in found" in shown
    assert "window-4" not in shown.split("state recorded")[1].split("band 'full'")[0]
    untold = [line._replace(rebound={}) for line in lines]
    found = replay(header, untold, Swapped)
    assert found is not None
    assert (found.what, found.units) == ("state", ())


@pytest.mark.requirement("X3")
def test_an_adapter_need_not_know_all_of_its_state(operations: dict[str, Operation]) -> None:
    """Another implementation tells what it can; what both tell is compared."""

    class Spans(ChainAdapter):
        def state(self) -> dict[str, Any]:
            return {"retired": super().state()["retired"]}

    header, lines = trace_of(3, operations)
    assert replay(header, lines, Spans) is None


@pytest.mark.requirement("X3")
def test_an_allocator_that_decides_otherwise_diverges_from_the_stories(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flush that does nothing answers otherwise; holes that are chosen from the far end show in the tables alone."""
    found = diverged_stories(monkeypatch, ChainAllocator, "flush_opportunistic", lambda chain, max_moves: 0)
    assert found["flush-under-a-send"] == "answer"

    def take_farthest(holes: Any, count: int) -> IntArray:
        farthest: IntArray = holes.nearest(len(holes))[-count:]
        holes.remove(units_of(farthest))
        return farthest

    assert "state" in diverged_stories(monkeypatch, HoleSet, "take", take_farthest).values()


def diverged_stories(
    patch: pytest.MonkeyPatch, owner: type, name: str, method: Callable[..., Any]
) -> dict[str, str]:
    with patch.context() as planted:
        planted.setattr(owner, name, method)
        found = {story: replay(*read_trace(STORIES / f"{story}.jsonl")) for story in TELLERS}
    return {story: divergence.what for story, divergence in found.items() if divergence is not None}


def test_an_adapter_is_named_by_module_and_factory() -> None:
    """As entry points are."""
    assert adapter_named("kvtide.simulation.traces:ChainAdapter") is ChainAdapter
    with pytest.raises(TraceError, match="no adapter 'nothing'"):
        adapter_named("nothing")


def test_replaying_goes_on_behind_a_divergence() -> None:
    """To write a whole life anew, calls that name what was never handed out are answered by errors."""
    header, lines = read_trace(STORIES / "float-in-the-way.jsonl")
    found = list(replayed(header, lines, worse))
    assert len(found) == len(lines)
    assert attrs.evolve(header, about="") != header
