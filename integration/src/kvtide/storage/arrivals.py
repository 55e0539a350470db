"""What `KVStorage.admit` is handed, looked at before anything is locked or taken: lengths, prompts, extra keys (rows K5, K8)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy.typing as npt

from kvtide.device import IntArray
from kvtide.storage.errors import StorageError
from kvtide.storage.whole_numbers import whole_numbers


def checked_lengths(prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike) -> tuple[IntArray, IntArray]:
    """Both as arrays; raises `StorageError` for different counts, and for lengths that are no positive integers."""
    lengths = whole_numbers("prompt_tokens", prompt_tokens)
    outputs = whole_numbers("output_tokens", output_tokens)
    if lengths.shape != outputs.shape:
        raise StorageError(f"cannot admit {len(lengths)} prompts with {len(outputs)} outputs")
    for name, counts in (("prompt_tokens", lengths), ("output_tokens", outputs)):
        if (counts <= 0).any():
            found = counts[counts <= 0].tolist()
            raise StorageError(f"cannot admit a request: {name} must be a positive integer, found {found}")
    return lengths, outputs


def checked_prompts(
    lengths: IntArray,
    prompts: Sequence[npt.ArrayLike] | None,
    extra_keys: Sequence[Hashable] | None,
) -> list[IntArray] | None:
    """The prompts as arrays, `None` where they are not given; raises `StorageError` for what does not go together."""
    if prompts is None:
        if extra_keys is not None:
            raise StorageError("cannot admit by extra keys without the prompts' tokens")
        return None
    tokens = [whole_numbers("prompts", prompt) for prompt in prompts]
    if [len(prompt) for prompt in tokens] != lengths.tolist():
        raise StorageError(
            f"cannot admit prompts of {[len(prompt) for prompt in tokens]} tokens as {lengths.tolist()}"
        )
    if extra_keys is None:
        return tokens
    if len(extra_keys) != len(tokens):
        raise StorageError(f"cannot admit {len(tokens)} prompts by {len(extra_keys)} extra keys")
    for key in extra_keys:
        try:
            hash(key)
        except TypeError as error:
            raise StorageError(f"cannot admit a prompt by extra key {key!r}: {error}") from error
    return tokens
