"""The wheel of 0.1.0, and databases."""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.programs import ROOT
from tests.shared_database import database, shared

__all__ = ["database", "shared"]

COMMIT = "6b73556c3"
"""The commit that is 0.1.0."""


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["/usr/bin/env", "git", *arguments], cwd=ROOT, capture_output=True, check=False)


def _build(source: Path, output: Path) -> None:
    """Build a wheel with what is here: the backend itself, which needs no network, or a program that fetches it."""
    if importlib.util.find_spec("hatchling") is not None:
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(output)]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "build", "--wheel", "--quiet", "--out-dir", str(output), str(source)]
    else:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(output), "."]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, f"the wheel of 0.1.0 cannot be built: {built.stdout}{built.stderr}"


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The directory of the unpacked wheel of 0.1.0, built from its commit once in each checkout."""
    if _git("cat-file", "-e", f"{COMMIT}^{{commit}}").returncode != 0:
        pytest.skip(f"the commit {COMMIT} of 0.1.0 is not here: a source archive and a shallow clone have no history")
    home = ROOT / "build" / "upgrades"
    home.mkdir(parents=True, exist_ok=True)
    unpacked = home / COMMIT
    with (home / "lock").open("w") as lock:
        # Several processes of a run need it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not unpacked.exists():
            source, output = home / "source", home / "wheel"
            for directory in (source, output):
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
            archive = _git("archive", COMMIT)
            assert archive.returncode == 0, archive.stderr
            subprocess.run(
                ["/usr/bin/env", "tar", "--extract", "--directory", str(source)], input=archive.stdout, check=True
            )
            _build(source, output)
            (found,) = output.glob("sqlaqueue-0.1.0-*.whl")
            partly = home / "partly"
            shutil.rmtree(partly, ignore_errors=True)
            with zipfile.ZipFile(found) as packed:
                packed.extractall(partly)
            partly.rename(unpacked)
    return unpacked


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no bytecode of migrations: one edited within the second it was written would run as first compiled."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
