"""Loops over bounds that a program computes, in Triton's interpreter."""

from typing import Any


def let_interpreter_loop() -> None:
    """Triton 3.6's interpreter makes loop bounds of arrays of one element as NumPy 2.4 no longer does. Once a process will do."""
    # Imported here: Triton may be missing where the rest is rehearsed, or tested.
    from triton.runtime import interpreter  # noqa: PLC0415

    patch = interpreter._patch_lang_tensor  # noqa: SLF001  # there is no public way

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched  # noqa: SLF001  # as above
