"""The prefix tree in the simulation of page safety: what its operations meet, the stalls of K9, and rules that are weakened."""

from __future__ import annotations

import importlib.metadata
import logging
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import structlog

from kvtide.simulation import (
    OPERATION_GROUP,
    OPERATIONS,
    Action,
    BandDraft,
    Run,
    not_reached,
    read_trace,
    record_seed,
    replay,
    run_actions,
    run_seed,
)
from kvtide.sizing import CheckpointStrategy
from kvtide.storage.simulated import OPERATIONS as TREE_OPERATIONS

from .simulated_lives import (
    ALL,
    BANDS,
    END,
    LIFE,
    PROCESS,
    RARE,
    STATELESS,
    WINDOWLESS,
    admitted_under_a_forward,
    begin,
    carried_out,
    serve,
    serving,
)
from .weakened import RULES

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"

OTHER_OPERATIONS = {name: one for name, one in ALL.items() if one in OPERATIONS}

OTHERS = {"admit", "grow", "launch", "process", "finish", "abort", "flush", "pass time"}
USES = {"end use", "unfix", "begin transfer"}
FEW = {name: one for name, one in ALL.items() if name.startswith("tree: ") or name in OTHERS | USES}
"""The tree's, and so much beside it that arenas are full and forwards of others run: a tree is met sooner among few."""

SEEDS = range(24)
ACTIONS = 200

CUT = range(4)
"""Seeds of which parts are run, too."""

STALLS = ("no tracking slot", "no replacement slot")


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """A run moves pages thousands of times, and each is logged."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()


@pytest.mark.requirement("K8", "K9", "X1", "L2", "H1", "T1")
def test_requests_share_prefixes_among_others_and_every_check_holds() -> None:
    """Hits, hand-overs, evictions under forwards, reads that outlive nodes, both stalls: all that the tree's operations may meet is met by
    seeds, parts of them, and lives by hand, and nothing is wrong with it.
    """
    coverage: Counter[tuple[str, str]] = Counter()
    facts: Counter[str] = Counter()
    for seed in SEEDS:
        run = run_seed(seed, ACTIONS, FEW)
        assert run.failure is None, f"seed {seed}: {run.failure}"
        coverage.update(run.coverage)
        facts.update(run.facts)
        # Only what was drawn for another state finds nothing to do.
        for part in (run.actions[::-1], run.actions[1::3]) if seed in CUT else ():
            cut = run_actions(run.scenario, part, FEW)
            assert cut.failure is None, f"a part of seed {seed}: {cut.failure}"
            coverage.update(cut.coverage)
    for life, _ in RARE:
        coverage.update(life().coverage)
    assert not_reached({one.name: one for one in TREE_OPERATIONS}, coverage) == {}
    assert ("end use", "backup over, freed under it") in coverage
    assert facts["tree: units rehomed"] > 2
    assert all(facts[f"tree: {reason}"] for reason in STALLS)


@pytest.mark.requirement("K8", "X1")
@pytest.mark.parametrize("place", range(len(RARE)))
def test_a_rare_life_reaches_what_it_is_kept_for(place: int) -> None:
    """Whatever seeds draw."""
    life, reaches = RARE[place]
    run = life()
    assert run.failure is None
    assert reaches <= set(run.coverage)


@pytest.mark.requirement("K8", "X1")
def test_the_tree_stands_among_all_that_is_drawn() -> None:
    """Loads and receives take what the tree let go of; refills, rehomings and questions of others meet bands that it shares."""
    hits = 0
    for seed in (1, 2, 4, 13):
        run = run_seed(seed, 300, ALL)
        assert run.failure is None, f"seed {seed}: {run.failure}"
        hits += sum(
            count
            for (name, outcome), count in run.coverage.items()
            if name == "tree: begin" and "a hit" in outcome
        )
    assert hits


@pytest.mark.requirement("X1")
def test_the_entry_point_that_is_declared_leads_to_the_operations() -> None:
    """Whether what is declared is also installed, so that `kvtide stress` finds it, is for `tools/installed.py` to say, before each run of it."""
    named = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"][OPERATION_GROUP]
    for name, value in named.items():
        point = importlib.metadata.EntryPoint(name, value, OPERATION_GROUP)
        assert point.load() is TREE_OPERATIONS


@pytest.mark.requirement("X3")
def test_a_trace_of_a_shared_life_replays(tmp_path: Path) -> None:
    """What the tree makes an allocator do is written down as calls, so whoever replays it needs no tree."""
    path, calls = tmp_path / "seed.jsonl", set[str]()
    for page_tokens in (None, 16):
        with path.open("w", encoding="utf-8") as out:
            recorded = record_seed(out, 1, ACTIONS, page_tokens=page_tokens, operations=ALL)
        assert recorded.calls > 100
        assert recorded.failure is None
        header, lines = read_trace(path)
        assert replay(header, lines) is None
        calls |= {line.call for line in lines}
    assert {"chain.rehome_window", "chain.copy_state_slots", "chain.fits_after_frees"} <= calls


@pytest.mark.requirement("X1")
def test_a_case_says_which_operations_it_lacks() -> None:
    """A failure that the tree had a part in is no failure of a simulation without it."""
    with pytest.raises(ValueError, match=r"operations \['tree: begin'\] are not installed"):
        run_actions(serving(CheckpointStrategy.NO_BUFFER, overlap=False), [begin(2, 1)], OTHER_OPERATIONS)


# ── by hand ──

ALWAYS = 255
STALLING = (
    begin(tokens=8, outputs=40),
    *[serve(8, crowds=ALWAYS, fixes=ALWAYS)] * 6,
    END,
)

GRIDS = [
    (CheckpointStrategy.EXTRA_BUFFER, False),
    (CheckpointStrategy.EXTRA_BUFFER, True),
    (CheckpointStrategy.EXTRA_BUFFER_LAZY, True),
]


@pytest.mark.requirement("K9", "X1")
@pytest.mark.parametrize(("strategy", "overlap"), GRIDS)
def test_a_request_that_stalls_both_ways_holds_what_it_was_priced_for(
    strategy: CheckpointStrategy, overlap: bool
) -> None:
    """Its checkpoints are fixed as they go over, so the tree has none to spare, and others have taken the rest: nothing replaces the slot,
    then none is left to track into. It goes on to its end, its windows retiring as if each checkpoint had been taken.
    """
    run = carried_out(serving(strategy, overlap=overlap), *STALLING)
    assert run.failure is None
    assert {reason for reason in STALLS if run.facts.get(f"tree: {reason}")} == {*STALLS}
    assert run.coverage["tree: end", "complete"] == 1


@pytest.mark.requirement("K9", "X2")
@pytest.mark.parametrize(("strategy", "overlap"), GRIDS)
def test_a_floor_that_waits_for_its_checkpoint_is_noticed(
    strategy: CheckpointStrategy, overlap: bool
) -> None:
    """The same life without forgoing: windows pile up behind the last checkpoint that was taken, past the price."""
    with pytest.MonkeyPatch.context() as patch:
        RULES["floor_waits_for_the_checkpoint"](patch)
        run = carried_out(serving(strategy, overlap=overlap), *STALLING)
    assert run.failure is not None
    assert run.failure.check == "capacity_answer"
    assert "of band 'window-6'" in run.failure.message


@pytest.mark.requirement("K8", "K9", "X1")
@pytest.mark.parametrize(("strategy", "overlap"), GRIDS)
def test_nobody_fixes_a_slot_that_its_row_copies_onto_again(
    strategy: CheckpointStrategy, overlap: bool
) -> None:
    """The tree takes no checkpoint where it keeps one, be it that no hit ends there since the window's tail is gone. The row keeps such a slot,
    so nobody else may have it: others fix only what the tree is certain to take.
    """
    run = carried_out(
        serving(strategy, overlap=overlap),
        *LIFE,
        Action("tree: make room", {"band 1": 64}),
        begin(8, 40),
        *[serve(8, fixes=ALWAYS)] * 6,
        END,
    )
    assert run.failure is None
    assert run.coverage["tree: make room", "evicted, idle"] == 1
    assert run.coverage["tree: begin", "with nothing"] == 2, "tails are gone"


@pytest.mark.requirement("K8", "X1")
@pytest.mark.parametrize(("strategy", "overlap"), GRIDS)
def test_the_tree_lets_go_of_what_an_admission_needs_under_a_forward(
    strategy: CheckpointStrategy, overlap: bool
) -> None:
    """For a prompt that it knows nothing of: too rare a draw for a slice of seeds."""
    run = admitted_under_a_forward(strategy, overlap=overlap)
    assert run.failure is None
    assert run.coverage["tree: begin", "with nothing, evicting, under a forward"] == 1
    assert run.coverage["tree: end", "complete"] == 4


def each_ends_one_token_further() -> Run:
    """Requests of one text, of which each is aborted under a forward one token further on, and a longer one behind each.

    With no_buffer the running slot is what goes over: not while a forward runs that advances it.
    """
    lives = [(begin(7, 12), serve(forwards), END, begin(19, 1), END) for forwards in range(2, 12)]
    scenario = serving(CheckpointStrategy.NO_BUFFER, overlap=False)
    return carried_out(scenario, *[action for life in lives for action in life])


def a_checkpoint_is_forgone_under_the_next_one(bands: tuple[BandDraft, ...] = BANDS) -> Run:
    """Two forwards are in flight that end on the grid; when the first was recorded others had every slot, and gave them back before the
    second. Then requests of every length look for what was kept.
    """
    stalling = serve(2, crowds=ALWAYS, fixes=ALWAYS)
    others = [action for tokens in range(6, 40, 2) for action in (begin(tokens, 1), END)]
    return carried_out(
        serving(CheckpointStrategy.EXTRA_BUFFER, overlap=True, bands=bands),
        begin(tokens=40, outputs=12),
        stalling,
        serve(2, crowds=0b01, relents=0b10),
        PROCESS,
        PROCESS,
        END,
        *others,
    )


def tokens_are_told_behind_a_gap() -> Run:
    """Three are not told, in a row of the table that said something else before; then somebody says that."""
    another = 1 << 3
    return carried_out(
        serving(CheckpointStrategy.NO_BUFFER, overlap=False, bands=STATELESS),
        *(begin(8, 12, text=another), serve(8), serve(8), serve(8), END, Action("tree: empty", {})),
        *(begin(8, 12, tells=0xFFFF ^ 0b111 << 9), serve(8), serve(8), serve(8), END),
        *(begin(19, 1, text=another), serve(8), END),
    )


LIVES: Mapping[str, Callable[[], Run]] = {
    "frees_do_not_pend": partial(admitted_under_a_forward, CheckpointStrategy.EXTRA_BUFFER, overlap=True),
    "state_under_a_shorter_length": each_ends_one_token_further,
    "state_of_a_longer_prefix": a_checkpoint_is_forgone_under_the_next_one,
    "hit_behind_its_state": partial(a_checkpoint_is_forgone_under_the_next_one, WINDOWLESS),
    "gaps_in_what_is_told_ignored": tokens_are_told_behind_a_gap,
}
"""By rule, the life that it is there for, where random ones seldom come to it."""


@pytest.mark.requirement("K7", "K8", "X2")
@pytest.mark.parametrize("rule", LIVES)
def test_a_rule_that_random_runs_seldom_need_is_noticed_where_a_life_does(rule: str) -> None:
    """Each life is as it should be, and with its rule weakened somebody reads what is not of its own prompt, or what another is writing."""
    assert LIVES[rule]().failure is None
    with pytest.MonkeyPatch.context() as patch:
        RULES[rule](patch)
        failure = LIVES[rule]().failure
    assert failure is not None
    assert failure.check == ("unordered_overlap" if rule == "frees_do_not_pend" else "lost_write")


@pytest.mark.requirement("K8", "X2")
@pytest.mark.parametrize("rule", sorted(RULES.keys() - LIVES.keys()))
def test_a_weakened_rule_is_found(rule: str) -> None:
    """By some check, within a bounded number of seeds: the operations reach what the rule prevents."""
    with pytest.MonkeyPatch.context() as patch:
        RULES[rule](patch)
        assert any(run_seed(seed, ACTIONS, FEW).failure is not None for seed in SEEDS)
