"""The planner runs where no torch is (P8)."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.requirement("P8")
def test_importing_the_planner_imports_neither_torch_nor_numpy() -> None:
    """A capacity question is asked on laptops and in control planes that have neither."""
    heavy = run(
        "import sys, kvtide.plan; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert heavy == "[]\n"


@pytest.mark.requirement("P8")
def test_planning_works_where_torch_cannot_be_imported() -> None:
    """A lazy import would pass the test above and fail the user."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvtide.plan import from_config, lay_out, plan_kv_storage\n"
        "config = dict(model_type='llama', num_hidden_layers=2, num_attention_heads=4, head_dim=8)\n"
        "print(lay_out(plan_kv_storage(from_config(config), page_tokens=16), 10**6).bands[0].unit_bytes)"
    )
    assert run(code) == f"{2 * 2 * 4 * 8 * 2 * 16}\n"
