"""Import a peer from its unpacked wheel, with stand-ins for packages that its imports name and its bookkeeping never calls.

A stand-in answers every attribute with a class that can be called, used as a decorator and subclassed, so that `from x import Y` and
`class Z(x.Y)` both work. Real packages win: the finder of stand-ins is asked last.
"""

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
import warnings
from collections.abc import Iterable, MutableSequence, Sequence
from pathlib import Path
from typing import Any

ABSENT = {
    "sglang": "torchvision torchaudio torchcodec sgl_kernel flashinfer decord soundfile tiktoken openai_harmony gguf modelscope "
    "xgrammar llguidance outlines datasets tvm_ffi torch_memory_saver interegular cuda sglang_kernel deep_gemm uvloop timm",
    "vllm": "torchvision torchaudio torchcodec openai_harmony cv2 xgrammar llguidance outlines_core lmformatenforcer depyf "
    "watchfiles mcp anthropic mistral_common tiktoken gguf opentelemetry ijson soundfile",
}
"""Packages, by peer, that the measured code imports at most."""


class _AnyMember(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return StandIn

    def __iter__(cls) -> Any:
        return iter(())


class StandIn(metaclass=_AnyMember):
    """Whatever a missing package was asked for."""

    def __init__(self, *_args: Any, **_keywords: Any) -> None:
        """It takes anything."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """As a decorator, the function as it is."""
        if len(args) == 1 and callable(args[0]) and not keywords:
            return args[0]
        return StandIn()

    def __getattr__(self, name: str) -> Any:
        """Anything."""
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return StandIn()

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        return importlib.import_module("pydantic_core").core_schema.any_schema()


class _StandInModule(types.ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012 – nobody adds to it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return StandIn


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".", maxsplit=1)[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandInModule(spec.name)
        module.__dict__["__version__"] = "0.0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def use_peer(name: str, wheel: Path) -> None:
    """Make peer `name` importable from the folder of its unpacked wheel, on one thread and without its log."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    sys.path.insert(0, str(wheel))
    # transformers looks for optional packages and remembers; it must not find stand-ins.
    looks = importlib.import_module("transformers.utils.import_utils")
    for look in [
        member for member in dir(looks) if member.startswith("is_") and member.endswith("_available")
    ]:
        try:
            getattr(looks, look)()
        except Exception:  # noqa: BLE001, S112 – some take arguments, and what they find is of no interest
            continue
    sys.meta_path.append(_Finder(ABSENT[name].split()))
