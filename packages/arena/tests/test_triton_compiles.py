"""Triton's programs compile for a GPU, without one (A6): the interpreter takes much that the compiler does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its programs are compiled where it is")

PROGRAM = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kvtide.arena import triton_programs as programs

SIZES = "row_count row_grains source_tokens source_page source_token target_tokens target_page target_token".split()

def ptx(program, types, constants, aligned):
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    alignments = {(program.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=alignments)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]
    print(f"== {program.__name__} {types.get('source')} {constants}")
    print(compiled.asm["ptx"])

rows = dict.fromkeys(SIZES, "i64") | {"source_ids": "*i64", "target_ids": "*i64"}
for word, grain in (("*i64", 2), ("*i64", 1), ("*i16", 1), ("*i8", 1)):
    for source_ids, target_ids, paged in ((True, True, False), (True, False, True), (False, True, True)):
        constants = {"HAS_SOURCE_IDS": source_ids, "HAS_TARGET_IDS": target_ids, "GRAIN": grain}
        constants |= {"SOURCE_IS_PAGED": paged, "TARGET_IS_PAGED": paged, "ROWS": 8, "COLUMNS": 256}
        ptx(programs.copy_rows, {"source": word, "target": word, **rows}, constants, ["source", "target"])
sizes = {"row_count": "i64", "row_grains": "i64", "stride": "i64"}
ptx(programs.zero_rows, {"target": "*i64", "target_ids": "*i64", **sizes}, {"GRAIN": 2, "ROWS": 1, "COLUMNS": 2048}, ["target"])
for strict in (False, True):
    types = {"table": "*i32", "ids": "*i64", "translated": "*i64", "faults": "*i64", "id_count": "i64", "entry_count": "i64"}
    ptx(programs.translate, types, {"IS_STRICT": strict, "BLOCK": 1024}, [])
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By program and compile-time arguments: what a Hopper would run."""
    folder = tmp_path_factory.mktemp("compiled")
    # Triton reads the source of a program from its file.
    program = Path(folder) / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**environment, "TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^== (.*)$", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.requirement("A6")
def test_every_program_compiles(compiled: dict[str, str]) -> None:
    """Each way in which the kernels launch them."""
    assert len(compiled) == 15
    assert all(".entry" in code for code in compiled.values())


@pytest.mark.requirement("A6")
def test_units_move_sixteen_bytes_at_a_time_and_without_a_division_a_row(compiled: dict[str, str]) -> None:
    """Bandwidth stands on it; the compiler must see that grains are aligned though no size is known to it."""
    moves = [
        code for name, code in compiled.items() if "copy_rows" in name and "'SOURCE_IS_PAGED': False" in name
    ]
    units = [code for name, code in compiled.items() if "'GRAIN': 2" in name]
    assert len(moves) == 4
    assert len(units) == 4
    for code in moves:
        # One for the program's place, none for its rows.
        assert len(re.findall(r"(?:div|rem)\.s64", code)) <= 3
    for code in units:
        assert "st.global.v2.b64" in code
        assert "st.global.b64" not in code
