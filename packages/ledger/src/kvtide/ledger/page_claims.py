"""Promises about a band's pages: fixed, reserved, held (rows L4, T4). Nobody waits for one; pages are left alone or taken along."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray
from kvtide.ledger.claims import Claims
from kvtide.ledger.errors import InvariantError
from kvtide.ledger.fenced_bytes import FencedBytes
from kvtide.ledger.page_lists import PageLists, some
from kvtide.ledger.signals import NetworkTransfer, ReceiveHold, Reservation

BoolArray: TypeAlias = npt.NDArray[np.bool_]


class PageClaims:
    """The claims of one band's ledger, which `PageUsage` completes. Nothing in it waits, neither the host nor a stream."""

    name: str
    epoch: int
    fences: FencedBytes
    _band: int
    _lists: PageLists

    def _begin_claims(self, page_count: int) -> None:
        self._fixed = Claims(self.name, "fixes", page_count)
        self._reserved = Claims(self.name, "reserves", page_count)
        self._held = Claims(self.name, "holds", page_count)

    def fix(self, owner: Hashable, pages: IntArray) -> None:
        """Promise that `pages` neither move nor are handed out until `unfix(owner)`; owners nest. Nobody waits for it.

        An owner is a `Reservation`, a relief: anything with an identity. A failed transfer goes by `quarantine`, which also fixes
        what has left the band; `InvariantError` otherwise.
        """
        self._lists.check(pages, f"fixing for {owner}")
        if isinstance(owner, NetworkTransfer):
            raise InvariantError(
                "usage.quarantined_whole",
                f"{owner.name!r} fixes pages of band {self.name!r} by fix",
                "a failed transfer's fenced bytes were forgotten; call quarantine",
            )
        self._fixed.add(owner, pages)
        self.epoch += 1
        if isinstance(owner, Reservation):
            self._reserved.add(owner, pages)

    def unfix(self, owner: Hashable) -> IntArray:
        """End an owner's promise, a transfer's quarantine among them; its pages, of which others may still fix some. Nobody waits.

        A load's reservation ends after its copy is recorded, so that no moment is left in between. Raises `InvariantError` for
        an owner that fixes nothing.
        """
        pages = self._fixed.remove(owner)
        self.epoch += 1
        if isinstance(owner, Reservation):
            self._reserved.remove(owner)
        elif isinstance(owner, NetworkTransfer):
            self.fences.end(self._band, owner)
        return pages

    def fixes(self, owner: Hashable) -> bool:
        """Whether `owner` fixes pages here. Nobody waits."""
        return owner in self._fixed.owned

    def holds(self, hold: ReceiveHold) -> bool:
        """Whether `hold` holds pages here. Nobody waits."""
        return hold in self._held.owned

    def reserved(self, pages: IntArray) -> BoolArray:
        """Which of `pages` a load has reserved, whoever else fixes some: an owner frees none of them. Nobody waits."""
        self._lists.check(pages, "a question")
        return self._reserved.claimed(pages)

    def hold(self, hold: ReceiveHold, pages: IntArray) -> None:
        """Keep moves made for gain away from a receive's pages until publication; nobody waits for a hold.

        A move made all the same takes the hold along (`vacate`), and the ids are then read anew (row T4).
        """
        self._lists.check(pages, hold.name)
        self._held.add(hold, pages)
        self.epoch += 1

    def release_hold(self, hold: ReceiveHold) -> IntArray:
        """End a hold; its pages, where they are now. Nobody waits. Raises `InvariantError` for one that holds nothing."""
        pages = self._held.remove(hold)
        self.epoch += 1
        return pages

    def is_fixed(self, pages: IntArray) -> BoolArray:
        """Which of `pages` somebody fixes: they neither move nor are handed out. Nobody waits for them."""
        return self._fixed.claimed(pages)

    def is_held(self, pages: IntArray) -> BoolArray:
        """Which of `pages` a receive holds until publication. Nobody waits."""
        return self._held.claimed(pages)

    @property
    def has_holds(self) -> bool:
        """Whether a receive awaits publication: a flush for gain leaves the whole band alone. Nobody waits."""
        return bool(self._held)

    def fixed_pages(self) -> IntArray:
        """Every fixed page, ascending: what a plan cannot move. Nobody waits for them."""
        return self._fixed.pages()

    def held_pages(self) -> IntArray:
        """Every held page, ascending. Nobody waits for them."""
        return self._held.pages()

    def _fixed_page(self, pages: IntArray, verb: str) -> InvariantError:
        return InvariantError(
            "usage.fixed_page_stays",
            f"pages {some(pages[self._fixed.claimed(pages)])} of band {self.name!r} {verb}, fixed by {self._fixed.owners()}",
            "a plan left a fixed page out",
        )
