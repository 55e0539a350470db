"""The ledger runs where no torch is (P8)."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.requirement("P8")
def test_importing_the_ledger_imports_no_torch() -> None:
    """Another engine may keep its books with it whatever its tensors are."""
    assert run("import sys, kvtide.ledger; print('torch' in sys.modules)") == "False\n"


@pytest.mark.requirement("P8")
def test_the_ledger_works_where_torch_cannot_be_imported() -> None:
    """A lazy import would pass the test above and fail the user."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from kvtide.device import NumpyDevice\n"
        "from kvtide.ledger import Consumer, ForwardSteps, PageUsage, PendingPages, clearance\n"
        "device, steps, pending = NumpyDevice(0), ForwardSteps(), PendingPages()\n"
        "usage = PageUsage(steps, 8)\n"
        "usage.fix('somebody', np.array([4]))\n"
        "assert clearance(Consumer.ZERO, usage, np.array([4, 7])).excluded.tolist() == [4]\n"
        "record = steps.forward_launched()\n"
        "steps.forward_recorded(record, event := device.record_event(device.forward_stream))\n"
        "pending.add(np.array([4, 7]), steps.newest_recorded)\n"
        "steps.host_synchronised(event)\n"
        "steps.forward_processed(record)\n"
        "print(pending.release_through(record.forward).tolist())"
    )
    assert run(code) == "[4, 7]\n"
