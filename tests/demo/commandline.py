"""Run the command line in a process of its own, and make files for it to read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.programs import ROOT, run_program

COMMAND = [sys.executable, "-P", "-m", "sqlaqueue"]


def environment(**changes: str | None) -> dict[str, str]:
    """Return this process's environment with changes; None removes a variable."""
    # The demo's workers import this source tree, even if it is not installed.
    merged = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **changes}
    return {name: value for name, value in merged.items() if value is not None}


def sqlaqueue(*arguments: str | Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """Run the command line until it exits."""
    return run_program("sqlaqueue", *arguments, environment=environment(**changes))


def fill(directory: Path) -> int:
    """Create files of all kinds in ``directory``; return the number of regular ones."""
    (directory / "below" / "further").mkdir(parents=True)
    for number in range(60):
        (directory / "below" / f"file{number}").write_bytes(b"a line\n" * number + b"a rest")
    (directory / "empty").touch()
    (directory / "below" / "further" / "binary").write_bytes(bytes(range(256)) * 9000)
    Path(os.fsdecode(bytes(directory) + b"/no text: \xff\xfe [bold]\n\x1b[31m")).write_text("x")
    (directory / "link").symlink_to("empty")
    (directory / "link to a directory").symlink_to("below")
    os.mkfifo(directory / "pipe")
    return 63
