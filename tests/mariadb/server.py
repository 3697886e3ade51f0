"""A MariaDB server in a temporary directory, which ends with the process that has started it."""

import contextlib
import ctypes
import fcntl
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pymysql
import pytest
import sqlalchemy as sa

_DIRECTORIES = ("/usr/sbin", "/usr/libexec", "/usr/local/sbin")
_PR_SET_PDEATHSIG = 1
_START_SECONDS = 60

# On the socket of this machine. To prepare TLS took a fiftieth of a second of each connection.
pymysql.connections.SSL_ENABLED = False

# A time zone other than UTC and a level other than READ COMMITTED show whether the library depends on them. What is
# written survives the death of the server, but not of the machine.
LOG_SIZE = "--innodb-log-file-size=16M"
SETTINGS = (
    "--skip-networking",
    "--default-time-zone=+05:00",
    "--transaction-isolation=REPEATABLE-READ",
    "--innodb-flush-log-at-trx-commit=2",
    "--innodb-buffer-pool-size=64M",
    LOG_SIZE,
    "--max-connections=300",
)


def missing_program() -> str | None:
    """Return the reason why no server can be started; None if one can be."""
    for program in ("mariadbd", "mariadb-install-db"):
        if _find(program) is None:
            return f"there is no {program} on this machine: apt-get install mariadb-server"
    return None


def _find(program: str) -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", ""), *_DIRECTORIES])
    return shutil.which(program, path=path)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class MariaDBServer:
    """One server. Its databases are found by the socket, for which no user needs a password.

    :param template: where the data directory is, or will be, that the servers of a run are copies of.
    :param settings: further options of the server.
    """

    def __init__(self, home: Path, template: Path, *settings: str) -> None:
        self.template, self._settings = template, settings
        self.home, self.socket = home, home / "socket"
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self._as_user = [f"--user={self.user}"]
        # Servers that start at the same time would remove each other's temporary tables.
        self._environment = {**os.environ, "TMPDIR": str(home / "tmp")}

    def __enter__(self) -> Self:
        (self.home / "tmp").mkdir()
        # All servers of a run are copies of one, as the installation takes five seconds of a core.
        with (self.template.with_suffix(".lock")).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.template.exists():
                self._install()
        shutil.copytree(self.template, self.home / "data")
        self.start()
        return self

    def _install(self) -> None:
        data = self.home / "installed"
        install = [_find("mariadb-install-db"), "--no-defaults", *self._as_user, f"--datadir={data}", LOG_SIZE]
        options = ["--auth-root-authentication-method=normal", "--skip-test-db"]
        subprocess.run([*map(str, install), *options], check=True, capture_output=True, env=self._environment)
        shutil.move(data, self.template)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        data, log = self.home / "data", self.home / "log"
        command = [
            str(_find("mariadbd")),
            "--no-defaults",
            *self._as_user,
            f"--datadir={data}",
            *SETTINGS,
            *self._settings,
        ]
        command += [f"--socket={self.socket}", f"--pid-file={self.home / 'pid'}"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=self._environment,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - the child calls nothing that may wait for a lock
            )
        deadline = time.monotonic() + _START_SECONDS
        # It listens only when it is ready.
        while not self._answers():
            text = log.read_text(errors="replace")
            assert self._process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.02)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(self.socket)) == 0

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the server by a signal, and wait until it has."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait()

    def kill(self) -> None:
        """Kill the server, which recovers its databases when it is started again."""
        self.stop(signal.SIGKILL)

    def url(self, database: str, driver: str = "mariadb+pymysql") -> str:
        return f"{driver}://root@/{database}?unix_socket={self.socket}&charset=utf8mb4"

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """Create a database with a case-insensitive collation, as many have; drop it at the end."""
        name = f"test_{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci")
        yield name
        self._execute(f"DROP DATABASE {name}")

    def _execute(self, statement: str) -> None:
        with contextlib.closing(pymysql.connect(unix_socket=str(self.socket), user="root")) as connection:
            connection.cursor().execute(statement)

    def scalar(self, statement: str) -> Any:
        """Return one value, read in a session of its own."""
        with contextlib.closing(pymysql.connect(unix_socket=str(self.socket), user="root")) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return (cursor.fetchone() or [None])[0]


def until_one_waits(engine: sa.Engine) -> None:
    """Return when a transaction waits for the lock of another one."""
    query = sa.text("SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        # The server renews this table at most ten times a second.
        time.sleep(0.15)
        with engine.connect() as connection:
            if connection.scalar(query):
                return
    pytest.fail("no transaction waits for a lock")


@contextlib.contextmanager
def blocked(engine: sa.Engine, step: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Execute a step in a thread; enter the block when it waits for a lock, and leave it when it has ended."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(step)
        until_one_waits(engine)
        yield future
