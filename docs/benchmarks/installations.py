"""Install each system in an environment of its own, below build/benchmarks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

from docs.benchmarks.systems import SELF, System

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "benchmarks"
PROGRAMS = Path(__file__).parent / "systems"

_STAMP = "requirements.txt"


def directory_of(system: System) -> Path:
    """Return the directory of the environment of a system."""
    return HOME / "environments" / system.environment


def command_of(system: System) -> list[str]:
    """Return the command that runs the system's program, in the directory `ROOT`."""
    directory = directory_of(system)
    if system.is_node:
        return ["node", str(directory / system.program)]
    return [str(directory / "bin" / "python"), "-m", f"docs.benchmarks.systems.{system.environment}"]


def available(systems: Iterable[System]) -> list[System]:
    """Install missing systems, and return those that can run on this machine."""
    installed: list[System] = []
    for system in systems:
        if system.is_node and not (shutil.which("node") and shutil.which("npm")):
            print(f"{system.name}: skipped, as Node is not installed")
            continue
        _install(system)
        installed.append(system)
    return installed


def _install(system: System) -> None:
    directory = directory_of(system)
    wanted = "\n".join(system.requirements)
    stamp = directory / _STAMP
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"{system.environment}: installing {', '.join(system.requirements)}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        if system.is_node:
            _npm(directory, system.requirements)
        else:
            _pip(directory, system.requirements)
        stamp.write_text(wanted)
    if system.is_node:
        # Node searches packages in the directory of the program.
        for name in (system.program, "protocol.mjs"):
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
    """Return the version of Python of all environments."""
    return sys.version.split()[0]
