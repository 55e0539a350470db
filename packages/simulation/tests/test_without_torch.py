"""The simulation runs where torch is not: it drives the allocator on bytes of its own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["torch"] = None
import kvtide.simulation, kvtide.simulation.command
assert not any(name.startswith("torch.") for name in sys.modules)
"""


def test_importing_the_simulation_imports_no_torch() -> None:
    """CI's slice, and other teams' machines, need no gigabyte for it."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
