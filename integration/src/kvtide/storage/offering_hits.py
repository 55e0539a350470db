"""Admission with hits: a hit never makes its request wait, and what is refused leaves the tree as it was (rows K5, K8).

    match and lock ── with the hits? ──┬── yes ── accept
                                       └── no ─── without any? ──┬── yes ── everything is computed
                                                                 └── no ─── the locks end, nothing has changed

Admission is asked behind the lock, so that it does not count as free what the hit keeps. A request that is refused with its hit is asked for
without, whether it would have to wait or go: its wait would last until others end, computing takes as many forwards as the prompt has
chunks. There is little between the two answers, since what a hit keeps is part of what its request is promised (`Hits`).

Requests that are asked for together begin with all their hits or with none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs

from kvtide.device import IntArray
from kvtide.storage.admission import ChainPrefillBudget, Promise
from kvtide.storage.prefix_sharing import PrefixSharing
from kvtide.storage.refusals import AdmissionRefusal
from kvtide.storage.tree import TreeLock


@attrs.frozen(kw_only=True)
class Offer:
    """What requests are promised, and what they begin with."""

    promise: Promise
    """Beside their hits."""

    locks: list[TreeLock]
    """One a request; whoever has the offer ends them."""

    cached_tokens: tuple[int, ...]
    """Of each hit."""


def offer_with_hits(
    admission: ChainPrefillBudget,
    sharing: PrefixSharing,
    prompts: Sequence[IntArray],
    outputs: Sequence[int],
    extra_keys: Sequence[Hashable],
    *,
    whole: bool,
) -> Offer | AdmissionRefusal:
    """What requests with these prompts are promised, all together, or why they are not admitted now. Raises what `offer` does."""
    lengths = [len(prompt) for prompt in prompts]
    locks = sharing.lock(prompts, extra_keys)
    try:
        hits = sharing.hits(locks)
        answer = admission.verdict(lengths, outputs, hits, whole=whole)
        if isinstance(answer, AdmissionRefusal) and hits.may_be_in_the_way:
            sharing.unlock(locks)
            locks = []
            locks = sharing.lock([prompt[:0] for prompt in prompts], extra_keys)
            hits = sharing.hits(locks)
            answer = _best(answer, admission.verdict(lengths, outputs, hits, whole=whole))
        if isinstance(answer, AdmissionRefusal):
            admission.refused(lengths, outputs, answer)
        else:
            sharing.accept(locks)
            return Offer(promise=answer, locks=locks, cached_tokens=hits.tokens)
    except BaseException:
        # Nobody would ever end these locks.
        sharing.unlock(locks)
        raise
    sharing.unlock(locks)
    return answer


def _best(with_hits: AdmissionRefusal, without: Promise | AdmissionRefusal) -> Promise | AdmissionRefusal:
    """Of requests that are refused either way, those are turned away that both answers name."""
    if isinstance(without, Promise) or not without.is_final:
        return without
    turned_away = tuple(place for place in without.turned_away if place in with_hits.turned_away)
    first_that_fit = None if turned_away else with_hits.first_that_fit or 1
    return attrs.evolve(without, turned_away=turned_away, first_that_fit=first_that_fit)
