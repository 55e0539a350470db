"""Every use of a band's pages that is not over (row L4): the band's ledger.

| use | opened by | over when | its hazard |
| - | - | - | - |
| a forward writes pages, perhaps unknown ones | `record_forward_writes` | the forward retires | none to the next writer (the page is live, or pends); a move waits |
| a copy or transfer reads or writes pages | `record` | `end` | COPY_READ, COPY_WRITE, NETWORK |
| a move left its sources behind, and some forward or send still reads them | `vacate` | the forward retires, the send ends | FORWARD, NETWORK |
| such bytes left the band with its frontier | `fence` | the reader is over | the reader's, for whichever band writes next |
| somebody was promised that pages stay | `fix`, `hold` | `unfix`, `release_hold` | FIXED; none for a hold |
| a failed transfer may still touch pages and fenced bytes | `quarantine` | `unfix` | FIXED |

Pages travel as one-dimensional int64 arrays that name no page twice; a use keeps a reference to its array, so the caller must
not write to it afterwards. Adding a use of n pages costs O(n), ending one O(its pages), a question about n pages O(n + the
uses found), and, while bytes are fenced, one pass of a few NumPy calls over the fenced ranges of the arena; none of them a
Python loop over pages. Python runs over what is found: signals, and the forwards that read what a fence takes. The ledger
decides nothing and waits for nothing: `clearance` and `choose_holes` read it, callers queue the waits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray, UnitGrid
from kvtide.ledger.clearance_table import Hazard
from kvtide.ledger.cloning import clone_of
from kvtide.ledger.errors import InvariantError
from kvtide.ledger.fenced_bytes import Fence, FencedBytes, byte_ranges
from kvtide.ledger.forward_steps import ForwardSteps, RecordedForward
from kvtide.ledger.forward_writes import ForwardWrites
from kvtide.ledger.page_answers import Hazards, Writers
from kvtide.ledger.page_claims import BoolArray, PageClaims
from kvtide.ledger.page_lists import PageLists, some
from kvtide.ledger.signal_uses import SignalUses
from kvtide.ledger.signals import Access, HostCopy, NetworkTransfer, Signal
from kvtide.ledger.usage_books import Namer, UsageBooks, claim_books, sorted_pages
from kvtide.ledger.vacated_pages import VacatedPages

_NO_PAGES: IntArray = np.empty(0, np.int64)
_NO_KINDS: npt.NDArray[np.int8] = np.empty(0, np.int8)
_NO_FORWARD = -1


class PageUsage(PageClaims):
    """The ledger of one band. Nothing in it waits, neither the host nor a stream."""

    def __init__(
        self,
        steps: ForwardSteps,
        page_count: int,
        *,
        name: str = "pages",
        grid: UnitGrid | None = None,
        fences: FencedBytes | None = None,
    ) -> None:
        """No use of pages `[0, page_count)`; forwards retire as `steps` says.

        Bands that share an arena share its `fences` and each give their `grid`; a single band needs neither. Memory is
        zeroed, so pages that no use names cost nothing.
        """
        self.name = name
        """For reports."""
        self.steps = steps
        """The forwards whose retirement it follows."""
        self.fences = FencedBytes(steps) if fences is None else fences
        """Bytes outside every span of the arena that somebody still reads."""
        self.grid = UnitGrid(0, 16) if grid is None else grid
        """Where its pages lie."""
        self.page_count = page_count
        """Pages it can speak of."""
        self.epoch = 0
        """Rises with every change that bears on capacity: uses, claims and holds, begun or ended."""
        self._band = self.fences.enter()
        self._lists = PageLists(name, page_count)
        self._uses = SignalUses(name, page_count)
        self._writes = ForwardWrites(steps, self._lists, page_count)
        self._vacated = VacatedPages(page_count)
        self._begin_claims(page_count)
        self._transfer_ended = False

    def clone(self, steps: ForwardSteps, fences: FencedBytes) -> PageUsage:
        """A ledger of the same uses that goes its own way, over clones of its `steps` and `fences` (row C13). Nobody waits.

        Signals, events and owners are the same objects: what ends a use here ends it there, each for itself.
        """
        return clone_of(
            self,
            steps=steps,
            fences=fences,
            _uses=self._uses.clone(),
            _writes=clone_of(self._writes, _steps=steps),
            _vacated=clone_of(self._vacated),
            _fixed=clone_of(self._fixed),
            _reserved=clone_of(self._reserved),
            _held=clone_of(self._held),
        )

    def books(self, name: Namer) -> UsageBooks:
        """What its answers follow from, as a value (`usage_books`); its fences stand for themselves. Nobody waits."""
        places, retired = self.steps.places(), self.steps.retired_through
        if not (places or self._uses or self._vacated or self._fixed or self._held):
            return ()
        return (
            tuple((places[forward], sorted_pages(pages)) for forward, pages in self._writes.unretired()),
            tuple(
                (int(one.hazard), name(one), sorted_pages(pages))
                for one, pages in self._uses.pages_by_signal()
            )
            if self._uses
            else (),
            sorted_pages(self._vacated.pages()) if self._vacated else (),
            tuple((page, places[forward]) for page, forward in self._vacated.readers(retired)),
            places[self.newest_reader] if self._is_read else -1,
            claim_books(self._fixed.owned.items(), name),
            claim_books(self._reserved.owned.items(), name),
            claim_books(self._held.owned.items(), name),
        )

    # ── forward writes ──

    def record_forward_writes(self, forward: RecordedForward, pages: IntArray | None) -> None:
        """Note what a recorded forward writes here, None for "unknown" (row L7), until it retires. Nobody waits.

        By reference: on the per-step path it costs the same for any number of pages. The first question of a move raises
        `InvariantError` if it names a page outside the band, a padded row's −1 among them.
        """
        self._writes.record(forward, pages)

    def writers(self, sources: IntArray) -> Writers:
        """What a move of `sources` waits for, each kind where its field says. Asking waits for nothing."""
        self._lists.check(sources, "a move")
        _, _, signals = self._uses.hazards_on(sources)
        writing = [signal for signal in signals if signal.access is Access.WRITE]
        return Writers(
            self._writes.newest_writer(sources),
            tuple(signal for signal in writing if isinstance(signal, HostCopy)),
            tuple(signal for signal in writing if isinstance(signal, NetworkTransfer)),
        )

    def stopping(self, sources: IntArray) -> BoolArray:
        """Which of `sources` a move made for gain leaves alone; asking waits for nothing, and such a move never does.

        Those that an unretired forward may write (all of them while one's writes are unknown), that a receive or a load writes, that
        are fixed, or that are held. A load's stream stands behind a forward, so whoever waits for it waits for that.
        """
        self._lists.check(sources, "a move")
        stop = self._writes.written(sources) | self._fixed.claimed(sources) | self._held.claimed(sources)
        for signal, places in self._uses.by_signal(sources):
            if signal.access is Access.WRITE:
                stop[places] = True
        return stop

    # ── copies and transfers ──

    def record(self, signal: Signal, pages: IntArray) -> None:
        """Open a use of `pages` by a copy or transfer that is submitted; nobody waits now, the next writer will.

        One record a signal and band: raises `InvariantError` for a second, and for a page named twice or outside the band.
        """
        self._lists.check(pages, signal.name)
        self._uses.record(signal, pages)
        self.epoch += 1

    def end(self, signal: Signal) -> IntArray:
        """Close the use of a copy that is acknowledged or a transfer that is released; its pages that the band still has.

        Call it in the agreed round, or for a transfer when a move's host wait has returned; this call does not wait. What the
        band fenced of it is over too. Pages that a move vacated come back by `take_ready_vacated`. Raises `InvariantError` for a
        signal without a use here.
        """
        pages = self._uses.end(signal)
        self.fences.end(self._band, signal)
        self._transfer_ended |= isinstance(signal, NetworkTransfer)
        self.epoch += 1
        return pages

    def quarantine(self, transfer: NetworkTransfer) -> IntArray:
        """Turn the use of a failed transfer into a promise that nobody writes its bytes; its pages that the band still has.

        Nobody waits for it any more, neither host nor stream: its pages are fixed and its fences bind whoever grows over them,
        until `unfix(transfer)`, once it is proved that its engine touches nothing (row T6). Each band that has a record of it
        is told, in the round in which ranks agree. Raises `InvariantError` for a transfer without a use here.
        """
        pages = self._uses.end(transfer)
        self._transfer_ended = True
        self._fixed.add(transfer, pages)
        self.epoch += 1
        self.fences.quarantine(self._band, transfer)
        return pages

    def __contains__(self, signal: Signal) -> bool:
        """Whether a copy or transfer has a use here that is not over. Nobody waits."""
        return signal in self._uses

    def signals(self) -> tuple[Signal, ...]:
        """Copies and transfers whose uses are not over, in the order in which they were recorded. Nobody waits."""
        return self._uses.signals()

    def transfer_pages(self) -> IntArray:
        """Every page of the band that a transfer reads or writes, ascending: what a plan lays out around, so that no host waits.

        What has left the band is no page of it: `fences.extents(Hazard.NETWORK)`.
        """
        return self._uses.transfer_pages()

    # ── moves ──

    def vacate(self, sources: IntArray, targets: IntArray | None = None) -> IntArray:
        """Note that a move has copied `sources` away; those that are holes at once. The host does not wait.

        Call it once the move's copy is queued behind `writers(sources)`. A source that an unretired forward or a send may still
        read stays behind as vacated. One that only a backup reads is a hole already: its record here makes the next writer's
        stream wait. `targets` says where each went, for holds follow a move; it may be left out where no source is held. Raises
        `InvariantError`, with nothing changed, for a source that is fixed or still written, or whose hold knows no target.
        """
        self.steps.check_pages_may_change("a move")
        self._lists.check_once(sources, "a move")
        self._check_moved(sources)
        if targets is not None:
            self._lists.check_once(targets, "the targets of a move")
        self._held.move(sources, targets)
        self.epoch += 1
        newest = self.steps.newest_unretired
        if newest is not None:
            self._vacated.add(sources, newest.forward)
            return _NO_PAGES
        sent = self._uses.under_transfer(sources)
        self._vacated.add(sources[sent], _NO_FORWARD)
        return sources[~sent]

    def take_ready_vacated(self) -> IntArray:
        """Vacated pages whose forwards have retired and whose sends are over: holes from now on. Nobody waits.

        A backup may still read some; their records stay, and the next writer's stream waits for it.
        """
        if not len(self._vacated):
            return _NO_PAGES
        retired = self._vacated.take_retired(self.steps.retired_through, behind_sends=self._transfer_ended)
        self._transfer_ended = False
        sent = self._uses.under_transfer(retired)
        self._vacated.add(retired[sent], _NO_FORWARD)
        return retired[~sent]

    @property
    def newest_reader(self) -> int:
        """The newest forward that was ever said to read a vacated page; −1 for none. Nobody waits."""
        return self._vacated.newest_reader

    @property
    def vacated_count(self) -> int:
        """Vacated pages. Nobody waits."""
        return len(self._vacated)

    def is_vacated(self, pages: IntArray) -> BoolArray:
        """Which of `pages` are vacated. Nobody waits."""
        return self._vacated.contains(pages)

    def vacated_pages(self) -> IntArray:
        """Every vacated page: in the span, free in questions of capacity, not to be written yet. Nobody waits."""
        return self._vacated.pages()

    def fence(self, pages: IntArray) -> None:
        """The frontier has retreated past free or vacated `pages`: whoever reads them is kept by byte range. Nobody waits now.

        From here on the bytes may belong to any band; its next writer meets the hazard, and waits as `CLEARANCE` says. Raises
        `InvariantError`, with nothing changed, for a fixed page, which may not leave, and for one outside the band or named twice.
        """
        self._lists.check_once(pages, "a retreat")
        self.epoch += 1
        if self._fixed and self._fixed.claimed(pages).any():
            raise self._fixed_page(pages, "leave the band")
        for forward, group in self._vacated.pass_on_readers(pages, self.steps.retired_through):
            self.fences.add(Fence(Hazard.FORWARD, None, forward, self._band, *byte_ranges(self.grid, group)))
        self._vacated.remove(pages[self._vacated.contains(pages)])
        for signal, places in self._uses.leave(pages):
            ranges = byte_ranges(self.grid, pages[places])
            self.fences.add(Fence(signal.hazard, signal, _NO_FORWARD, self._band, *ranges))

    # ── what clearance and plans read ──

    def withheld(self, pages: IntArray) -> BoolArray:
        """Which of `pages`, free or about to be, are fixed or under a transfer: no hole while that lasts. Nobody waits."""
        return self._fixed.claimed(pages) | self._uses.under_transfer(pages)

    @property
    def binds_layout(self) -> bool:
        """Whether fixed pages, transfers or holds bear on where the band may stand. Nobody waits."""
        return bool(self._uses.transfer_count or self._fixed.owned or self._held.owned)

    def check_pages(self, pages: IntArray) -> None:
        """Raise `InvariantError` for a page outside the band: a question about it has no answer. Nobody waits."""
        self._lists.check(pages, "a question")

    @property
    def is_clear(self) -> bool:
        """Whether no page can carry a hazard at all: the usual case, and the quick one. Nobody waits."""
        # On every per-step path, so it asks for no length and calls nothing where there is nothing.
        return not (
            self._uses.use_of
            or self._vacated.newest_reader > self.steps.retired_through
            or self._fixed.owned
            or (self.fences.open_fences and self.fences)
        )

    @property
    def steers_choice(self) -> bool:
        """Whether any page can carry what a choice of holes looks at: all but host copies. Nobody waits."""
        busy = self._uses.transfer_count or self._is_read or self._fixed
        return bool(busy) or self.fences.steers_choice

    def hazards_on(self, pages: IntArray) -> Hazards:
        """Every hazard of `pages`; who waits for each is in `CLEARANCE`, asking waits for nothing.

        Raises `InvariantError` for a page outside the band.
        """
        self.check_pages(pages)
        places, kinds, signals = self._uses.hazards_on(pages) if self._uses else (_NO_PAGES, _NO_KINDS, [])
        found = [(places, kinds)]
        newest = _NO_FORWARD
        if self._is_read:
            places, newest = self._vacated.unretired(pages, self.steps.retired_through)
            found.append((places, np.full(len(places), Hazard.FORWARD, np.int8)))
        if self._fixed:
            places = np.flatnonzero(self._fixed.claimed(pages))
            found.append((places, np.full(len(places), Hazard.FIXED, np.int8)))
        if self.fences:
            met = self.fences.meet(self.grid, pages)
            newest = max(newest, met.newest_forward)
            found.append((met.places, met.kinds))
            signals = list(dict.fromkeys(signals + met.signals))
        if len(found) == 1:
            return Hazards(*found[0], signals, newest)
        all_places, all_kinds = zip(*found, strict=True)
        return Hazards(np.concatenate(all_places), np.concatenate(all_kinds), signals, newest)

    def open_uses(self) -> tuple[str, ...]:
        """One line for each use that is not over, for reports and leak checks; nobody waits."""
        band = f"band {self.name!r}"
        lines = [f"{signal.name!r} uses pages of {band}" for signal in self._uses.signals()]
        if self._vacated:
            lines.append(f"{len(self._vacated)} pages of {band} are vacated")
        lines += [f"{owner!r} fixes pages of {band}" for owner in self._fixed.owners()]
        lines += [f"{owner!r} holds pages of {band}" for owner in self._held.owners()]
        return tuple(lines)

    def check_idle(self) -> None:
        """Raise `InvariantError` if any use is not over; to be asked with nothing in flight anywhere. Nobody waits."""
        found = self.open_uses()
        if found:
            raise InvariantError(
                "usage.idle_has_no_use",
                "; ".join(found),
                "a copy, transfer, reservation or hold was never ended",
            )

    # ── helpers ──

    @property
    def _is_read(self) -> bool:
        """Whether an unretired forward may read what a move left behind."""
        return self._vacated.newest_reader > self.steps.retired_through

    def _check_moved(self, sources: IntArray) -> None:
        if self._fixed and self._fixed.claimed(sources).any():
            raise self._fixed_page(sources, "move")
        waited = self.writers(sources)
        if waited.forward is not None or waited.transfers:
            names = [transfer.name for transfer in waited.transfers]
            raise InvariantError(
                "usage.move_follows_writers",
                f"pages of band {self.name!r} have moved, forward {waited.forward and waited.forward.forward} or transfers "
                f"{names} may still write them",
                "the move did not wait for writers(sources), or the wait was not told to wait_queued or end",
            )
        vacated = self._vacated.contains(sources)
        if vacated.any():
            raise InvariantError(
                "usage.vacated_once",
                f"pages {some(sources[vacated])} of band {self.name!r} are vacated already",
                "a move was recorded twice, or moved a page that is not live",
            )
