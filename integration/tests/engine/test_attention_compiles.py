"""The attention programs compile for a GPU, without one: Triton's interpreter takes much that its compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its programs are compiled where it is")

PROGRAM = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kvtide.engine.attention import triton_programs as programs

STRIDES = [f"{name}_{part}" for name in ("key", "value") for part in ("page", "token", "head")]
STRIDES += ["query_row", "query_head", "query_token", "table_row"]

def compiled(program, types, constants):
    signature = {name: types.get(name, "constexpr") for name in program.arg_names}
    pointers = [name for name, kind in types.items() if kind.startswith("*") and name in program.arg_names]
    aligned = {(program.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=aligned)
    binary = compile(source, target=GPUTarget("cuda", 90, 32))
    assert binary.asm["cubin"]
    print(program.__name__, binary.metadata.shared, binary.asm["ptx"].count("cp.async.cg"))

beside = {name: "*fp32" for name in ("share_values", "share_maxima", "share_sums")}
for dtype, width, reach, shares in (
    ("*bf16", 128, {"WINDOW": 128, "CHUNK": 0}, 1),
    ("*bf16", 128, {"WINDOW": 0, "CHUNK": 0}, 8),
    ("*fp32", 16, {"WINDOW": 0, "CHUNK": 64}, 8),
):
    data = dict.fromkeys(("query", "keys", "values", "sinks", "output"), dtype)
    types = data | beside | {"page_table": "*i64", "tokens_before": "*i64", "scaling": "fp32"}
    types |= {"query_tokens": "i32", "kv_heads": "i32"} | dict.fromkeys(STRIDES, "i64")
    sizes = {"GROUP": 8, "PAGE_TOKENS": 24, "KEY_DIM": width - 8, "VALUE_DIM": 16, "KEY_WIDTH": width, "VALUE_WIDTH": 16}
    blocks = {"QUERIES": 64 if shares == 1 else 16, "KEYS": 64, "SHARES": shares, "GRAIN": 8 if width == 128 else 1}
    compiled(programs.attend_pages, types, reach | sizes | blocks | {"HAS_SINKS": shares == 1})
    if shares > 1:
        joins = {name: kind for name, kind in types.items() if name in programs.join_shares.arg_names} | {"heads": "i32"}
        constants = {"HAS_SINKS": dtype == "*bf16", "VALUE_DIM": 16, "VALUE_WIDTH": 16, "SHARES": shares}
        compiled(programs.join_shares, joins, constants)
"""


@pytest.mark.requirement("A6")
def test_the_programs_compile_for_a_gpu() -> None:
    """Models' types, every reach, one share and several; shared memory within what every GPU of today has.

    Aligned entries are loaded 16 bytes at once, and ahead of their use; those of a program that knows nothing of strides are not.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found = [line.split() for line in result.stdout.splitlines()]
    assert [name for name, *_ in found] == ["attend_pages", *["attend_pages", "join_shares"] * 2]
    assert max(int(shared) for _, shared, _ in found) <= 99 << 10, found
    ahead = [int(copies) > 0 for name, _, copies in found if name == "attend_pages"]
    assert ahead == [True, True, False]
