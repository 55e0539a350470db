"""Triton's programs compile for a GPU, without one (A6): the interpreter takes much that the compiler does not."""

from __future__ import annotations

import json
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

KEYS = """
import json
import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    # As much as Triton asks of one before it launches.
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self): return torch.device("cpu")

driver.set_active(Driver())
from kvtide.arena import triton_kernels
from kvtide.arena.copy_plan import copy_segments

found = {}

def launch(program, grid, beside, *arguments, **constants):
    *_, bind = program.device_caches[0]
    _, specialisation, _ = bind(*arguments, **constants)
    keys.add(f"{program.__name__} {specialisation}")
    if compiles:
        assert program.run(*arguments, grid=grid, warmup=True, **constants).asm["cubin"]

triton_kernels._launch = launch
compiles = False
ids, scratch, flat = torch.zeros(2, dtype=torch.int64), torch.zeros(1024, dtype=torch.int64), torch.zeros(99, dtype=torch.int32)
arena = torch.zeros(1 << 16, dtype=torch.uint8)
sizes = (48, 112, 1024, 8192 + 48)

keys = found["prewarmed"] = set()
for unit_bytes in sizes:
    triton_kernels.prewarm_units(arena, unit_bytes, ids, scratch)
triton_kernels.prewarm_table(flat, ids, ids.view(torch.int32))

keys = found["in service"] = set()
landing = torch.zeros(1 << 12, dtype=torch.int64)
for count in (1, 2, 3, 7):
    for unit_bytes in sizes:
        for sources, targets in ((np.arange(count) + 1, np.arange(count)), (np.arange(count)[::-1], np.arange(count)[::-1] + 1)):
            for held in (scratch, scratch[:0]):
                units = held.numel() * 8 // unit_bytes
                segments = copy_segments(sources, targets, units)
                # Ids lie behind one another, so at multiples of eight.
                triton_kernels.copy_units(
                    arena, 16, unit_bytes, landing[:count], landing[count : 2 * count], segments=segments, scratch=held
                )
        triton_kernels.zero_units(arena, 32, unit_bytes, landing[count : 2 * count])
    values = landing.view(torch.int32)[4 * count : 5 * count]
    triton_kernels.write_tokens(flat.view(-1, 1), landing[:count], values)

compiles = True
for name, dtype in (("int64", torch.int64), ("int32", torch.int32)):
    keys = found[f"translation of {name}"] = set()
    for count in (1, 2, 3, 16, 5000):
        for entries in (1, 7, 16, 48):
            for faults in (None, landing[1:2], landing[2:3]):
                # Tables lie behind one another in one buffer.
                triton_kernels.translate_ids(flat[count % 3 : count % 3 + entries], torch.zeros(count, dtype=dtype), faults=faults)
print(json.dumps({name: sorted(keys) for name, keys in found.items()}))
"""


def output_of(program: str, folder: Path) -> str:
    """What a program prints that compiles for a GPU."""
    # Triton reads the source of a program from its file.
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**environment, "TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By program and compile-time arguments: what a Hopper would run."""
    output = output_of(PROGRAM, tmp_path_factory.mktemp("compiled"))
    parts = re.split(r"^== (.*)$", output, flags=re.MULTILINE)[1:]
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


@pytest.mark.requirement("A6", "A7")
def test_by_tritons_own_key_nothing_is_compiled_in_service(tmp_path: Path) -> None:
    """Triton compiles anew for whatever its key holds: a size of one, a multiple of sixteen, an address that is not aligned.

    None of that may depend on a batch, on where ids land, or on which table of the mirrors is meant; and sizes are 64 bits.
    """
    keys = json.loads(output_of(KEYS, tmp_path))
    assert len(keys["prewarmed"]) > 10
    assert set(keys["in service"]) <= set(keys["prewarmed"])
    for ids in ("int64", "int32"):
        # Strict or not.
        assert len(keys[f"translation of {ids}"]) == 2
    assert not [key for found in keys.values() for key in found if "'i32'" in key]
