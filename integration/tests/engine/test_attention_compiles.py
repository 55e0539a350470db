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
from kvtide.engine.attention.triton_attention import SHARED_BYTES, blocks_of, grain_of, width_of

STRIDES = [f"{name}_{part}" for name in ("key", "value") for part in ("page", "token", "head")]
STRIDES += ["query_row", "query_head", "query_token", "table_row"]

def compiled(program, types, constants):
    signature = {name: types.get(name, "constexpr") for name in program.arg_names}
    pointers = [name for name, kind in types.items() if kind.startswith("*") and name in program.arg_names]
    aligned = {(program.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=aligned)
    binary = compile(source, target=GPUTarget("cuda", 90, 32))
    assert binary.asm["cubin"]
    assert binary.metadata.shared <= SHARED_BYTES, (signature, constants, binary.metadata.shared)
    print(program.__name__, binary.asm["ptx"].count("cp.async.cg"))

beside = {name: "*fp32" for name in ("share_values", "share_maxima", "share_sums")}
for dtype, dim, queries, reach, shares in (
    ("*bf16", 120, 999, {"WINDOW": 128, "CHUNK": 0}, 1),
    ("*bf16", 128, 8, {"WINDOW": 0, "CHUNK": 0}, 8),
    ("*bf16", 256, 8, {"WINDOW": 0, "CHUNK": 0}, 8),
    ("*bf16", 256, 999, {"WINDOW": 512, "CHUNK": 0}, 1),
    ("*fp32", 128, 8, {"WINDOW": 0, "CHUNK": 64}, 1),
    ("*fp32", 13, 8, {"WINDOW": 0, "CHUNK": 64}, 8),
):
    element_bytes = 4 if dtype == "*fp32" else 2
    width = width_of(dim)
    query_block, key_block = blocks_of(queries, width, width, element_bytes)
    data = dict.fromkeys(("query", "keys", "values", "sinks", "output"), dtype)
    types = data | beside | {"page_table": "*i64", "tokens_before": "*i64", "scaling": "fp32", "table_columns": "i32"}
    types |= {"query_tokens": "i32", "kv_heads": "i32"} | dict.fromkeys(STRIDES, "i64")
    sizes = {"GROUP": 8, "PAGE_TOKENS": 24, "KEY_DIM": dim, "VALUE_DIM": dim, "KEY_WIDTH": width, "VALUE_WIDTH": width}
    blocks = {"QUERIES": query_block, "KEYS": key_block, "SHARES": shares, "GRAIN": grain_of(element_bytes, [8 * dim, dim])}
    compiled(programs.attend_pages, types, reach | sizes | blocks | {"HAS_SINKS": shares == 1})
    if shares > 1:
        joins = {name: kind for name, kind in types.items() if name in programs.join_shares.arg_names} | {"heads": "i32"}
        constants = {"HAS_SINKS": dim == 128, "VALUE_DIM": dim, "VALUE_WIDTH": width, "SHARES": shares}
        compiled(programs.join_shares, joins, constants)
"""


@pytest.mark.requirement("A6")
def test_the_programs_compile_for_a_gpu() -> None:
    """Models' types and widths, every reach, one share and several, in the blocks that are chosen for them; shared memory within
    what a GPU of sm_86 has.

    Aligned entries are loaded 16 bytes at once, and ahead of their use; those of a program that knows nothing of strides are not.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found = [line.split() for line in result.stdout.splitlines()]
    one, several = ["attend_pages"], ["attend_pages", "join_shares"]
    assert [name for name, _ in found] == [*one, *several, *several, *one, *one, *several]
    ahead = [int(copies) > 0 for name, copies in found if name == "attend_pages"]
    assert ahead == [True, True, True, True, True, False]
