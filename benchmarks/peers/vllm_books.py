"""vLLM 0.32's KV cache manager as books of the common workload.

One `allocate_slots` a running request a step, as its scheduler calls it: blocks that left a window are freed inside. Prefix caching
is off, nobody speculates. Block 16 and 64 are the tokens of a block where its layers have attention alone; with state, its planner makes blocks
as long as a layer's state is large. It hands out ids only: nothing is zeroed here, and nothing ever moves.
"""

import argparse
import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from models import BUDGET_BYTES, MODELS, Model
from stand_ins import use_peer
from workload import PAGE_SIZES, IntArray, Shape, measure, print_figures

MAX_TOKENS = 131_072
CHUNK_TOKENS = 8192
OF_SHAPE: Mapping[Shape, Model] = {Shape.WINDOW: MODELS[0], Shape.STATE: MODELS[2]}
"""It plans by whole models: that of full and window layers, and that of full and state layers."""


class Vllm:
    """What is used of the peer, once imported."""

    def __init__(self, wheel: Path) -> None:
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        use_peer("vllm", wheel)
        self.torch = importlib.import_module("torch")
        self.parameters = importlib.import_module("vllm.sampling_params").SamplingParams
        self.planning = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self.manager = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
        self.specs = importlib.import_module("vllm.v1.kv_cache_interface")
        self.layouts = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout
        requests = importlib.import_module("vllm.v1.request")
        self.request, self.running = requests.Request, requests.RequestStatus.RUNNING
        kinds = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
        kinds.register_all_kvcache_specs(SimpleNamespace())

    def cache(self, model: Model, block_tokens: int) -> tuple[Any, Any]:
        """A manager of 40 GB of `model`, and the plan it was made by."""
        specs, block_tokens = self._layer_specs(model, block_tokens)
        config = self._config(block_tokens)
        groups = self.planning.get_kv_cache_groups(config, specs)
        plan = self.planning.get_kv_cache_config_from_groups(config, groups, BUDGET_BYTES)
        scheduler_block, hash_block = self.planning.resolve_kv_cache_block_sizes(plan, config)
        manager = self.manager(
            self.planning.generate_scheduler_kv_cache_config([plan]),
            max_model_len=MAX_TOKENS,
            scheduler_block_size=scheduler_block,
            hash_block_size=hash_block,
            max_in_flight_tokens=config.max_in_flight_tokens,
            enable_caching=False,
        )
        return manager, plan

    def new_request(self, name: object, tokens: int) -> Any:
        """A request whose prompt has `tokens` tokens."""
        return self.request(
            request_id=str(name),
            prompt_token_ids=[0] * tokens,
            sampling_params=self.parameters(max_tokens=1),
            pooling_params=None,
        )

    def _config(self, block_tokens: int) -> Any:
        cache = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: self.layouts["LBNHC"], num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None, block_size=block_tokens, mamba_cache_mode="none",
            enable_prefix_caching=False, prefix_match_unit=None,
        )  # fmt: skip
        return SimpleNamespace(
            cache_config=cache,
            scheduler_config=SimpleNamespace(
                disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=CHUNK_TOKENS
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            speculative_config=None,
            kv_transfer_config=None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
            model_config=SimpleNamespace(max_model_len=MAX_TOKENS),
            max_in_flight_tokens=2 * CHUNK_TOKENS,
        )

    def _layer_specs(self, model: Model, block_tokens: int) -> tuple[dict[str, Any], int]:
        """What its model runner would report: layers in their order, and blocks of attention that cover a layer's state."""
        half = self.torch.bfloat16
        attention = {"num_kv_heads": model.kv_heads, "head_size": model.head_dim, "dtype": half}
        padded = None
        if model.state_layers:
            multiple = -(-model.state_layer_bytes // (block_tokens * model.entry_bytes))
            block_tokens *= max(1, multiple)
            padded = block_tokens * model.entry_bytes
        others = model.window_layers or model.state_layers
        kinds = (["other"] * (others // model.full_layers) + ["full"]) * model.full_layers
        kinds += ["other"] * (others + model.full_layers - len(kinds))
        specs: dict[str, Any] = {}
        for layer, kind in enumerate(kinds):
            if kind == "full":
                spec = self.specs.FullAttentionSpec(block_size=block_tokens, **attention)
            elif model.window_layers:
                spec = self.specs.SlidingWindowSpec(
                    block_size=block_tokens, sliding_window=model.window_tokens, **attention
                )
            else:
                spec = self.specs.MambaSpec(
                    block_size=MAX_TOKENS,
                    shapes=(model.conv_shape, model.recurrent_shape),
                    dtypes=(half, self.torch.float32),
                    page_size_padded=padded,
                )
            specs[f"layer {layer}"] = spec
        return specs, block_tokens


class VllmBooks:
    """See `workload.Books`."""

    zeroed_bytes = moved_bytes = 0
    token_bytes = 1

    def __init__(self, vllm: Vllm, model: Model, block_tokens: int) -> None:
        self.vllm = vllm
        self.manager, _ = vllm.cache(model, block_tokens)
        self.requests: dict[int, Any] = {}
        self.next_row = 0
        self.spent_ns = 0

    def admit(self, prompt_tokens: int) -> int:
        """See `Books`."""
        row, manager, done = self.next_row, self.manager, 0
        self.next_row += 1
        request = self.vllm.new_request(row, prompt_tokens)
        before = time.thread_time_ns()
        while done < prompt_tokens:
            count = min(CHUNK_TOKENS, prompt_tokens - done)
            blocks = manager.allocate_slots(
                request, count, full_sequence_must_fit=done == 0, has_scheduled_reqs=True
            )
            blocks.get_block_ids()  # What its scheduler sends to the worker.
            done += count
            request.num_computed_tokens = done
        self.spent_ns += time.thread_time_ns() - before
        request.status = self.vllm.running
        self.requests[row] = request
        return row

    def decode(self, rows: IntArray) -> None:
        """See `Books`."""
        requests = [self.requests[row] for row in rows.tolist()]
        manager = self.manager
        before = time.thread_time_ns()
        for request in requests:
            manager.allocate_slots(request, 1).get_block_ids(allow_none=True)
            request.num_computed_tokens += 1
        self.spent_ns += time.thread_time_ns() - before

    def finish(self, row: int) -> None:
        """See `Books`."""
        request = self.requests.pop(row)
        before = time.thread_time_ns()
        self.manager.free(request)
        self.spent_ns += time.thread_time_ns() - before

    def fragment(self) -> None:
        """See `Books`."""
        pool = self.manager.block_pool
        blocks = pool.get_new_blocks(int(pool.get_num_free_blocks() * 0.8))
        order = np.random.default_rng(5).permutation(len(blocks))
        pool.free_blocks([blocks[place] for place in order[: len(blocks) // 2]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path, help="folder of the unpacked wheel")
    arguments = parser.parse_args()
    vllm = Vllm(arguments.wheel)

    def books_of(shape: Shape, page_tokens: int) -> VllmBooks | None:
        model = OF_SHAPE.get(shape)
        # Whatever its blocks are, a state sets them; one row says as much as three.
        if model is None or (shape is Shape.STATE and page_tokens != 16):
            return None
        return VllmBooks(vllm, model, page_tokens)

    figures = measure(books_of, PAGE_SIZES, ("decode", "prefill", "churn"))
    print_figures(figure for figure in figures if not figure.operation.endswith("bytes"))


if __name__ == "__main__":
    main()
    os._exit(0)  # Its extensions complain at exit.
