"""Sizing runs where no torch is, at once (P8)."""

from __future__ import annotations

import subprocess
import sys

import pytest

SIZE_A_HYBRID = """
import sys, time
sys.modules["torch"] = None
from kvtide.plan import from_config, plan_kv_storage
from kvtide.sizing import request_demand, requests_that_fit, size_plan
config = dict(
    model_type="qwen3_next", num_hidden_layers=48, hidden_size=2048, num_attention_heads=16, num_key_value_heads=2
)
began = time.perf_counter()
plan = plan_kv_storage(from_config(config), page_tokens=16)
sized = size_plan(
    plan, budget_bytes=40 * 2**30, max_running_requests=256, max_context_tokens=65536, chunk_tokens=8192
)
demand = request_demand(plan, prompt_tokens=8192, output_tokens=1024, chunk_tokens=8192)
requests_that_fit(sized.layout, demand)
print(time.perf_counter() - began)
print(sorted({"numpy", "transformers"} & set(sys.modules)))
"""


@pytest.mark.requirement("P8")
def test_a_hybrid_is_planned_and_sized_without_torch_in_a_tenth_of_a_second() -> None:
    """Capacity questions are asked in loops over models and budgets. The best of three runs, since machines are shared."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", SIZE_A_HYBRID], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(3)
    ]
    assert {run.splitlines()[1] for run in runs} == {"[]"}
    assert min(float(run.splitlines()[0]) for run in runs) < 0.1
