"""The checks that CI runs; `python3 tools/dev.py test` runs them all.

Sessions use the development environment `.venv` and cost no set-up, `tests` apart: it proves that a package works with
its declared dependencies alone, so each package gets an environment that holds its wheel, the wheels below it, and the
test tools. Where torch is declared, `.venv`'s torch is lent through one folder of links, so it is installed once:

    .nox/tests-arena/…/torch-base.pth ──> .nox/torch-base/ ──> .venv/…/{torch,sympy,…}

Sessions called `nightly_` may run in any night; a workflow runs them every week, and no push waits for them.

All sessions together take at most 15 minutes from nothing on two cores, 8 once everything is installed; each
docstring states its share. A failing session stops no other; the run ends with a summary, non-zero if any failed.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent
SCRATCH = ROOT / ".nox"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
TEST_TOOLS = nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), "test")
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
DISTRIBUTIONS = [*PACKAGES, "integration"]

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "none"
nox.options.reuse_venv = "yes"

PYTEST = ("pytest", "-q", "-n", "2")
# Two workers fill two cores; a pool of threads in each would only make them wait for one another.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def folder_of(name: str) -> Path:
    """Where a distribution lies: `integration`, or a package."""
    return ROOT / name if name == "integration" else ROOT / "packages" / name


def python(session: nox.Session, *arguments: str | Path, silent: bool = False) -> None:
    """Run this interpreter, which is that of `.venv`, or say how to start one that is."""
    if importlib.util.find_spec("importlinter") is None:
        session.error(f"runs in .venv: python3 tools/dev.py run nox -s '{session.name}'")
    session.run(sys.executable, *map(str, arguments), env=ONE_THREAD, external=True, silent=silent)


def stress(session: nox.Session, *arguments: str | Path) -> None:
    """Run `kvtide stress` as `.venv` has it, with all the operations that the workspace has; what the session is given comes last, and so
    counts.
    """
    python(session, "tools/installed.py")
    python(session, "-m", "kvtide.engine.cli", "stress", "--jobs", "2", *arguments, *session.posargs)


def seeds_of_week(day: date) -> str:
    """`A:B`, the 4,000 seeds of the week that a day is in, Monday to Sunday; no other week has any of them."""
    week = (day - date(2024, 1, 1)).days // 7
    first = 1000 + 4000 * week
    return f"{first}:{first + 4000}"


@nox.session
def lint(session: nox.Session) -> None:
    """Lint rules and format. Share: 5 s, cold or warm."""
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")


@nox.session
@nox.parametrize("package", [*DISTRIBUTIONS, "tools"], ids=[*DISTRIBUTIONS, "tools"])
def types(session: nox.Session, package: str) -> None:
    """`mypy --strict`, package by package, each reporting its own errors. Share, together: 2 min cold, 30 s warm."""
    targets = (
        [ROOT / "noxfile.py", ROOT / "tools", ROOT / "benchmarks"]
        if package == "tools"
        else [folder_of(package) / "src"]
    )
    python(session, "-m", "mypy", "--strict", "--follow-imports=silent", *targets)


@nox.session
def layers(session: nox.Session) -> None:
    """Imports point down, torch stays above, outsiders see faces only. Share: 5 s, cold or warm."""
    python(session, Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo")
    python(session, "tools/faces.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Generated pages are current, links resolve, README examples run, fragments are well named. Share: 30 s."""
    python(session, "tools/requirements.py", "--check")
    python(session, "tools/invariants.py", "--check")
    python(session, "tools/docs.py")
    for name in DISTRIBUTIONS:
        draft = ("build", "--draft", "--version", "next", "--dir", folder_of(name))
        python(session, "-m", "towncrier", *draft, silent=True)


@nox.session
def tools(session: nox.Session) -> None:
    """The tools' own tests. Share: 40 s, cold or warm."""
    python(session, "-m", *PYTEST, "tools/tests", *session.posargs)


@nox.session(venv_backend="virtualenv")
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """A package's tests against its wheel and nothing undeclared. Share, together: 6 min cold, 2.5 min warm."""
    install_alone(session, package)
    session.run(*PYTEST, str(folder_of(package) / "tests"), *session.posargs, env=ONE_THREAD)


@nox.session
def integration(session: nox.Session) -> None:
    """The whole of kvtide, real models among it, in `.venv`. Share: 4 min, cold or warm."""
    python(session, "-m", *PYTEST, "integration/tests", *session.posargs)


@nox.session
def simulate(session: nox.Session) -> None:
    """A slice of the page-safety simulation, prefixes that requests share among it. Share: 40 s, cold or warm."""
    stress(session, "--seeds", "0:100", "--ops", "300")


@nox.session(default=False)
def nightly_simulate(session: nox.Session) -> None:
    """Many more seeds, others every week; again with `-- --seeds A:B`. Failures are made minimal and kept. Share: 30 min."""
    seeds = seeds_of_week(datetime.now(tz=UTC).date())
    session.log(f"this week's seeds: {seeds}")
    stress(session, "--seeds", seeds, "--ops", "400", "--minimize", "--out", SCRATCH / "stress")


@nox.session(default=False)
def nightly_exhaustive(session: nox.Session) -> None:
    """Every sequence of operations on each tiny arena, as far as ten minutes let it; bad ones are kept. Share: 50 min."""
    command = ("exhaust", "--seconds", "600", "--jobs", "2")
    python(session, "-m", "kvtide.engine.cli", *command, "--out", SCRATCH / "exhaust", *session.posargs)


@nox.session(default=False)
def nightly_mutations(session: nox.Session) -> None:
    """Every rule weakened in turn: each must be found as docs/mutations.md says; the table is kept. Share: 15 min."""
    page, found = ROOT / "docs" / "mutations.md", SCRATCH / "mutations" / "mutations.md"
    found.parent.mkdir(parents=True, exist_ok=True)
    command = ("mutations", "--jobs", "2")
    python(session, "-m", "kvtide.engine.cli", *command, "--check", page, "--out", found, *session.posargs)


@nox.session(default=False)
def nightly_s6(session: nox.Session) -> None:
    """Every catalogue model filled to the last planned request, in every way of serving, at three budgets. Share: 20 min."""
    python(session, "-m", *PYTEST, "-m", "nightly", "integration/tests", *session.posargs)


@nox.session(default=False)
def nightly_overlap(session: nox.Session) -> None:
    """Real models under the overlap loop, 20 interleavings of each model and hook; no part of CI. Share: 50 min."""
    environment = {**ONE_THREAD, "KVTIDE_OVERLAP_SEEDS": "20"}
    folder = "integration/tests/engine"
    tests = (f"{folder}/test_overlap_models.py", f"{folder}/test_chunks_in_activations.py")
    session.run(sys.executable, "-m", *PYTEST, *tests, *session.posargs, env=environment, external=True)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Everything that needs a GPU, on one; no part of CI. Share: 10 min at most.

    `.venv` may hold a CPU build of torch: then PYTHON names the interpreter to run with, one whose torch sees the GPU.
    """
    interpreter = os.environ.get("PYTHON", sys.executable)
    session.run("bash", "tools/gpu_check.sh", *session.posargs, env={"PYTHON": interpreter}, external=True)


@nox.session(default=False)
def bench_peers(session: nox.Session) -> None:
    """Ours, SGLang and vLLM over the same work; no part of CI. Share: 25 min on busy cores, 0.5 GB of downloads once.

    The peers' environment lies in `.nox/peers`, or where `-- --environment FOLDER` says; it is never ours.
    """
    where: list[str | Path] = (
        [] if "--environment" in session.posargs else ["--environment", SCRATCH / "peers"]
    )
    python(session, "benchmarks/peers/table.py", *where, *session.posargs)


# --- environments of `tests` --------------------------------------------------------------------------------------


def install_alone(session: nox.Session, package: str) -> None:
    """Put a package's wheel, those below it and the test tools in the session's environment; quick when unchanged."""
    needed = list(dict.fromkeys(below(package)))
    wheels = [built_wheels()[name] for name in needed]
    environment = Path(session.virtualenv.location)
    site_packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(environment)}))
    base = site_packages / "torch-base.pth"
    if any(requirement.name == "torch" for name in needed for requirement in declared(name)):
        base.write_text(f"{torch_base()}\n", encoding="utf-8")
    else:
        base.unlink(missing_ok=True)

    key = hashlib.sha256(" ".join([*TEST_TOOLS, base.name * base.exists()]).encode())
    for path in [*wheels, CONSTRAINTS]:
        key.update(path.read_bytes())
    installed = environment / "installed.key"
    if installed.exists() and installed.read_text(encoding="utf-8") == key.hexdigest():
        return
    installed.unlink(missing_ok=True)
    # pip keeps an installed wheel when one of the same version comes; these change without a new version.
    session.install("--no-deps", "--force-reinstall", *map(str, wheels), silent=True)
    session.install("--constraint", str(CONSTRAINTS), *map(str, wheels), *TEST_TOOLS, silent=True)
    installed.write_text(key.hexdigest(), encoding="utf-8")


def declared(name: str) -> list[Requirement]:
    """What a distribution's pyproject.toml depends on."""
    project = nox.project.load_toml(folder_of(name) / "pyproject.toml")["project"]
    return [Requirement(text) for text in project["dependencies"]]


def below(name: str) -> Iterator[str]:
    """The package and those of this repository that it needs, itself first; one reached twice comes twice."""
    yield name
    for requirement in declared(name):
        if requirement.name.startswith("kvtide-"):
            yield from below(requirement.name.removeprefix("kvtide-"))


@functools.cache
def built_wheels() -> dict[str, Path]:
    """Build every package's wheel, once a run, with the backend that `.venv` has."""
    folder = SCRATCH / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    arguments = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    nox.command.run([sys.executable, "-m", "pip", *arguments, *(str(folder_of(name)) for name in PACKAGES)])
    return {path.name.split("-")[0].removeprefix("kvtide_"): path for path in folder.glob("*.whl")}


@functools.cache
def torch_base() -> Path:
    """A folder of links to torch, Triton and what they depend on, as `.venv` has them, and to nothing else there."""
    folder = SCRATCH / "torch-base"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Triton's interpreter is a test tool of packages that use torch; there is none for every platform.
    names = ["torch", *(["triton"] if importlib.util.find_spec("triton") else [])]
    seen = set[str]()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for entry in {file.parts[0] for file in distribution.files or []} - {os.pardir, "__pycache__"}:
            link = folder / entry
            # Several distributions may share a folder, as those of CUDA do.
            if not link.is_symlink():
                link.symlink_to(Path(str(distribution.locate_file(entry))))
        requirements = map(Requirement, distribution.requires or [])
        names += [
            each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})
        ]
    return folder
