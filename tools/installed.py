"""Check that every entry point of the workspace's packages is installed where this runs, and is what their pyproject.toml says.

`kvtide` finds commands, and the simulation its operations, by installed metadata. Editable installs follow the source, but not that: an entry
point that was added since is missed without a word, and a run without it looks as green as one with it.
"""

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def problems(root: Path) -> Iterator[str]:
    """One line for each entry point of a package, or of `integration`, that is not installed as it is declared."""
    for path in [*sorted(root.glob("packages/*/pyproject.toml")), root / "integration" / "pyproject.toml"]:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for group, points in project.get("entry-points", {}).items():
            installed = {point.name: point.value for point in entry_points(group=group)}
            for name, value in points.items():
                if installed.get(name) != value:
                    found = f"is {installed[name]}" if name in installed else "is not installed"
                    yield f"{path.relative_to(root)}: {value}, {name!r} of group {group!r}, {found}: run tools/dev.py"


def main(root: Path = ROOT) -> int:
    """0 where all are, else 1."""
    found = list(problems(root))
    print("\n".join(found) or "every entry point is installed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
