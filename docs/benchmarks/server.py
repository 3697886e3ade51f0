"""The PostgreSQL server of the benchmarks, with the default settings of initdb."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests import servers

# Differences from the default: an address on loopback, and connections for 500 handlers.
SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = '{socket_directory}'
max_connections = 700
timezone = 'UTC'
log_timezone = 'UTC'
"""

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class BenchServer:
    """A running server.

    :param directory: holds the data, the log and the socket.
    :param programs: holds the programs of PostgreSQL.
    """

    directory: Path
    programs: Path
    port: int
    version: int

    def url(self, database: str) -> str:
        """Return the URL of a database, which every system's driver accepts."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        """Connect in autocommit mode."""
        return psycopg.connect(self.url(database), autocommit=True)

    @contextlib.contextmanager
    def database(self, name: str = "bench") -> Iterator[str]:
        """Create an empty database, yield its URL, and drop it."""
        with self.connect() as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
            connection.execute(f"CREATE DATABASE {name}")
        try:
            yield self.url(name)
        finally:
            with self.connect() as connection:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def checkpoint(self) -> None:
        """Run CHECKPOINT, so that the next system does not pay for the writes of the last one."""
        with self.connect() as connection:
            connection.execute("CHECKPOINT")

    def cpu(self) -> float:
        """Return the CPU seconds that the server's processes have used, including ended ones."""
        postmaster = int((self.directory / "data" / "postmaster.pid").read_text().split()[0])
        total = _cpu_of(postmaster, with_children=True)
        for child in Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += _cpu_of(int(child))
        return total

    def settings(self) -> dict[str, str]:
        """Return the version and the settings that affect the results."""
        names = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size")
        with self.connect() as connection:
            return {name: str(connection.execute(f"SHOW {name}").fetchone()[0]) for name in names}  # type: ignore[index]  # SHOW has one row


def cpu_of(process: int) -> float:
    """Return the CPU seconds that a process has used."""
    return _cpu_of(process)


def memory_of(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_of(process: int, *, with_children: bool = False) -> float:
    # After the name, which ends with the last parenthesis, are utime, stime, cutime and cstime.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    used = fields[11:15] if with_children else fields[11:13]
    return sum(map(int, used)) / _TICKS


@contextlib.contextmanager
def bench_server(version: int | None = None, *, durable: bool = True, more: str = "") -> Iterator[BenchServer]:
    """Start a server, yield it, and remove it.

    :param version: the major version; None for the newest.
    :param durable: whether commits wait for the disk.
    :param more: additional lines of ``postgresql.conf``.
    """
    installed = servers.find_installations()
    (chosen,) = [version] if version else servers.choose_versions("newest", installed)
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="sqlaqueue-bench-", dir="/tmp") as home:
        servers.give_away(Path(home))
        programs = servers._usable(installed[chosen], Path(home))
        more = more if durable else f"{more}\nfsync = off\nfull_page_writes = off"
        settings = f"{SETTINGS}port = {port}\n{more}\n"
        server = servers.Server(chosen, programs, Path(home) / "server").create(settings)
        try:
            yield BenchServer(server.directory, programs, port, chosen)
        finally:
            server.stop("immediate")
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
