"""What clients ask of a loop, and what a loop knows of each request until it is over.

waiting   Request                                     no row, nothing generated
running   RunningRequest                              a row
retracted RunningRequest, is_retracted                no row; its backup, or nothing but its tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from kvtide.engine.errors import EngineError
from kvtide.engine.origins import KeptOrigins
from kvtide.storage import RowBackup


@attrs.frozen(kw_only=True)
class Request:
    """What a client asks for."""

    request_id: str
    """Unique among the requests of one run."""

    prompt: tuple[int, ...]
    """Token ids; at least one."""

    output_tokens: int
    """Tokens to generate; fewer only where a stop sequence comes before."""

    arrival_step: int = 0
    """Step of the loop from which on it waits for admission."""

    stops: tuple[tuple[int, ...], ...] = ()
    """Token sequences behind any of which it ends; they stay in the output."""

    extra_key: str | None = None
    """An adapter, a salt: it shares prefixes with requests of the same one only."""

    cancelled_step: int | None = None
    """Step of the loop at which its client goes away, if it has not ended."""

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Whether it ends with these tokens generated."""
        return len(tokens) == self.output_tokens or any(
            tuple(tokens[-len(stop) :]) == stop for stop in self.stops
        )


@attrs.define(eq=False)
class RunningRequest:
    """A request that has been admitted, until it is over."""

    request: Request
    """What was asked for."""

    row: int
    """Its row, unless it is retracted."""

    written_tokens: int = 0
    """Tokens that its forwards have written, those in flight among them."""

    recomputed: tuple[int, ...] = ()
    """Generated before it was retracted without a backup: they come behind its prompt, as if they were a part of it."""

    tokens: list[int] = attrs.field(factory=list)
    """Generated, as far as the host knows."""

    chosen_tokens: int = 0
    """Generated, those of forwards in flight among them."""

    is_over: bool = False
    """Nobody waits for its tokens."""

    is_retracted: bool = False
    """It has no row."""

    backup: RowBackup | None = None
    """Its memory while it has none, where it is kept."""

    kept_origins: KeptOrigins | None = None
    """What the log of a run that shares prefixes says of that."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """What it prefills."""
        return self.request.prompt + self.recomputed

    @property
    def is_prefilling(self) -> bool:
        """Whether some of its prompt is in no forward yet."""
        return self.written_tokens < len(self.request.prompt) + len(self.recomputed)

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens are known."""
        return self.request.is_complete(self.tokens)


def checked(requests: Iterable[Request]) -> list[Request]:
    """`requests`, or an `EngineError` for what no loop can serve."""
    every_request = list(requests)
    seen: set[str] = set()
    for request in every_request:
        if request.request_id in seen:
            raise EngineError(f"two requests have the id {request.request_id!r}")
        seen.add(request.request_id)
        if not request.prompt or request.output_tokens < 1:
            raise EngineError(
                f"request {request.request_id!r} has {len(request.prompt)} prompt tokens and asks for "
                f"{request.output_tokens}: it needs at least one of each"
            )
        if () in request.stops:
            raise EngineError(
                f"request {request.request_id!r} has an empty stop sequence, which every output ends with"
            )
    return every_request
