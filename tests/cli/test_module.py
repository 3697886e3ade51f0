"""``python -m sqlaqueue`` is the command ``sqlaqueue``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sqlaqueue import __version__


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, f"sqlaqueue, version {__version__}\n"),
        (["stats", "--help"], 0, "Usage: sqlaqueue stats [OPTIONS] "),
        (["nothing"], 2, "Usage: sqlaqueue [OPTIONS] COMMAND [ARGS]..."),
    ],
)
def test_the_package_runs_as_a_module(arguments: list[str], code: int, said: str) -> None:
    command = [sys.executable, "-m", "sqlaqueue", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert (result.stdout + result.stderr).startswith(said)
