"""Sizing runs where no torch is (P8)."""

from __future__ import annotations

import subprocess
import sys

import pytest

SIZE_A_HYBRID = """
import sys
sys.modules["torch"] = None
from kvtide.plan import from_config, plan_kv_storage
from kvtide.sizing import request_demand, requests_that_fit, size_plan
config = dict(
    model_type="qwen3_next", num_hidden_layers=48, hidden_size=2048, num_attention_heads=16, num_key_value_heads=2
)
plan = plan_kv_storage(from_config(config), page_tokens=16)
sized = size_plan(
    plan, budget_bytes=40 * 2**30, max_running_requests=256, max_context_tokens=65536, chunk_tokens=8192
)
demand = request_demand(plan, prompt_tokens=8192, output_tokens=1024, chunk_tokens=8192)
print(requests_that_fit(sized.layout, demand) > 0)
print(sorted({"numpy", "transformers"} & set(sys.modules)))
"""


@pytest.mark.requirement("P8")
def test_a_hybrid_is_planned_and_sized_where_torch_cannot_be_imported() -> None:
    """A capacity question is asked on laptops and in control planes, which have neither torch nor NumPy."""
    printed = subprocess.run(
        [sys.executable, "-c", SIZE_A_HYBRID], check=True, capture_output=True, text=True
    ).stdout
    assert printed == "True\n[]\n"
