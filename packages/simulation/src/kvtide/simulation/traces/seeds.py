"""Seeds of the simulation as traces: what one rank's allocator was told while a seed ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TextIO

import attrs

from kvtide.simulation import checks
from kvtide.simulation.actions import Action, Operation, carry_out, installed_operations
from kvtide.simulation.cases import installed_versions
from kvtide.simulation.failures import Failure, failure_of
from kvtide.simulation.run import run_seed
from kvtide.simulation.scenario import Scenario
from kvtide.simulation.sizes import sized_for
from kvtide.simulation.traces.recorder import TraceRecorder
from kvtide.simulation.traces.trace_format import TraceHeader
from kvtide.simulation.world import World


class Recorded(NamedTuple):
    """What of a seed stands in its trace."""

    calls: int
    """Written."""

    failure: Failure | None
    """What failed behind the last of them; where that can be told of no call, what failed of the seed."""


def record_seed(
    out: TextIO,
    seed: int,
    action_count: int,
    *,
    page_tokens: int | None = None,
    operations: Mapping[str, Operation] | None = None,
) -> Recorded:
    """Run a seed and write what its first rank's allocator was told, up to the first check that fails.

    While it is recorded nothing ends within a wait, so a seed may fail and its trace not: then `Recorded` has the seed's failure, and
    the trace goes as far as the seed did. With `page_tokens` the same actions meet a scenario whose largest pages hold so many tokens,
    which may fail where the seed does not; raises `PlanError` where nothing of that kind can be laid out.
    """
    known = installed_operations() if operations is None else operations
    run = run_seed(seed, action_count, known)
    scenario = run.scenario if page_tokens is None else with_page_tokens(run.scenario, page_tokens)
    about = f"seed {seed}, {action_count} actions" + (
        "" if page_tokens is None else f", pages of {page_tokens}"
    )
    with sized_for(scenario):
        recorded = _record(out, about, scenario, run.actions, known)
    if page_tokens is None and recorded.failure is None:
        return recorded._replace(failure=run.failure)
    return recorded


def _record(
    out: TextIO,
    about: str,
    scenario: Scenario,
    actions: Sequence[Action],
    known: Mapping[str, Operation],
) -> Recorded:
    world = World(scenario)
    world.ends_within_waits = False
    rank = world.ranks[0]
    header = TraceHeader(
        layout=world.layout,
        waits_for_transfers=scenario.waits_for_transfers,
        flush_reach=scenario.flush_reach,
        about=about,
        versions=installed_versions(),
    )
    recorder = TraceRecorder(out, header, rank.chain)
    rank.chain, rank.steps = recorder.chain, recorder.steps
    done = 0
    try:
        for action in actions:
            carry_out(action, world, known)
            checks.after_action(world)
            done += 1
        checks.at_end(world)
    except OSError:
        # Of the trace's own file.
        raise
    except Exception as error:  # noqa: BLE001 - whatever is raised is what the run was made to find
        return Recorded(recorder.line_count, failure_of(error, done))
    return Recorded(recorder.line_count, None)


def with_page_tokens(scenario: Scenario, page_tokens: int) -> Scenario:
    """The scenario with that many tokens in its largest pages, about as many units in its arena, and windows as many pages long.

    Pages keep their ratios as far as the number divides. Raises `PlanError` where nothing can be laid out.
    """
    largest = max((band.page_tokens for band in scenario.bands if band.kind != "state"), default=1)
    bands = []
    for band in scenario.bands:
        if band.kind == "state":
            # Beside longer pages a state is as large as it was beside shorter ones.
            entry_bytes = max(16, band.entry_bytes * page_tokens // largest // 16 * 16)
            bands.append(attrs.evolve(band, entry_bytes=entry_bytes))
            continue
        tokens = page_tokens * band.page_tokens // largest
        tokens = tokens if tokens and page_tokens % tokens == 0 else page_tokens
        window = -(-band.window_tokens * page_tokens // largest)
        bands.append(attrs.evolve(band, page_tokens=tokens, window_tokens=max(window, 1) if window else 0))
    # Two windows of one length would be one band.
    longest = 0
    for place in range(len(bands) - 1, -1, -1):
        if bands[place].kind == "window":
            longest = max(bands[place].window_tokens, longest + 1)
            bands[place] = attrs.evolve(bands[place], window_tokens=longest)
    before, after = (
        sum(-(-band.entry_bytes * band.page_tokens // 16) * 16 for band in each)
        for each in (scenario.bands, bands)
    )
    arena_bytes = scenario.arena_bytes * after // before // 16 * 16
    found = attrs.evolve(scenario, bands=tuple(bands), arena_bytes=arena_bytes)
    found.layout()
    return found
