"""Reading a `config.json` with suspicion: every field that counts is checked here, once, with one wording.

A config is other people's JSON. A missing field, a `true` where a number belongs or a count of a billion must end as one line
that names the field and the value, never as a plan that is quietly wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvtide.plan.dtypes import DType
from kvtide.plan.errors import PlanError

LAYER_LIMIT = 10_000
"""More layers than this are taken for a mistake."""

NUMBER_LIMIT = 2**31 - 1
"""Larger numbers are taken for a mistake."""


class ConfigError(PlanError):
    """A `config.json` that cannot be read as a model; the text is one line that names field and value."""


@attrs.frozen
class ConfigFields:
    """The fields of one model's text part, with the defaults of its family and of the file around it."""

    values: Mapping[str, Any]
    """The JSON object that describes the text model."""

    path: str = ""
    """Where it lies in the file: empty, or `text_config.`; opens every field name in an error."""

    defaults: Mapping[str, Any] = attrs.field(factory=dict)
    """Values of fields that published configs of the family leave out."""

    layer_values: Mapping[str, Any] = attrs.field(factory=dict)
    """What `per_layer_config` says of the layer that is being read; goes before the fields of the whole model."""

    def get(self, name: str) -> Any:
        """The layer's own value, the field, or the family's default, or `None`; a JSON `null` counts as left out."""
        for values in (self.layer_values, self.values, self.defaults):
            if values.get(name) is not None:
                return values[name]
        return None

    def is_layers_own(self, name: str) -> bool:
        """Whether `per_layer_config` sets the field for the layer that is being read."""
        return self.layer_values.get(name) is not None

    def has_null(self, name: str) -> bool:
        """Whether the file sets the field to `null` on purpose."""
        return name in self.values and self.values[name] is None

    def nested(self, name: str) -> ConfigFields:
        """The object inside field `name`; no fields where it is left out."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, f"must be a JSON object, found {shown(value)}")
        return ConfigFields(value or {}, f"{self.path}{name}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigFields:
        """The same fields, with `defaults` before the family's own."""
        return attrs.evolve(self, defaults={**self.defaults, **defaults})

    def error(self, name: str, complaint: str) -> ConfigError:
        """An error about one field: `text_config.head_dim must be …`."""
        return ConfigError(f"{self.path}{name} {complaint}")

    def positive(self, name: str, *, limit: int = NUMBER_LIMIT) -> int:
        """A field that has to be there and be an integer in `[1, limit]`."""
        return self._integer(name, self.get(name), 1, limit)

    def not_negative(self, name: str) -> int:
        """A field that has to be there and be an integer of 0 or more."""
        return self._integer(name, self.get(name), 0, NUMBER_LIMIT)

    def optional_positive(self, name: str) -> int | None:
        """Like `positive`, or `None` where the field is left out."""
        return None if self.get(name) is None else self.positive(name)

    def flag(self, name: str) -> bool:
        """A field that is `true`, `false` or left out (which is false)."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"must be true or false, found {shown(value)}")
        return bool(value)

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers of 0 or more, or `None` where the field is left out."""
        values = self._list(name)
        if values is None:
            return None
        return tuple(
            self._integer(f"{name}[{place}]", value, 0, NUMBER_LIMIT) for place, value in enumerate(values)
        )

    def strings(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or `None` where the field is left out."""
        values = self._list(name)
        if values is None:
            return None
        for place, value in enumerate(values):
            if not isinstance(value, str):
                raise self.error(f"{name}[{place}]", f"must be a string, found {shown(value)}")
        return tuple(values)

    def dtype(self, *names: str) -> DType | None:
        """The first of `names` that is there, as an element type; `None` where all are left out."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            try:
                if isinstance(value, str):
                    return DType(value)
            except ValueError:
                pass
            known = ", ".join(dtype.value for dtype in DType)
            raise self.error(name, f"must be one of {known}, found {shown(value)}")
        return None

    def quotient(self, name: str, dividend: int, divisor: int, reading: str) -> int:
        """`dividend / divisor` for a field left out, which must come out even; `reading` says what was divided."""
        if dividend % divisor:
            raise self.error(name, f"is left out, and {reading} = {dividend} / {divisor} is no integer")
        return dividend // divisor

    def _integer(self, name: str, value: Any, least: int, limit: int) -> int:
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            wanted = "a positive integer" if least else "an integer of 0 or more"
            raise self.error(name, f"must be {wanted}, found {shown(value)}")
        if value > limit:
            raise self.error(name, f"must be at most {limit}, found {shown(value)}")
        return value

    def _list(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise self.error(name, f"must be a list, found {shown(value)}")
        return None if value is None else list(value)


def shown(value: object) -> str:
    """A value in an error: short enough for one line, whatever the file holds."""
    try:
        text = repr(value)
    except ValueError:
        return "an integer of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
