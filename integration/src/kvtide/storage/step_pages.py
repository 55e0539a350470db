"""Which pages a step takes, and which its forward writes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtide.chain import BandTake
from kvtide.device import IntArray
from kvtide.plan import KVStoragePlan, SubPoolKind
from kvtide.storage.requests import RequestTable
from kvtide.storage.steps import PreparedStep


def takes_of_step(plan: KVStoragePlan, new_pages: IntArray, ends: IntArray) -> Mapping[str, BandTake]:
    """How each band takes the pages that are new to rows, where a forward writes whole pages: it fills all but the last of a row
    that ends inside it, which is zeroed.

    `new_pages` of each row, which then has `ends` tokens.
    """
    ends_inside = (new_pages > 0) & (ends % plan.page_tokens != 0)
    how = BandTake(unwritten=(np.cumsum(new_pages) - 1)[ends_inside])
    return {pool.name: how for pool in plan.token_sub_pools}


def writes_of_step(plan: KVStoragePlan, requests: RequestTable, step: PreparedStep) -> Mapping[str, IntArray]:
    """What a step's forward writes, by band: the pages that its tokens fall into, and its rows' state slots."""
    first = step.starts // plan.page_tokens
    last = (step.starts + step.counts - 1) // plan.page_tokens
    pages = requests.held(step.rows, first, last + 1)
    return {
        pool.name: requests.state_slots[step.rows] if pool.kind is SubPoolKind.STATE else pages
        for pool in plan.sub_pools
    }
