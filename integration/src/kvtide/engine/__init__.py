"""Scheduler loops, real models on the arena, and the command line; and `ModelledTensorDevice`, to test a scheduler of your own on.

`kvtide plan` starts without torch, so what needs it is imported when it is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtide.engine.modelled_device import ModelledTensorDevice

__all__ = ["ModelledTensorDevice"]


def __getattr__(name: str) -> object:
    """What the face exports, imported now."""
    if name in __all__:
        from kvtide.engine import modelled_device  # noqa: PLC0415  # not before

        return getattr(modelled_device, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
