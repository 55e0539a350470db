"""How many requests 40 GB hold under SGLang 0.5.23's allocators: unified pools, or static ones in their default split.

Its own unified allocator runs over an arena whose every byte size is divided by 32; its static ones have the sizes that its server would
compute. Prompts come in chunks of 8,192 tokens; what fell out of windows is freed up to 128 tokens late, as between two of its
evictions. Its server would further cap the running requests of a model with state at a third of the state slots; that cap is left off.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from models import BUDGET_BYTES, LENGTHS, MODELS, Model, mixed_lengths
from sglang_books import EVICTION_TOKENS, Sglang
from workload import Figure, print_figures

SCALE = 32
CHUNK_TOKENS = 8192
WINDOW_SHARE, STATE_SHARE = 0.8, 0.9
"""Its defaults: window tokens to those of full attention, state bytes to all others."""


def unified_pools(sglang: Sglang, model: Model, page_tokens: int) -> tuple[Any, Any]:
    """Its allocator over the scaled arena, and that of state slots."""
    torch = sglang.torch
    width = model.entry_bytes // SCALE // 4
    common = {
        "device": "cpu", "kv_cache_dtype": torch.float16, "head_num": 1, "head_dim": width, "v_head_dim": width,
        "page_size": page_tokens, "start_layer": 0, "enable_memory_saver": False, "need_sort": False,
        "lazy_compaction": True,
    }  # fmt: skip
    total_bytes = BUDGET_BYTES // SCALE // 4096 * 4096
    full, window, state = model.full_layers, model.window_layers, model.state_layers
    if window:
        made = sglang.unified.init_unified_swa_pools(
            **common, swa_head_num=1, swa_head_dim=width, swa_v_head_dim=width, end_layer=full + window,
            swa_attention_layer_ids=list(range(full, full + window)), full_attention_layer_ids=list(range(full)),
            total_bytes=total_bytes,
        )  # fmt: skip
        return made.token_to_kv_pool_allocator, None
    channels, columns = model.conv_shape
    recurrent_bytes = model.state_layer_bytes - 2 * channels * columns
    parameters = SimpleNamespace(
        shape=SimpleNamespace(
            conv=[(channels // SCALE, columns)], temporal=(1, 128, recurrent_bytes // SCALE // 512)
        ),
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
        layers=list(range(state)),
    )
    made = sglang.unified.init_unified_mamba_pools(
        **common, end_layer=full + state, is_draft_worker=False, use_mla_backend=False,
        mamba_layer_ids=list(range(state)), full_attention_layer_ids=list(range(state, state + full)),
        mamba2_cache_params=parameters, model_context_len=1024, extra_max_context_len=4, max_total_num_tokens=1,
        max_mamba_cache_size=1, max_num_reqs=4, enable_mamba_extra_buffer=False, enable_mamba_extra_buffer_lazy=False,
        speculative_num_draft_tokens=None, disable_overlap_schedule=True,
        unified_total_bytes=(total_bytes - model.state_bytes // SCALE) // 4096 * 4096,
    )  # fmt: skip
    return made.token_to_kv_pool_allocator, made.req_to_token_pool.mamba_allocator


def static_pools(sglang: Sglang, model: Model, page_tokens: int) -> tuple[Any, Any]:
    """Its allocators at the sizes of its default split."""
    half = sglang.torch.float16
    if model.window_layers:
        tokens = BUDGET_BYTES / (model.full_token_bytes + WINDOW_SHARE * model.window_token_bytes)
        full = int(tokens) // page_tokens * page_tokens
        window = int(full * WINDOW_SHARE) // page_tokens * page_tokens
        return sglang.static_window_pools(full, window, page_tokens), None
    slots = int(BUDGET_BYTES * STATE_SHARE / (1 + STATE_SHARE) / model.state_bytes - 1)
    tokens = int((BUDGET_BYTES - (slots + 1) * model.state_bytes) // model.full_token_bytes)
    tokens = tokens // page_tokens * page_tokens
    state_slots = sglang.state_slots(slots, "cpu")
    if page_tokens == 1:
        return sglang.static_tokens(tokens, half, "cpu", None, False), state_slots
    return sglang.static_pages(tokens, page_tokens, half, "cpu", None, False), state_slots


class Filler:
    """Requests in one allocator, until one is refused."""

    def __init__(self, sglang: Sglang, pools: tuple[Any, Any], model: Model, page_tokens: int) -> None:
        self.torch = sglang.torch
        self.allocator, self.slots = pools
        self.model, self.page_tokens = model, page_tokens

    def fill(self, lengths: Sequence[int]) -> int:
        """How many of `lengths`, in order, are held before the first refusal."""
        for count, length in enumerate(lengths):
            # Evictions of running requests are spread over their interval.
            if not self._admit(length, late_tokens=count * 37 % EVICTION_TOKENS):
                return count
        raise AssertionError(f"{len(lengths)} requests do not fill the pools")

    def _admit(self, length: int, late_tokens: int) -> bool:
        if self.slots is not None and self.slots.alloc(1) is None:
            return False
        ids, done, evicted = [], 0, 0
        while done < length:
            count = min(CHUNK_TOKENS, length - done)
            taken = self._take(-(-count // self.page_tokens) * self.page_tokens)
            if taken is None:
                return False
            ids.append(taken)
            done += count
            if self.model.window_layers:
                end = done - self.model.window_tokens - (late_tokens if done == length else 0)
                end = max(0, end) // self.page_tokens * self.page_tokens
                if end > evicted:
                    self.allocator.free_swa_segment(self.torch.cat(ids)[evicted:end], start_pos=evicted)
                    evicted = end
        return True

    def _take(self, tokens: int) -> Any:
        if hasattr(self.allocator, "alloc") and (self.page_tokens == 1 or not self.model.window_layers):
            return self.allocator.alloc(tokens)
        torch = self.torch
        none, count = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
        last = torch.full((1,), -1, dtype=torch.int64)
        return self.allocator.alloc_extend(none, none, count, count, last, tokens)


def figures(sglang: Sglang, *, unified: bool) -> Iterator[Figure]:
    """Requests held, by model and length."""
    for model in MODELS:
        for page_tokens in (1, 64):
            for case in (*LENGTHS, "mix"):
                lengths = mixed_lengths() if isinstance(case, str) else [case] * 4000
                make = unified_pools if unified else static_pools
                pools = make(sglang, model, page_tokens)
                count = Filler(sglang, pools, model, page_tokens).fill(lengths)
                yield Figure(f"{model.name}, {case}", page_tokens, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path, help="folder of the unpacked wheel")
    parser.add_argument("pools", choices=("unified", "static"))
    arguments = parser.parse_args()
    print_figures(figures(Sglang(arguments.wheel), unified=arguments.pools == "unified"))


if __name__ == "__main__":
    main()
    os._exit(0)  # Its extensions complain at exit.
