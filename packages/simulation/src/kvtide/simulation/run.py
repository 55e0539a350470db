"""One run: a scenario, actions drawn or given, and where it failed.

seed ──► scenario ──► draw an action, apply it, check ──► … ──► rest, free all, check
                      └── the actions, as data ──► the same run again, or a shorter one
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs

from kvtide.plan import PlanError
from kvtide.simulation import checks
from kvtide.simulation.actions import Action, Operation, carry_out, installed_operations
from kvtide.simulation.failures import Failure, failure_of
from kvtide.simulation.scenario import Scenario, draw_scenario
from kvtide.simulation.sizes import sized_for
from kvtide.simulation.world import World

_DRAWS = 1_000
"""Of an operation, before a run gives up finding one that can act; one that always can ends it sooner."""

_TEMPERS = (0.1, 0.5, 1.0, 1.0, 4.0)
"""What a seed makes of an operation's weight. Some bugs need much of one thing and hardly any of another, and a mix that is the same
for every seed never has both (swarm testing)."""


@attrs.frozen(kw_only=True)
class Run:
    """What was done, and what came of it."""

    scenario: Scenario
    """Where."""

    actions: tuple[Action, ...]
    """What, the failing one the last."""

    failure: Failure | None
    """What was found; `None` when every check held to the end."""

    coverage: Mapping[tuple[str, str], int]
    """Pair of operation and outcome → how often."""

    facts: Mapping[str, int]
    """What happened how often, beside outcomes."""

    is_modelled: bool = attrs.field(default=True, eq=False)
    """Whether modelled devices ran it: also of a run that was meant for others, and failed before it came to them."""


def run_seed(seed: int, action_count: int, operations: Mapping[str, Operation] | None = None) -> Run:
    """Draw a scenario and `action_count` actions; the same seed and operations draw the same. `None` for all installed.

    The order of `operations` counts, too: where they are installed, and in what is kept of seeds, it is that of their names.
    """
    known = installed_operations() if operations is None else operations
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    scenario = draw_scenario(rng)
    names = list(known)
    weights = [known[name].weight * rng.choice(_TEMPERS) for name in names]

    def draw(world: World, place: int) -> Action | None:
        if place == action_count:
            return None
        for _ in range(_DRAWS):
            name = rng.choices(names, weights)[0]
            numbers = known[name].generate(rng, world)
            if numbers is not None:
                return Action(name, numbers)
        return None

    return _run(scenario, draw, known)


def run_actions(
    scenario: Scenario, actions: Sequence[Action], operations: Mapping[str, Operation] | None = None
) -> Run:
    """Carry out these actions in this scenario.

    Raises `ValueError` for an operation that is not installed, and `PlanError` for a scenario that cannot be laid out; whatever else is
    raised is a failure.
    """
    known = installed_operations() if operations is None else operations
    unknown = sorted({action.operation for action in actions} - set(known))
    if unknown:
        raise ValueError(f"operations {unknown} are not installed; installed are {sorted(known)}")
    return _run(scenario, lambda _, place: actions[place] if place < len(actions) else None, known)


def _run(
    scenario: Scenario,
    next_action: Callable[[World, int], Action | None],
    operations: Mapping[str, Operation],
) -> Run:
    coverage: Counter[tuple[str, str]] = Counter()
    done: list[Action] = []
    world, failure, action = None, None, None
    try:
        with sized_for(scenario):
            world = World(scenario)
            while (action := next_action(world, len(done))) is not None:
                done.append(action)
                coverage[action.operation, carry_out(action, world, operations)] += 1
                checks.after_action(world)
            checks.at_end(world)
    except Exception as error:
        if world is None and isinstance(error, PlanError):
            raise
        # Whatever else is raised is what the run was made to find.
        failure = failure_of(error, len(done) if action is None else len(done) - 1)
    return Run(
        scenario=scenario,
        actions=tuple(done),
        failure=failure,
        coverage=coverage,
        facts={} if world is None else facts_of(world),
    )


def facts_of(world: World) -> Mapping[str, int]:
    """What happened how often; where a failure left books that cannot be read, what the world itself has counted."""
    try:
        figures = world.figures()
    except Exception:  # noqa: BLE001 - the failure that broke them is told already
        return dict(world.facts)
    return {
        **world.facts,
        "units moved": figures.moved,
        "units zeroed": figures.zeroed,
        "settles": figures.settles,
    }
