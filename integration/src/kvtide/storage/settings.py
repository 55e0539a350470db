"""What the environment says, read once (decision D8): at the start of a program, which passes it down as values.

| variable | values | default |
| - | - | - |
| `KVTIDE_CHECK_LEVEL` | `off`, `warn`, `strict` | `off` |
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvtide.ledger import CheckLevel
from kvtide.storage.errors import StorageError

CHECK_LEVEL = "KVTIDE_CHECK_LEVEL"
"""Name of the variable."""


@attrs.frozen(kw_only=True)
class StorageSettings:
    """Settings of every storage that a program builds."""

    check_level: CheckLevel = CheckLevel.OFF
    """How much is checked beyond what always is: see `docs/invariants.md`."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> StorageSettings:
        """The settings that `environment`, say `os.environ`, holds now; raises `StorageError` for a value that is none."""
        level = environment.get(CHECK_LEVEL, "off")
        levels = {each.name.lower(): each for each in CheckLevel}
        if level.lower() not in levels:
            raise StorageError(f"{CHECK_LEVEL}={level!r} is no check level: use {', '.join(levels)}")
        return cls(check_level=levels[level.lower()])
