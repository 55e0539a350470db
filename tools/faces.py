"""Check that outsiders import a package's face, `kvtide.plan`, never a module inside it, `kvtide.plan.grouping`.

import-linter holds this for the packages' source. It cannot see what is not a package, so this file holds it for tests
(a package's own may look inside it) and for the Python blocks of markdown files; and it holds that `kvtide` stays a
namespace, which one stray `kvtide/__init__.py` would end.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from docs import markdown_files, python_blocks

ROOT = Path(__file__).resolve().parent.parent


def inner_imports(tree: ast.AST, own: set[str], modules: set[str]) -> Iterator[tuple[int, str]]:
    """Each import of a module inside a package that is not `own`: its line and its dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from kvtide.plan import grouping` reaches inside only if that is a module.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            names = [name for name in names if name == node.module or name in modules]
        else:
            continue
        for name in names:
            top, _, inner = name.removeprefix("kvtide.").partition(".")
            if name.startswith("kvtide.") and inner and top not in own:
                yield node.lineno, name


def problems(root: Path) -> Iterator[str]:
    """One line for each import, or file, that breaks the rule."""
    sources = [*sorted(root.glob("packages/*/src")), root / "integration" / "src"]
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts)
        for source in sources
        for path in source.rglob("*")
        if path.suffix == ".py" or path.is_dir()
    }
    for source in sources:
        if (source / "kvtide" / "__init__.py").exists():
            yield f"{(source / 'kvtide' / '__init__.py').relative_to(root)}: kvtide is a namespace and has no face"
        own = {path.name for path in (source / "kvtide").glob("*")}
        for path in sorted((source.parent / "tests").rglob("*.py")):
            for line, name in inner_imports(ast.parse(path.read_text(encoding="utf-8")), own, modules):
                yield f"{path.relative_to(root)}:{line}: imports {name}, which is not a face"
    for path in markdown_files(root):
        for first_line, block in python_blocks(path):
            try:
                tree = ast.parse(block)
            except SyntaxError:
                continue  # A fragment that is shown and not run.
            for line, name in inner_imports(tree, set(), modules):
                yield f"{path.relative_to(root)}:{first_line + line - 1}: imports {name}, which is not a face"


def main() -> int:
    """Print what breaks the rule; 1 if anything does."""
    found = list(problems(ROOT))
    print("\n".join(found) if found else "faces: kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
