"""An environment for each contestant, under build/benchmarks: never in those of the project itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

from tests.benchmarks.contestants import SELF, Contestant

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "benchmarks"
PROGRAMS = Path(__file__).parent / "contestants"

_STAMP = "requirements.txt"


def directory_of(contestant: Contestant) -> Path:
    """Return where the environment of a contestant is, or will be."""
    return HOME / "environments" / contestant.environment


def command_of(contestant: Contestant) -> list[str]:
    """Return the start of the command that runs the contestant's program, from `ROOT`."""
    directory = directory_of(contestant)
    if contestant.is_node:
        return ["node", str(directory / contestant.program)]
    return [str(directory / "bin" / "python"), "-m", f"tests.benchmarks.contestants.{contestant.environment}"]


def available(contestants: Iterable[Contestant]) -> list[Contestant]:
    """Make the environments that are missing, and return the contestants that can run on this machine."""
    made: list[Contestant] = []
    for contestant in contestants:
        if contestant.is_node and not (shutil.which("node") and shutil.which("npm")):
            print(f"{contestant.name}: left out, there is no Node here")
            continue
        _make(contestant)
        made.append(contestant)
    return made


def _make(contestant: Contestant) -> None:
    directory = directory_of(contestant)
    wanted = "\n".join(contestant.requirements)
    stamp = directory / _STAMP
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"{contestant.environment}: installing {', '.join(contestant.requirements)}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        if contestant.is_node:
            _npm(directory, contestant.requirements)
        else:
            _pip(directory, contestant.requirements)
        stamp.write_text(wanted)
    if contestant.is_node:
        # Node looks for packages beside the program.
        for name in (contestant.program, "protocol.mjs"):
            shutil.copy(PROGRAMS / name, directory / name)


def _pip(directory: Path, requirements: Iterable[str]) -> None:
    venv.create(directory, with_pip=True, symlinks=True)
    python = directory / "bin" / "python"
    named = [["-e", str(ROOT)] if requirement == SELF else [requirement] for requirement in requirements]
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *(word for words in named for word in words)], check=True)


def _npm(directory: Path, requirements: Iterable[str]) -> None:
    (directory / "package.json").write_text('{"private": true, "type": "module"}\n')
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *requirements], cwd=directory, check=True)


def python_version() -> str:
    """Return the Python that all environments are made with."""
    return sys.version.split()[0]
