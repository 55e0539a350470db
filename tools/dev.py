#!/usr/bin/env python3
"""Make the development environment `.venv` and run the project inside it; nothing but Python 3.11 is needed.

    python3 tools/dev.py demo [ARGUMENT ...]      serve real models from one arena, and check them
    python3 tools/dev.py test                     every check that CI runs
    python3 tools/dev.py run COMMAND [ARGUMENT ...]   any command inside the environment

The environment is whole or it is made again. A stamp inside `.venv` is written last and taken away before
anything in `.venv` changes, so one without a stamp was left half-made and is removed. The stamp holds two keys: when
the *interpreter* key differs the environment is made anew, when only the *packages* key differs pip runs again in
place. A lock beside `.venv`, held by the kernel and so never left behind, lets one process at a time do either.

This file must parse, and say what is wrong, on any Python from 3.6 up: no newer syntax, no newer import at the top.
"""

import argparse
import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NoReturn, Optional

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)

# What a CPU build of torch and everything else occupy, with room for pip's own temporary files. A CUDA build takes
# more; running out later is recognised too, this only says so before the long download.
NEEDED_BYTES = 4 * 2**30
FULL_BYTES = 2**20

EXIT_SETUP_FAILED = 70
EXIT_COMMAND_NOT_FOUND = 127
EXIT_INTERRUPTED = 128 + signal.SIGINT

NETWORK_SYMPTOMS = re.compile(
    r"Failed to establish a new connection|NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out"
    r"|Max retries exceeded|name resolution|nodename nor servname|Name or service not known|getaddrinfo failed"
    r"|Network is unreachable|Connection refused|Connection reset|ProxyError|SSLError|Could not fetch URL"
)
SPACE_SYMPTOMS = re.compile(
    r"No space left on device|\[Errno 28\]|not enough space on the disk|Disk quota exceeded"
)


class SetupError(Exception):
    """The environment could not be made; the message is the one line its user sees."""


class Workspace:
    """The paths of one checkout, and what its environment depends on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.stamp = self.venv / "kvtide-dev.json"
        self.log = self.venv / "kvtide-dev.log"
        self.lock = root / ".venv.lock"
        self.constraints = root / "tools" / "constraints.txt"
        self.cpu_constraints = root / "tools" / "constraints-cpu.txt"
        self.bin = self.venv / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / ("python.exe" if os.name == "nt" else "python")

    def projects(self) -> List[Path]:
        """Every folder that pip installs in editable form; `integration` is the last."""
        found = sorted(path.parent for path in self.root.glob("packages/*/pyproject.toml"))
        return [*found, self.root / "integration"]

    def keys(self) -> Dict[str, str]:
        """What a stamp must hold for the environment to be used as it is."""
        # The path counts: scripts and editable installs name it, so a moved checkout needs a new environment.
        interpreter = [str(sys.implementation.cache_tag), platform.machine(), str(self.root)]
        packages = hashlib.sha256(" ".join(self.tool_requirements()).encode())
        inputs = [folder / "pyproject.toml" for folder in self.projects()]
        for path in [*inputs, self.constraints, self.cpu_constraints, Path(__file__).resolve()]:
            packages.update(path.read_bytes() + b"\0")
        return {"interpreter": " ".join(interpreter), "packages": packages.hexdigest()}

    def stamped(self) -> Dict[str, str]:
        """The keys under which the environment was finished; empty when it was not, or is broken."""
        try:
            stamp = json.loads(self.stamp.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        # A link to an interpreter that was since removed exists as a link only, which `exists` sees through.
        return stamp if isinstance(stamp, dict) and self.python.exists() else {}

    def torch_pin(self) -> str:
        """The requirement CI installs, read from the constraints so that it is written once."""
        for line in self.constraints.read_text(encoding="utf-8").splitlines():
            if line.startswith("torch=="):
                return line.split("#")[0].strip()
        raise SetupError("{} pins no torch: expected a line 'torch==VERSION'".format(self.constraints))

    def torch_brings_triton(self) -> bool:
        """Whether the torch in the environment asks for a Triton of its own, as CUDA builds do."""
        found = self.venv.glob("lib/*/site-packages/torch-*.dist-info/METADATA")
        return any("\nRequires-Dist: triton" in path.read_text(encoding="utf-8") for path in found)

    def tool_requirements(self) -> List[str]:
        """The development tools: the `dev` group of the root pyproject.toml, groups it includes among them."""
        import tomllib  # Newer than the oldest Python that must parse this file.

        settings = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        groups = settings["dependency-groups"]

        def flat(name: str) -> Iterator[str]:
            for entry in groups[name]:
                if isinstance(entry, str):
                    yield entry
                else:
                    yield from flat(entry["include-group"])

        return list(flat("dev"))

    def inside(self) -> Dict[str, str]:
        """The process environment of a command that runs in `.venv`."""
        inside = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
        inside["VIRTUAL_ENV"] = str(self.venv)
        inside["PATH"] = os.pathsep.join([str(self.bin), *filter(None, [os.environ.get("PATH")])])
        return inside


# --- making the environment ---------------------------------------------------------------------------------------


def ensure_environment(work: Workspace, torch_index: Optional[str]) -> None:
    """Leave a finished environment, or raise `SetupError`; does nothing, quickly, when there is one."""
    if work.stamped() == work.keys():
        return
    with exclusive(work.lock):
        stamped, wanted = work.stamped(), work.keys()
        if stamped == wanted:
            return  # Made by another process while this one waited.
        if stamped.get("interpreter") == wanted["interpreter"]:
            update(work, stamped, wanted, torch_index)
        else:
            rebuild(work, wanted, torch_index)


def rebuild(work: Workspace, wanted: Dict[str, str], torch_index: Optional[str]) -> None:
    """Make the environment from nothing, removing what is there."""
    if work.venv.is_symlink() or work.venv.exists():
        say("removing .venv: it is unfinished, broken or for another Python")
        remove(work.venv)
    require_space(work.root)
    say("making .venv, which takes minutes the first time; pip's output goes to {}".format(work.log))
    work.venv.mkdir()
    # From inside a virtual environment, its base: the environment may be the one just removed.
    base = getattr(sys, "_base_executable", None) or sys.executable
    stage(work, "environment", [base, "-m", "venv", str(work.venv)])
    install(work, torch_index)
    write_stamp(work, wanted)


def update(
    work: Workspace, stamped: Dict[str, str], wanted: Dict[str, str], torch_index: Optional[str]
) -> None:
    """Bring a finished environment up to date in place."""
    say("updating .venv: a pyproject.toml, the constraints or dev.py changed")
    work.stamp.unlink()
    try:
        install(work, torch_index)
    except SetupError:
        # pip undoes what it could not finish, so the environment is the one it was: next time, update it again.
        write_stamp(work, stamped)
        raise
    write_stamp(work, wanted)


def install(work: Workspace, torch_index: Optional[str]) -> None:
    """Two pip calls: torch by its exact pin, with the build backend; then everything else in one resolution."""
    pip = [str(work.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pip += ["--constraint", str(work.constraints)]
    index = ["--extra-index-url", torch_index] if torch_index else []
    pin = work.torch_pin()
    stage(work, pin.replace("==", " "), [*pip, *index, pin, "hatchling"])
    editable = [part for folder in work.projects() for part in ("--editable", str(folder))]
    editable[-1] += "[models]"
    if not work.torch_brings_triton():
        pip += ["--constraint", str(work.cpu_constraints)]
    # The backend is there already; without isolation pip need not install it once per package.
    stage(work, "packages", [*pip, *index, "--no-build-isolation", *editable, *work.tool_requirements()])


def write_stamp(work: Workspace, keys: Dict[str, str]) -> None:
    """Mark the environment finished, in one step: a torn stamp cannot be read, so it counts as none."""
    work.stamp.write_text(json.dumps(keys, indent=1) + "\n", encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a folder, a file or a link, whichever stands there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path))
    else:
        path.unlink()


def free_bytes_at(where: Path) -> int:
    """What the file system of a folder has left for this user."""
    return shutil.disk_usage(str(where)).free


def require_space(where: Path) -> None:
    """Refuse early: torch downloads for minutes before the disk is full."""
    free_bytes = free_bytes_at(where)
    if free_bytes < NEEDED_BYTES:
        raise SetupError(
            "not enough disk space for the environment: {} has {:.1f} GiB free, about {:.0f} GiB are needed".format(
                where, free_bytes / 2**30, NEEDED_BYTES / 2**30
            )
        )


def stage(work: Workspace, name: str, command: List[str]) -> None:
    """Run one step of the set-up with its output in the log, and print a line with its seconds."""
    started = time.monotonic()
    say("{} ...".format(name))
    environment = work.inside()
    # A user whose pip settings say `user = true` would otherwise be refused inside an environment.
    environment["PIP_USER"] = "0"
    with work.log.open("ab") as log:
        log_start = log.tell()
        log.write("$ {}\n".format(" ".join(command)).encode())
        log.flush()
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=str(work.root)
        )
        try:
            status = child.wait()
        except BaseException:
            # Ctrl-C reached the child too; a signal sent to this process alone did not. Leave no pip behind the lock.
            child.terminate()
            child.wait()
            raise
    if status != 0:
        with work.log.open("rb") as log:
            log.seek(log_start)
            output = log.read().decode("utf-8", "replace")
        for line in output.splitlines()[-8:]:
            print("    " + line, file=sys.stderr)
        raise SetupError(
            "{}; the whole output is in {}".format(diagnose(work, name, status, output), work.log)
        )
    say("{} done, {:.0f} s".format(name, time.monotonic() - started))


def diagnose(work: Workspace, name: str, status: int, output: str) -> str:
    """The likely cause of a failed step, in a few words."""
    # A full disk has no room for the message either, when the log is on it.
    if SPACE_SYMPTOMS.search(output) or free_bytes_at(work.root) < FULL_BYTES:
        return "the disk became full while installing {}: free some space and run this again".format(name)
    if NETWORK_SYMPTOMS.search(output):
        return (
            "pip could not reach its package index for {}: check the network, or the proxy and index in "
            "`pip config list`, and run this again".format(name)
        )
    if "ensurepip" in output:
        return "this Python has no ensurepip (on Debian and Ubuntu: apt install python3-venv)"
    return "installing {} failed with status {}".format(name, status)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock at `path`; says for whom it waits, and waits. The kernel frees it when the holder dies."""
    with path.open("a+", encoding="utf-8") as lock:
        if not try_lock(lock):
            lock.seek(0)
            say("waiting: process {} is preparing .venv".format(lock.read().strip() or "?"))
            while not try_lock(lock):
                time.sleep(0.2)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def try_lock(lock: Any) -> bool:
    """Take the lock on an open file unless another process holds it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            lock.seek(0)
            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True


# --- the commands -------------------------------------------------------------------------------------------------


def replace_process(work: Workspace, command: List[str], cwd: Optional[Path] = None) -> int:
    """Become the command, so that its exit status and the signals it gets are its own."""
    inside = work.inside()
    program = shutil.which(command[0], path=inside["PATH"])
    if program is None:
        say("no command {!r} in .venv or on the PATH".format(command[0]))
        return EXIT_COMMAND_NOT_FOUND
    if cwd is not None:
        os.chdir(str(cwd))
    if os.name != "nt":
        os.execve(program, [program, *command[1:]], inside)
    # On Windows exec starts a second process and returns to the shell at once.
    return subprocess.call([program, *command[1:]], env=inside)


def say(text: str) -> None:
    """Progress and complaints go to stderr: what `run` prints may be read by a program."""
    print("dev.py: " + text, file=sys.stderr, flush=True)


def on_terminate(*_: Any) -> NoReturn:
    """Let a polite kill unwind like Ctrl-C, so that pip ends before the lock does."""
    raise KeyboardInterrupt


def parse(arguments: List[str]) -> argparse.Namespace:
    """The command line; whatever follows the subcommand belongs to the subcommand."""
    parser = argparse.ArgumentParser(prog="dev.py", usage="%(prog)s [--torch-index URL] {demo,test,run} ...")
    parser.description = "Make the development environment .venv when it is missing or stale, then run in it."
    parser.add_argument(
        "--torch-index", metavar="URL", help="a further package index to take torch from (a CPU build, say)"
    )
    parser.add_argument(
        "command",
        choices=["demo", "test", "run"],
        help="demo [ARGUMENT ...] | test | run COMMAND [ARGUMENT ...]",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.command == "test" and parsed.arguments:
        parser.error("test takes no arguments; for one session: dev.py run nox -s SESSION")
    if parsed.command == "run" and not parsed.arguments:
        parser.error("run needs a command")
    return parsed


def main(arguments: List[str], work: Workspace) -> int:
    """Prepare the environment, then hand over to the command; the exit status is the command's."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        say(
            "kvtide needs Python {}.{} or newer, and this is {} ({}): run this file with a newer one".format(
                OLDEST_PYTHON[0], OLDEST_PYTHON[1], platform.python_version(), sys.executable
            )
        )
        return EXIT_SETUP_FAILED
    parsed = parse(arguments)
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        ensure_environment(work, parsed.torch_index)
    except SetupError as error:
        say(str(error))
        return EXIT_SETUP_FAILED
    except KeyboardInterrupt:
        say("interrupted; the next run makes .venv again")
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            say("the disk is full ({}): free some space and run this again".format(error))
        else:
            say("could not prepare .venv: {}".format(error))
        return EXIT_SETUP_FAILED
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if parsed.command == "demo":
        return replace_process(work, ["kvtide", "demo", *parsed.arguments])
    if parsed.command == "test":
        return replace_process(work, ["nox", "--noxfile", str(work.root / "noxfile.py")], cwd=work.root)
    return replace_process(work, parsed.arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Workspace(ROOT)))
