"""What is looked at while nothing runs (rows K11, L8): units held against rows, mirrors against the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtide.arena import TensorDevice
from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.ledger import InvariantChecks, InvariantError
from kvtide.plan import KVStoragePlan
from kvtide.storage.requests import RequestTable


def verify_units(
    plan: KVStoragePlan,
    requests: RequestTable,
    first_held: Mapping[str, IntArray],
    held: Mapping[str, int],
) -> None:
    """Raise `InvariantError` unless each band's units, `held`, are those of the rows in use, from `first_held` to their last page."""
    rows = requests.live_rows()
    expected = {
        pool.name: len(rows)
        if pool.page_tokens is None
        else int((requests.page_counts[rows] - first_held[pool.name][rows]).sum())
        for pool in plan.sub_pools
    }
    if held != expected:
        raise InvariantError(
            "storage.leak",
            f"{held} units are held, {len(rows)} rows in use account for {expected}",
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
