"""What is looked at while nothing runs (rows K11, L8): units held against rows, mirrors against the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtide.arena import TensorDevice
from kvtide.chain import ChainAllocator
from kvtide.ledger import InvariantChecks, InvariantError
from kvtide.storage.requests import RequestTable


def verify_units(held: Mapping[str, int], by_rows: Mapping[str, int], by_cache: Mapping[str, int]) -> None:
    """Raise `InvariantError` unless each band's units, `held`, are those of the rows in use and of the prefix cache.

    A unit that is fixed or quarantined counts as its row's, or the cache's, until it is freed, and afterwards as withheld.
    """
    expected = {name: count + by_cache.get(name, 0) for name, count in by_rows.items()}
    if held != expected:
        raise InvariantError(
            "storage.leak",
            f"{dict(held)} units are held; rows in use account for {dict(by_rows)}, a cache for {dict(by_cache)}",
            "a release was skipped, or units were taken from the chain directly",
        )


def verify_mirrors(
    device: TensorDevice, requests: RequestTable, chain: ChainAllocator, checks: InvariantChecks
) -> None:
    """Upload what is staged, wait for it on the host, and act on a mirror that is not what the host has."""
    device.upload(device.schedule_stream)
    device.wait_on_host(device.record_event(device.schedule_stream))
    for name, table in device.tables.items():
        mirrored = table.cpu().numpy()
        truth = (
            requests.pages.reshape(-1)
            if name == "rows"
            else chain.physical_units(name.removeprefix("ids:"), np.arange(len(mirrored)))
        )
        wrong = np.flatnonzero(mirrored != truth)
        if len(wrong):
            at = int(wrong[0])
            checks.broken(
                "mirror.equals_host",
                f"mirror {name!r} differs in {len(wrong)} entries: entry {at} is {mirrored[at]}, the host has {truth[at]}",
                "a change was not staged, an upload was lost, or something else writes the mirror",
            )
