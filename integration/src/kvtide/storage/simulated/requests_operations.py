"""Operations on requests that share prefixes: they begin with a hit, compute, hand over, and end, at any moment."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvtide.simulation import Numbers, World, draw_bits, one_of, phrases, some_of
from kvtide.storage.simulated.crowding import fix_checkpoints, give_slots_back, take_slots
from kvtide.storage.simulated.joining import can_share, sharers_of
from kvtide.storage.simulated.prompts import TOLD_BITS, SharingRequest, text_of
from kvtide.storage.simulated.sharers import Sharers

MOST_SHARERS = 5
"""Rows are left for others."""

_KEYS = (None, "salt")

_ALL_TOLD = (1 << TOLD_BITS) - 1

_FOUND = ("nothing", "a hit")
_AMOUNTS = ("none", "one", "several")
_NOTHING_TO_DO, _REFUSED, _RETRACTED = ", then nothing to do", ", then refused", ", others retracted"


class Begin:
    """A request arrives with its prompt: what the tree can restore of it is its own from the start, locked, its state copied."""

    name = "tree: begin"
    weight = 120
    outcomes = phrases("with ", _FOUND, ("", ", evicting"), ("", ", under a forward")) | {
        "pages of several sizes",
        "no row free",
        "no room for two tokens",
        "more than the arena holds",
        "refused",
    }

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """How long, where its text parts from others, whose it is, whether there must be room for all of its life, whether others
        give way, and which tokens its scheduler tells.
        """
        sharers = sharers_of(world)
        if sharers is None:
            if not can_share(world) or not world.free_rows:
                return None
        elif not world.free_rows or len(sharers.requests) >= MOST_SHARERS:
            return None
        return {
            "tokens": rng.choice((rng.randrange(1, 16), rng.randrange(1, 48))),
            "outputs": rng.choice((1, 2, rng.randrange(1, 20))),
            "text": rng.choice((0, 0, 0, 1 << rng.randrange(16), rng.getrandbits(16))),
            "key": rng.choice((0, 0, 0, 1)),
            "whole": rng.choice((0, 1)),
            "retracts": rng.choice((0, 0, 1)),
            "tells": rng.choice((_ALL_TOLD, _ALL_TOLD, 0, rng.getrandbits(TOLD_BITS))),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Match, lock, ask for room, copy the checkpoint, open the row."""
        if not can_share(world):
            return "pages of several sizes"
        sharers = sharers_of(world, joins=True)
        if sharers is None or not world.free_rows:
            return "no row free"
        sized = sharers.settings.sized
        longest = sized.max_context_tokens
        if longest < 2:
            return "no room for two tokens"
        prompt = 1 + (numbers["tokens"] - 1) % (longest - 1)
        length = min(prompt + numbers["outputs"], longest)
        while not sharers.fits_alone(prompt, length - prompt):
            if length == 2:
                return "more than the arena holds"
            length = max(2, length // 2)
            prompt = min(prompt, max(1, length * 3 // 4))
        text = text_of(numbers["text"], length, sized.plan.page_tokens)
        before = sharers.evicted()
        key, whole = one_of(_KEYS, numbers["key"]), bool(numbers["whole"])
        tells = numbers["tells"]
        while (request := sharers.admit(text, prompt, key, whole=whole, tells=tells)) is None:
            if not numbers["retracts"] or not _retracted(world, sharers, sharers.requests):
                return "refused"
        evicted = ", evicting" if sharers.evicted() > before else ""
        return f"with {_FOUND[request.length > 0]}{evicted}{', under a forward' if world.flying else ''}"


class Step:
    """Requests get room for a chunk, or a token, in the open batch; what the tree can spare is evicted for it."""

    name = "tree: step"
    weight = 260
    outcomes = phrases(("prepared", "refused"), ("", _RETRACTED)) | {
        "nobody",
        "no chunk of so few tokens",
        "prepared, evicting",
        "prepared, evicting under a forward",
    }

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whose, how much of a prompt at most, and whether others give way."""
        sharers = sharers_of(world)
        if sharers is None or not sharers.ready():
            return None
        return {
            "requests": draw_bits(rng, len(sharers.ready())),
            "tokens": rng.choice((64, 64, rng.randrange(1, 16))),
            "retracts": rng.choice((0, 1, 1)),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Take, and join the batch; where that is refused, perhaps retract the newest of the others, and try again."""
        sharers = sharers_of(world)
        chosen = [] if sharers is None else some_of(sharers.ready(), numbers["requests"])
        if sharers is None or not chosen:
            return "nobody"
        before = sharers.evicted()
        most, retracted = numbers["tokens"], ""
        chosen = [one for one in chosen if sharers.has_chunk(one, most)]
        if not chosen:
            return "no chunk of so few tokens"
        while not sharers.prepare(chosen, most):
            if not numbers["retracts"] or not _retracted(world, sharers, chosen):
                return f"refused{retracted}"
            retracted = _RETRACTED
        if retracted:
            return f"prepared{retracted}"
        if sharers.evicted() > before:
            return f"prepared, evicting{' under a forward' if world.flying else ''}"
        return "prepared"


class Launch:
    """The open batch runs, and nobody else; the states that come to the grid are copied behind it, where there is a slot for them."""

    name = "tree: launch"
    weight = 160
    outcomes = frozenset({"nothing to run", "another micro-batch has a request of it", "launched"})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whether the result is copied."""
        sharers = sharers_of(world)
        if sharers is None or not world.batch.entries or len(world.flying) >= world.scenario.overlap:
            return None
        return {"completion": rng.randrange(2)}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Launch, record, copy states."""
        sharers = sharers_of(world)
        if sharers is None or not world.batch.entries or len(world.flying) >= world.scenario.overlap:
            return "nothing to run"
        if world.scenario.micro_batches and any(
            world.forwards_over(entry.request) for entry in world.batch.entries
        ):
            return "another micro-batch has a request of it"
        world.launch(list(world.batch.entries), has_completion=bool(numbers["completion"]))
        return "launched"


class Process:
    """The oldest forward's result is looked at: windows retire, checkpoints and pages go over to the tree, slots are replaced."""

    name = "tree: process"
    weight = 60
    outcomes = frozenset({"nothing in flight", "handed over", "processed"})

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """No number."""
        return {} if sharers_of(world) is not None and world.flying else None

    def apply(self, world: World, numbers: Numbers) -> str:
        """Wait, process, advance."""
        sharers = sharers_of(world)
        if sharers is None or not world.flying:
            return "nothing in flight"
        before = sharers.units_of_tree()
        world.process()
        return "handed over" if sharers.units_of_tree() > before else "processed"


class Serve:
    """A loop serves some sharers for a few iterations, each forward processed at once or behind the next one's launch."""

    name = "tree: serve"
    weight = 60
    outcomes = phrases(_AMOUNTS, ("", _NOTHING_TO_DO, _REFUSED)) | {"nobody"}

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Whom, for how long, and whether before a launch others take every state slot, or give those up that they took, and fix behind it
        what is about to be handed over.
        """
        sharers = sharers_of(world)
        if sharers is None or not sharers.ready():
            return None
        return {
            "requests": draw_bits(rng, len(sharers.requests)),
            "forwards": rng.randrange(1, 9),
            "tokens": rng.choice((64, 64, rng.randrange(1, 16))),
            "crowds": rng.choice((0, draw_bits(rng, 8))),
            "relents": rng.choice((0, draw_bits(rng, 8))),
            "fixes": rng.choice((0, draw_bits(rng, 8))),
        }

    def apply(self, world: World, numbers: Numbers) -> str:
        """Give up the open batch; then take, launch, process in turn."""
        sharers = sharers_of(world)
        served = [] if sharers is None else some_of(sharers.requests, numbers["requests"])
        if sharers is None or not served:
            return "nobody"
        world.abandon()
        depth = min(world.scenario.overlap, 2 if sharers.settings.sized.policy.overlap else 1)
        count, stop = 0, ""
        for turn in range(numbers["forwards"]):
            while len(world.flying) >= depth:
                world.process()
            turns = [one for one in served if one in sharers.ready()]
            if world.scenario.micro_batches:
                turns = [one for one in turns if not world.forwards_over(one)]
            if not turns and world.flying:
                world.process()
                continue
            if not turns:
                stop = _NOTHING_TO_DO
                break
            while not sharers.prepare(turns, max(numbers["tokens"], sharers.settings.grid or 1)):
                if len(turns) == 1 and not _retracted(world, sharers, served):
                    return f"{_amount(count)}{_REFUSED}"
                # Fewer at a time, before anybody gives way.
                turns = turns[: max(1, len(turns) // 2)]
            if world.state is not None and numbers["crowds"] >> turn & 1:
                take_slots(world, sharers, turn)
            elif numbers["relents"] >> turn & 1:
                give_slots_back(world)
            world.launch(list(world.batch.entries))
            if numbers["fixes"] >> turn & 1:
                fix_checkpoints(world, sharers)
            count += 1
        return f"{_amount(count)}{stop}"


class End:
    """Requests end, at their last token or aborted before it, even under forwards that include them; their locks end."""

    name = "tree: end"
    weight = 60
    outcomes = phrases("aborted", ("", ", under a forward"), ("", ", in the open batch")) | {
        "nobody",
        "complete",
    }

    def generate(self, rng: random.Random, world: World) -> Numbers | None:
        """Who; mostly somebody who has come to the end."""
        sharers = sharers_of(world)
        if sharers is None or not sharers.requests:
            return None
        places = [place for place, one in enumerate(sharers.requests) if sharers.is_complete(one)]
        if places:
            return {"requests": 1 << rng.choice(places)}
        if rng.random() < 0.8:
            return None
        return {"requests": draw_bits(rng, len(sharers.requests))}

    def apply(self, world: World, numbers: Numbers) -> str:
        """Hand over what a hit could end in, unlock, free the rest, and the row."""
        sharers = sharers_of(world)
        over = [] if sharers is None else some_of(sharers.requests, numbers["requests"])
        if sharers is None or not over:
            return "nobody"
        what = "complete" if all(sharers.is_complete(one) for one in over) else "aborted"
        under = ", under a forward" if any(world.forwards_over(one) for one in over) else ""
        prepared = ", in the open batch" if any(one in world.batch for one in over) else ""
        sharers.release(over)
        return f"{what}{under}{prepared}"


def _retracted(world: World, sharers: Sharers, kept: Sequence[SharingRequest]) -> bool:
    """Whether somebody gave way: the newest request that shares nothing, else the newest sharer but those to be kept."""
    bystanders = [one for one in world.requests if one not in world.batch]
    others = [one for one in sharers.requests if one not in kept]
    if bystanders:
        world.close(bystanders[-1:])
    elif others:
        sharers.release(others[-1:])
    return bool(bystanders or others)


def _amount(count: int) -> str:
    return _AMOUNTS[min(count, len(_AMOUNTS) - 1)]
