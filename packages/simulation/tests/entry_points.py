"""Distributions that are nothing but entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_entry_points(folder: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Metadata of a distribution called `name`, found once `folder` is on `sys.path`."""
    metadata = folder / f"{name.replace('-', '_')}-0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.3\nName: {name}\nVersion: 0.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
