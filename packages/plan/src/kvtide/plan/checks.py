"""Checks of numbers in declarations, with one wording."""

from __future__ import annotations

import attrs

from kvtide.plan.errors import PlanError


def positive(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    """An attrs validator: an integer of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise PlanError(
            f"{type(instance).__name__}.{attribute.name} must be a positive integer, found {value!r}"
        )


def not_negative(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    """An attrs validator: an integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(
            f"{type(instance).__name__}.{attribute.name} must be an integer of 0 or more, found {value!r}"
        )


def check_positive(name: str, value: object) -> int:
    """`value` if it is an integer of 1 or more; else `PlanError` naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise PlanError(f"{name} must be a positive integer, found {value!r}")
    return value
