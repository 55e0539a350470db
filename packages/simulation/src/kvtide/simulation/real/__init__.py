"""The simulation's operations on a device that ships, streams and kernels of a GPU among them (row X1).

What orders accesses cannot be seen there, so works are delayed at random: where a wait is missing, bytes come out wrong, often enough.
Contents, divergence of ranks, and the ledger are checked as ever. It needs `kvtide.arena`, and so torch, when it is asked for.
"""

from kvtide.simulation.real.real_device import DEVICE_KINDS, RealDevice, open_device
from kvtide.simulation.real.real_run import DeviceOpener, run_actions_on, run_seed_on

__all__ = ["DEVICE_KINDS", "DeviceOpener", "RealDevice", "open_device", "run_actions_on", "run_seed_on"]
