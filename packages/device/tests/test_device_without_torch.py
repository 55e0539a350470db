"""The seam and the NumPy device run where no torch is (P8)."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.requirement("P8")
def test_importing_the_seam_imports_no_torch() -> None:
    """An allocator is tested, and a capacity asked for, on machines without torch."""
    assert run("import sys, kvtide.device; print('torch' in sys.modules)") == "False\n"


@pytest.mark.requirement("P8", "V1")
def test_the_numpy_device_works_where_torch_cannot_be_imported() -> None:
    """A lazy import would pass the test above and fail the user."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from kvtide.device import NumpyDevice, UnitGrid\n"
        "device = NumpyDevice(64)\n"
        "device.zero_units(device.schedule_stream, UnitGrid(0, 16), np.array([1]))\n"
        "device.copy_units(device.schedule_stream, UnitGrid(0, 16), np.array([1]), np.array([3]))\n"
        "device.create_mirrors({'table': 2})['table'].stage(np.array([1]), np.array([7]))\n"
        "device.upload(device.schedule_stream)\n"
        "print(device.units(UnitGrid(0, 16))[:, 0].tolist(), device.tables['table'].tolist())"
    )
    assert run(code) == "[255, 0, 255, 0] [0, 7]\n"
