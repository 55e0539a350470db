"""Ids, counts and lengths from a scheduler, of Python, NumPy or torch: whole numbers without rounding, or an error that names them."""

from __future__ import annotations

import operator
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from kvtide.device import IntArray
from kvtide.storage.errors import StorageError

_BOOLS = {torch.bool, np.dtype(np.bool_)}


def whole_number(name: str, value: SupportsIndex) -> int:
    """`value` as an int; raises `StorageError` for anything but a whole number."""
    # A bool counts as a number in Python and torch, and as a slip here.
    if not _is_bool(value):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise StorageError(f"{name} must be a whole number, found {value!r}")


def whole_numbers(name: str, values: npt.ArrayLike) -> IntArray:
    """`values` as one-dimensional int64, a copy; raises `StorageError` for anything but whole numbers that fit."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1:
        copied: IntArray = values.copy()
        return copied
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StorageError(f"{name} must be a list or array of whole numbers: {error}") from error
    # Among numbers NumPy counts a bool as one too.
    has_bools = isinstance(values, list | tuple) and any(map(_is_bool, values))
    if has_bools or array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        raise StorageError(f"{name} must be a list or array of whole numbers, found {values!r}")
    if array.size and (array.max() > np.iinfo(np.int64).max):
        raise StorageError(f"{name} must fit in 64 bits, found {values!r}")
    return np.atleast_1d(array.astype(np.int64))


def _is_bool(value: object) -> bool:
    """By itself or as an array or tensor of some; most are plain ints, which are told first."""
    return type(value) is not int and (isinstance(value, bool) or getattr(value, "dtype", None) in _BOOLS)
