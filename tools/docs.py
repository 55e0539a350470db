"""Check the markdown files: relative links resolve, and what is fenced as ```python runs.

The root's README and each distribution's has exactly one such block; a page of docs/ may build one program in several, which are
joined in order. It runs as it stands, in an empty folder, and must exit 0. Fragments that only show something are fenced as anything
else (```py, ```pycon, ```text).
"""

import concurrent.futures
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE_SECONDS = 120

FENCE = re.compile(
    r"^(?P<fence>```+|~~~+)(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\[[^\]\n]*\]\((?P<target>[^()\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#+\s+(?P<text>.*?)\s*$", re.MULTILINE)


def markdown_files(root: Path) -> list[Path]:
    """Every markdown file of the tree, environments and other hidden folders apart."""
    found = (
        path
        for path in root.rglob("*.md")
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    )
    return sorted(found)


def python_blocks(path: Path) -> list[tuple[int, str]]:
    """The blocks fenced as `python`, each with the number of its first line."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start("body")) + 1, match["body"])
        for match in FENCE.finditer(text)
        if match["language"] == "python"
    ]


def anchors(path: Path) -> set[str]:
    """The fragments that a markdown file's headings can be linked by, made as GitHub makes them."""
    headings = (match["text"] for match in HEADING.finditer(FENCE.sub("", path.read_text(encoding="utf-8"))))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(root: Path) -> Iterator[str]:
    """One line for each relative link that leads nowhere, or out of the repository."""
    for path in markdown_files(root):
        text = re.sub(
            r"`[^`\n]*`",
            "",
            FENCE.sub(lambda match: "\n" * match[0].count("\n"), path.read_text(encoding="utf-8")),
        )
        for match in LINK.finditer(text):
            file_name, _, fragment = match["target"].partition("#")
            if re.match(r"[a-z]+:", file_name):
                continue  # http:, mailto: and the like.
            target = (path.parent / file_name).resolve() if file_name else path
            where = f"{path.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}: link to {match['target']}"
            if root not in target.parents and target != root:
                yield f"{where} leaves the repository"
            elif not target.exists():
                yield f"{where}: no such file"
            elif fragment and target.suffix == ".md" and fragment not in anchors(target):
                yield f"{where}: no such heading"


def readme_problem(readme: Path) -> str | None:
    """What is wrong with a README's one example; nothing if it ran."""
    count = len(python_blocks(readme))
    if count != 1:
        return f"has {count} blocks fenced as python; expected exactly one, which runs"
    return example_problem(readme)


def example_problem(page: Path) -> str | None:
    """What is wrong with the program that a page's blocks make; nothing if it ran."""
    # Lines keep their numbers, so that a traceback names those of the page.
    program = ""
    for first_line, block in python_blocks(page):
        program += "\n" * (first_line - 1 - program.count("\n")) + block
    with tempfile.TemporaryDirectory() as folder:
        try:
            ran = subprocess.run(
                [sys.executable, "-c", program],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=EXAMPLE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"its example did not end within {EXAMPLE_SECONDS} s"
    return f"its example ended with status {ran.returncode}\n{ran.stderr}" if ran.returncode else None


def broken_examples(root: Path) -> Iterator[str]:
    """One entry for each README, the root's and each distribution's, whose example is missing or fails, and each page's of docs/."""
    readmes = [path.parent / "README.md" for path in sorted(root.glob("packages/*/pyproject.toml"))]
    readmes += [root / "integration" / "README.md", root / "README.md"]
    for path in readmes:
        if not path.exists():
            yield f"{path.relative_to(root)}: missing"
    checks: list[tuple[Path, Callable[[Path], str | None]]] = [
        (path, readme_problem) for path in readmes if path.exists()
    ]
    checks += [
        (path, example_problem) for path in sorted((root / "docs").rglob("*.md")) if python_blocks(path)
    ]
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for (path, _), problem in zip(checks, pool.map(lambda one: one[1](one[0]), checks), strict=True):
            if problem:
                yield f"{path.relative_to(root)}: {problem}"


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    found = [*broken_links(ROOT), *broken_examples(ROOT)]
    print("\n".join(found) if found else "docs: links resolve, examples run")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
