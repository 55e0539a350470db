"""Actions on real devices: drawn or carried out on the modelled one, then again on as many ranks, each with a device of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from kvtide.simulation import checks
from kvtide.simulation.actions import Action, Operation, carry_out, installed_operations
from kvtide.simulation.bands import SimulatedBand
from kvtide.simulation.failures import Failure, failure_of
from kvtide.simulation.rank import Rank
from kvtide.simulation.real.real_device import RealDevice
from kvtide.simulation.run import Run, facts_of, run_actions, run_seed
from kvtide.simulation.scenario import Scenario
from kvtide.simulation.sizes import sized_for
from kvtide.simulation.world import World

DeviceOpener: TypeAlias = Callable[[int, int], RealDevice]
"""Makes a device with so many bytes and that seed."""


class RealRank(Rank):
    """A rank whose device is one that ships."""

    device: Any  # A `RealDevice`: what `Rank` calls of a `ModelledDevice` it has, and what else stands below.

    def _prepare_device(self) -> None:
        """See `Rank._prepare_device`; what is needed is compiled before the first delay is timed."""
        self.device.prewarm([band.grid for band in self.bands])

    def _words_of(self, band: SimulatedBand) -> Any:
        """See `Rank._words_of`."""
        return self.device.units(band.grid, band.unit_count)

    @property
    def schedule_waits(self) -> int:
        """See `Rank.schedule_waits`."""
        count: int = self.device.waits[self.device.schedule_stream.name]
        return count

    def fingerprint(self) -> tuple[Any, ...]:
        """See `Rank.fingerprint`."""
        return (
            tuple((self.chain.span(band.name), self.table(band).tobytes()) for band in self.bands),
            self.steps.retired_through,
            self.device.queued["schedule"],
            self.device.queued["forward"],
        )

    def mirror(self, name: str) -> Any:
        """See `Rank.mirror`."""
        return self.device.mirror(name)


def run_seed_on(
    opener: DeviceOpener, seed: int, action_count: int, operations: Mapping[str, Operation] | None = None
) -> Run:
    """Draw a seed's actions, and carry them out on devices that `opener` makes, say `partial(open_device, "cuda")`.

    A run that fails as it is drawn, on modelled devices, is returned as it is. Raises what `opener` raises.
    """
    known = installed_operations() if operations is None else operations
    return _run_again(opener, run_seed(seed, action_count, known), known)


def run_actions_on(
    opener: DeviceOpener,
    scenario: Scenario,
    actions: Sequence[Action],
    operations: Mapping[str, Operation] | None = None,
) -> Run:
    """Carry out these actions on devices that `opener` makes: how a case of `run_seed_on` is run again.

    A run that fails on modelled devices is returned as it is. Raises what `run_actions` and `opener` raise.
    """
    known = installed_operations() if operations is None else operations
    return _run_again(opener, run_actions(scenario, actions, known), known)


def _run_again(opener: DeviceOpener, drawn: Run, known: Mapping[str, Operation]) -> Run:
    """What was done on modelled devices, unless that failed."""
    if drawn.failure is not None:
        return drawn
    with sized_for(drawn.scenario):
        return _run_drawn(opener, drawn, known)


def _run_drawn(opener: DeviceOpener, drawn: Run, known: Mapping[str, Operation]) -> Run:
    world = World(drawn.scenario)
    devices: list[Any] = [opener(world.layout.arena_bytes, seed) for seed in drawn.scenario.rank_seeds]
    world.ranks = [
        RealRank(place, drawn.scenario, world.layout, world.bands, device)
        for place, device in enumerate(devices)
    ]
    coverage: Counter[tuple[str, str]] = Counter()
    done, failure = _carry_out(world, drawn, known, coverage)
    return attrs.evolve(
        drawn,
        actions=drawn.actions[:done],
        failure=failure,
        coverage=coverage,
        facts=facts_of(world),
        is_modelled=False,
    )


def _carry_out(
    world: World, drawn: Run, known: Mapping[str, Operation], coverage: Counter[tuple[str, str]]
) -> tuple[int, Failure | None]:
    """How many actions were carried out, and what failed."""
    done, place, failure = 0, 0, None
    try:
        for action in drawn.actions:
            place, done = done, done + 1
            coverage[action.operation, carry_out(action, world, known)] += 1
            checks.after_action(world)
        place = done
        checks.at_end(world)
        for rank in world.ranks:
            rank.device.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever is raised is what the run was made to find
        failure = failure_of(error, place)
    try:
        # Whatever failed, nothing may still run over memory that is given back.
        for rank in world.ranks:
            rank.device.run_all()
    except Exception as error:  # noqa: BLE001 - so is this, where it is the first
        failure = failure or failure_of(error, place)
    return done, failure
