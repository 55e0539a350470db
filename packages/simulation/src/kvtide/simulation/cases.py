"""Failing runs as files: a JSON document that `kvtide stress --replay` and any test can run again."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

import attrs

from kvtide.plan import PlanError
from kvtide.simulation.actions import OPERATION_GROUP, Action
from kvtide.simulation.failures import Failure
from kvtide.simulation.real.real_device import DEVICE_KINDS
from kvtide.simulation.run import Run
from kvtide.simulation.scenario import Scenario

FORMAT = 1
"""Of the document; another one is refused."""

MODELLED = "modelled"
"""The device of a case that failed on no device that ships."""

_DISTRIBUTIONS = ("kvtide-plan", "kvtide-device", "kvtide-ledger", "kvtide-chain", "kvtide-simulation")
"""What runs every case; others bring operations."""


@attrs.frozen(kw_only=True)
class Case:
    """A run to be run again."""

    scenario: Scenario
    """Where."""

    actions: tuple[Action, ...]
    """What."""

    failure: Failure | None
    """What was found."""

    seed: int | None
    """Of the run it comes from; a shrunk one is not what the seed draws."""

    versions: Mapping[str, str]
    """Distribution → version with which it was found."""

    device: str = MODELLED
    """Kind of the devices that it was found on, on which it is replayed."""

    @classmethod
    def of(cls, run: Run, seed: int | None, device: str = MODELLED) -> Case:
        """A run as it was found now."""
        return cls(
            scenario=run.scenario,
            actions=run.actions,
            failure=run.failure,
            seed=seed,
            versions=installed_versions(),
            device=device,
        )


def installed_versions() -> dict[str, str]:
    """Distribution → version, of those that take part: those that the simulation is made of, and all that bring operations."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from source"
    for point in importlib.metadata.entry_points(group=OPERATION_GROUP):
        if point.dist is not None:
            found[point.dist.name] = point.dist.version
    return found


def save_case(path: Path, case: Case) -> None:
    """Write it, one action a line."""
    document = {
        "format": FORMAT,
        "versions": dict(case.versions),
        "seed": case.seed,
        "device": case.device,
        "failure": None if case.failure is None else case.failure.document(),
        "scenario": case.scenario.document(),
    }
    head = json.dumps(document, indent=1, ensure_ascii=False)
    actions = ",\n".join(f"  {json.dumps(action.document())}" for action in case.actions)
    path.write_text(f'{head[:-2]},\n "actions": [\n{actions}\n ]\n}}\n', encoding="utf-8")


def load_case(path: Path) -> Case:
    """Read it; raises `ValueError` that says why for what is no case of this format, `OSError` for no file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        _check_format(document)
        case = Case(
            scenario=Scenario.from_document(document["scenario"]),
            actions=tuple(map(Action.from_document, document["actions"])),
            failure=None if document["failure"] is None else Failure(**document["failure"]),
            seed=document["seed"],
            versions=dict(document["versions"]),
            device=_device_of(document),
        )
        case.scenario.layout()
    except (ValueError, KeyError, TypeError, AttributeError, PlanError) as error:
        raise ValueError(f"{path} holds no case: {type(error).__name__}: {error}") from error
    return case


def _device_of(document: Mapping[str, object]) -> str:
    # Cases written before there were others name none.
    device = document.get("device", MODELLED)
    if device not in (MODELLED, *DEVICE_KINDS):
        raise ValueError(f"its device is {device!r}, not one of {(MODELLED, *DEVICE_KINDS)}")
    return str(device)


def _check_format(document: Mapping[str, object]) -> None:
    if document["format"] != FORMAT:
        raise ValueError(f"its format is {document['format']!r}, this version reads {FORMAT}")
