"""What becomes of requests that admission lets in: their hits, their state slots, their rows (rows K2, K5, K8).

    lengths checked ── hits locked ── offer ── slots taken ── checkpoints copied ── row opened, promised, counted
                                        └ refused: unlocked                         └ cannot fail from here on

A refusal leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.sizing import SizedPlan
from kvtide.storage.admission import ChainPrefillBudget, Promise
from kvtide.storage.evicting_takes import EvictingTakes
from kvtide.storage.offering_hits import offer_with_hits
from kvtide.storage.prefix_sharing import PrefixSharing
from kvtide.storage.refusals import AdmissionRefusal
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_state import RowResets
from kvtide.storage.row_units import RowUnits


class Admitting:
    """Opens rows of one storage, which alone calls it."""

    def __init__(
        self,
        sized: SizedPlan,
        chain: ChainAllocator,
        requests: RequestTable,
        *,
        units: RowUnits,
        takes: EvictingTakes,
        admission: ChainPrefillBudget,
        sharing: PrefixSharing | None,
        row_resets: RowResets,
    ) -> None:
        """No row has been opened."""
        self._sized = sized
        self._chain = chain
        self._requests = requests
        self._units = units
        self._takes = takes
        self._admission = admission
        self._sharing = sharing
        self._row_resets = row_resets
        self._has_checkpoints = sized.policy.grid_tokens(sized.plan) is not None

    def admit(
        self,
        lengths: IntArray,
        outputs: IntArray,
        tokens: Sequence[IntArray] | None,
        extra_keys: Sequence[Hashable] | None,
        *,
        whole: bool,
    ) -> IntArray | AdmissionRefusal:
        """See `KVStorage.admit`; what is handed in has been looked at."""
        if self._sharing is not None and tokens is not None:
            return self._admit_sharing(self._sharing, lengths, outputs, tokens, extra_keys, whole=whole)
        promise = self._admission.offer(lengths.tolist(), outputs.tolist(), whole=whole)
        if isinstance(promise, AdmissionRefusal):
            return promise
        slots = self._take_slots(len(lengths), slots_each=1)
        return self._open(lengths, outputs, promise, np.zeros_like(lengths), slots)

    def _admit_sharing(
        self,
        sharing: PrefixSharing,
        lengths: IntArray,
        outputs: IntArray,
        tokens: Sequence[IntArray],
        extra_keys: Sequence[Hashable] | None,
        *,
        whole: bool,
    ) -> IntArray | AdmissionRefusal:
        """Rows that begin with hits; without any where those are in the way of what asks for them."""
        keys = [None] * len(tokens) if extra_keys is None else extra_keys
        offer = offer_with_hits(self._admission, sharing, tokens, outputs.tolist(), keys, whole=whole)
        if isinstance(offer, AdmissionRefusal):
            return offer
        try:
            slots = self._take_slots(len(tokens), slots_each=self._sized.policy.rule.slots)
            try:
                sharing.copy_checkpoints(offer.locks, slots[:, 0])
            except BaseException:
                self._chain.free_state_slots(slots.reshape(-1))
                raise
        except BaseException:
            # Nobody would ever end these locks.
            sharing.unlock(offer.locks)
            raise
        rows = self._open(lengths, outputs, offer.promise, np.array(offer.cached_tokens, np.int64), slots)
        sharing.begin(rows, offer.locks, tokens, slots)
        return rows

    def _take_slots(self, row_count: int, slots_each: int) -> IntArray:
        """State slots of new rows, the running one first, `[rows, …]`; −1 without a state band."""
        if self._sized.plan.state_sub_pool is None:
            return np.full((row_count, 1), -1, np.int64)
        return self._takes.take_slots(row_count * slots_each).reshape(row_count, slots_each)

    def _open(
        self, prompts: IntArray, outputs: IntArray, promise: Promise, cached: IntArray, slots: IntArray
    ) -> IntArray:
        """Rows for requests that were offered `promise`, with the state slots of each, `slots [rows, …]`. It cannot fail."""
        rows = self._requests.open(
            prompts,
            prompts + outputs - 1,
            slots[:, 0],
            chunk_limit=promise.chunk_limit,
            cached_tokens=cached,
            has_checkpoints=self._has_checkpoints,
        )
        self._row_resets.mark(rows)
        self._admission.promise(rows, promise)
        self._units.begin(rows, slots.shape[1])
        return rows
