"""How many requests 40 GB hold under vLLM 0.32's KV cache manager and its own planning of layers.

Each request prefills all but its last token in chunks of 8,192 and decodes that one; what left its windows is returned, as its
next step would do first.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from models import LENGTHS, MODELS, mixed_lengths
from vllm_books import CHUNK_TOKENS, Vllm
from workload import Figure, print_figures


def fill(vllm: Vllm, manager: Any, lengths: Sequence[int]) -> int:
    """How many of `lengths`, in order, are held before the first refusal."""
    requests = []
    for count, length in enumerate(lengths):
        request = vllm.new_request(count, length)
        done = 0
        while done < length - 1:
            chunk = min(CHUNK_TOKENS, length - 1 - done)
            if manager.allocate_slots(request, chunk, full_sequence_must_fit=done == 0) is None:
                return count
            done += chunk
            request.num_computed_tokens = done
        request.status = vllm.running
        if manager.allocate_slots(request, 1) is None:
            return count
        request.num_computed_tokens = length
        manager.remove_skipped_blocks(request.request_id, length)
        requests.append(request)
    raise AssertionError(f"{len(lengths)} requests do not fill the blocks")


def figures(vllm: Vllm) -> Iterator[Figure]:
    """Requests held, by model and length."""
    for model in MODELS:
        for block_tokens in (16, 64):
            for case in (*LENGTHS, "mix"):
                lengths = mixed_lengths() if isinstance(case, str) else [case] * 4000
                manager, _ = vllm.cache(model, block_tokens)
                yield Figure(f"{model.name}, {case}", block_tokens, fill(vllm, manager, lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path, help="folder of the unpacked wheel")
    print_figures(figures(Vllm(parser.parse_args().wheel)))


if __name__ == "__main__":
    main()
    os._exit(0)  # Its extensions complain at exit.
