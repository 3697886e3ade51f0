"""A primary and its standby: real servers, one of which takes the place of the other when it is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from tests.servers import Database, Driver, Server, give_away

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
