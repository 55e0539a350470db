"""What `kvtide plan` prints is what `KVStorage` admits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtide.engine.commands.plan import command
from kvtide.plan import GPU_SCRATCH_BYTES, from_config, plan_kv_storage
from kvtide.storage import Refusal, build_kv_storage


@pytest.mark.requirement("S1", "S5")
@pytest.mark.parametrize("tokens", [1024, 8192])
def test_the_storage_admits_exactly_what_the_command_prints(tmp_path: Path, tokens: int) -> None:
    """The capacity printed at boot must be the one that the server has: same budget, same prices, same bytes beside it: those of a GPU."""
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "sliding_window": 128,
        "max_position_embeddings": 16384,
        "dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    arguments = [str(path), "--budget", "48MiB", "--max-running", "100", "--max-len", "16384", "--json"]
    printed = json.loads(CliRunner().invoke(command, arguments).stdout)
    contexts = {context["context_tokens"]: context for context in printed["contexts"]}
    storage = build_kv_storage(
        plan_kv_storage(from_config(config), page_tokens=16),
        budget_bytes=48 << 20,
        scratch_bytes=GPU_SCRATCH_BYTES,
        max_running_requests=100,
        max_context_tokens=16384,
        chunk_tokens=2048,
    )
    admitted = 0
    while not isinstance(storage.admit([tokens], [1]), Refusal):
        admitted += 1
    assert admitted == contexts[tokens]["requests_admitted"] > 0
